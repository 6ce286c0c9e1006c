"""``pichak plan``: this machine's fine-tuning plan, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    NothingMeasuredError,
    UserError,
    json_option,
    print_json,
)
from pichak_coordinator.cli.options import (
    FiniteRange,
    busy_options,
    check_data,
    check_length,
    check_model,
    workload_options,
)
from pichak_coordinator.cli.progress import Progress, ProgressLine
from pichak_coordinator.request import MACHINE_LOCK
from pichak_coordinator.text import printable
from pichak_core.plan import Plan

if TYPE_CHECKING:
    from pichak_agent.messages import Outcome

#: A plan is not cut short: the noise scale has its own limit, and Ctrl-C keeps what is measured.
_LONGEST_SECONDS = 7 * 86400.0
#: The ramp's error that is a result: not even one row fits, and the plan says why.
_NO_BATCH = "NoMicroBatchError"

#: What --export offers; the names are those of `pichak_core.tune.export`.
_TRAINERS = (
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "axolotl",
    "llama-factory",
    "torchtune",
    "deepspeed",
)


@click.command(
    epilog="\b\nExamples:\n"
    "  pichak plan --data train.jsonl\n"
    "  pichak plan --data train.jsonl --model hf:/models/llama --method lora\n"
    "  pichak plan --data train.jsonl --export trl > config.yaml\n"
    "  pichak plan --data train.jsonl --memory-cap 600MiB --json\n"
)
@workload_options
@busy_options
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="cpu or cuda:N [auto: the first GPU, else the CPU].",
)
@click.option(
    "--noise-seconds",
    type=FiniteRange(1),
    default=60.0,
    show_default=True,
    help="Longest time for the noise scale.",
)
@click.option(
    "--step-seconds",
    type=FiniteRange(0.001),
    help="Leave out sizes whose step may take longer [default: 3 on the CPU, no limit on CUDA].",
)
@click.option("--export", "trainer", type=click.Choice(_TRAINERS), help="Print a trainer's config.")
@json_option
def plan(
    *,
    data: Path | None,
    model: str,
    device: str,
    step_seconds: float | None,
    trainer: str | None,
    as_json: bool,
    memory_cap: int | None,
    **asked: Any,
) -> int:
    """Derive this machine's fine-tuning plan by real training steps.

    The plan goes to stdout with the measurement behind every number; progress goes to stderr. For
    the machines of a cluster there is `pichak fleet profile`.
    """
    if trainer is not None and as_json:
        raise UserError("--export prints a trainer's own settings: leave out --json")
    check_data(data)
    check_model(model)
    where = _device(device)
    check_length(model, data, asked["seq_len"])
    params: dict[str, Any] = {
        **asked,
        "data": str(data.absolute()) if data else None,
        "working_folder": str(Path.cwd()),
        "model": model,
        "device": where,
        "memory_cap_bytes": memory_cap,
        "step_seconds": step_seconds or (3.0 if where == "cpu" else None),
    }
    made = _derive(params)
    if not any(value.measured for value in made.plan.values.values()):
        failed = UserError if made.error and not made.busy else NothingMeasuredError
        raise failed(made.error or " ".join(made.plan.notes) or "nothing could be measured")
    _print(made.plan, trainer, as_json)
    if made.interrupted:
        click.echo("pichak: interrupted; the plan holds what was measured", err=True)
        return EXIT_INTERRUPTED
    if made.error:
        raise UserError(f"{made.error} (the plan above holds what was measured before)")
    return EXIT_DONE


def _print(plan: Plan, trainer: str | None, as_json: bool) -> None:
    if trainer is not None:
        from pichak_core.tune.export import export_text

        click.echo(export_text(plan, trainer))
    elif as_json:
        print_json({"schema": 1, "plan": plan.to_dict()})
    else:
        click.echo(plan.report(_width()))


def _device(asked: str) -> str:
    if asked == "cpu" or (asked.startswith("cuda:") and asked[5:].isdigit()):
        return asked
    if asked not in ("auto", "cuda"):
        raise UserError(f"--device {asked}: write auto, cpu or cuda:N")
    try:
        import torch
    except ImportError as error:
        raise UserError(
            "a plan needs torch to run training steps: pip install 'pichak-fleet[torch]'"
        ) from error
    if torch.cuda.is_available():
        return "cuda:0"
    if asked == "cuda":
        raise UserError("--device cuda: torch sees no GPU here; `pichak doctor` says why")
    return "cpu"


@dataclass(frozen=True)
class _Made:
    """What the two jobs gave; `error` is the sentence of the one that failed, `busy` that it failed
    because somebody works on the GPU."""

    plan: Plan
    interrupted: bool = False
    busy: bool = False
    error: str = ""


def _derive(params: dict[str, Any]) -> _Made:
    """The plan from a task job and a ramp job, each in a process of its own as in a fleet."""
    from pichak_agent.local import run_here
    from pichak_agent.messages import Job

    task: Mapping[str, Any] | None = None
    with Progress() as progress:
        for kind in ("task", "ramp"):
            job = Job(
                f"plan-{kind}",
                1,
                kind,
                {**params, "task": task},
                _LONGEST_SECONDS,
                lock=MACHINE_LOCK,
            )
            outcome = run_here(job, on_progress=_shown(progress, params["device"]))
            task = outcome.result.get("plan") or outcome.result.get("task") or task
            if not outcome.ok:
                break
    made = Plan.from_dict(dict(task)) if task else Plan(model=params["model"])
    if outcome.ok:
        return _Made(made)
    if outcome.status == "cancelled":
        return _Made(made.note("interrupted: what is missing was not measured"), interrupted=True)
    if outcome.error.startswith(f"{_NO_BATCH}: ") and task:
        return _Made(made)
    error, busy = _said(outcome), outcome.status == "busy"
    if busy:
        error += "; --wait-if-busy SECONDS waits for it, --even-if-busy measures it anyway"
    return _Made(made.note(f"the {kind} failed: {_said(outcome)}"), busy=busy, error=error)


def _said(outcome: Outcome) -> str:
    """The sentence of what failed. What our own errors say stands without the name of their class;
    what the user's code printed last is often the reason for an end without a sentence."""
    name, _, text = outcome.error.partition(": ")
    said = text if name in ("WorkloadError", "CorpusError") else outcome.error
    printed = outcome.log_tail.strip().splitlines()
    if outcome.status not in ("timeout", "killed") and printed and not text:
        said = f"{said}; it printed last: {printed[-1]}"
    return printable(said)


def _shown(progress: Progress, device: str) -> Callable[[str], None]:
    started = time.monotonic()

    def show(text: str) -> None:
        phase, _, detail = text.partition(": ")
        progress.update([ProgressLine(device, phase, detail, time.monotonic() - started)])

    return show


def _width() -> int:
    import shutil

    return min(100, shutil.get_terminal_size((100, 24)).columns)
