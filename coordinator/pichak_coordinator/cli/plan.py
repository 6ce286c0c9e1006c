"""``pichak plan``: this machine's fine-tuning plan, without a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    NothingMeasuredError,
    UserError,
    json_option,
    print_json,
)
from pichak_coordinator.cli.options import check_data, check_length, check_model, workload_options
from pichak_coordinator.cli.progress import Progress, ProgressLine
from pichak_core.plan import Plan

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
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="cpu or cuda:N [auto: the first GPU, else the CPU].",
)
@click.option(
    "--noise-seconds",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Longest time for the noise scale.",
)
@click.option(
    "--step-seconds",
    type=click.FloatRange(0.001),
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
    check_data(data)
    check_model(model)
    where = _device(device)
    check_length(model, data, asked["seq_len"])
    params: dict[str, Any] = {
        **asked,
        "data": str(data) if data else None,
        "model": model,
        "device": where,
        "memory_cap_bytes": memory_cap,
        "step_seconds": step_seconds or (3.0 if where == "cpu" else None),
    }
    made, interrupted = _derive(params)
    if not any(value.measured for value in made.values.values()):
        raise NothingMeasuredError(" ".join(made.notes) or "nothing could be measured")
    if trainer is not None:
        from pichak_core.tune.export import export_text

        click.echo(export_text(made, trainer))
    elif as_json:
        print_json({"schema": 1, "plan": made.to_dict()})
    else:
        click.echo(made.report(_width()))
    if interrupted:
        click.echo("pichak: interrupted; the plan holds what was measured", err=True)
    return EXIT_INTERRUPTED if interrupted else EXIT_DONE


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


def _derive(params: dict[str, Any]) -> tuple[Plan, bool]:
    """The plan, and whether Ctrl-C cut it short; what was measured until then is in it."""
    from pichak_core.tune.jobs import NoMicroBatchError, ramp_job, task_job
    from pichak_core.tune.row_stream import CorpusError
    from pichak_core.workload import WorkloadError

    so_far: dict[str, Any] = {}
    started = time.monotonic()
    with Progress() as progress:

        def show(text: str) -> None:
            line = ProgressLine(params["device"], text, seconds=time.monotonic() - started)
            progress.update([line])

        try:
            task = task_job(params, progress=show, partial=so_far.update)["task"]
            done = ramp_job({**params, "task": task}, progress=show, partial=so_far.update)
            return Plan.from_dict(done["plan"]), False
        except KeyboardInterrupt:
            record = so_far.get("plan") or so_far.get("task")
            made = Plan.from_dict(record) if record else Plan(model=params["model"])
            return made.note("interrupted: what is missing was not measured"), True
        except NoMicroBatchError:
            return Plan.from_dict(so_far["plan"]), False
        except (WorkloadError, CorpusError) as error:
            raise UserError(str(error)) from error


def _width() -> int:
    import shutil

    return min(100, shutil.get_terminal_size((100, 24)).columns)
