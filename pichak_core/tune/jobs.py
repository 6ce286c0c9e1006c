"""A fleet's two training jobs, each run in a process of its own on some node.

`task_job` measures what is the same on every machine (corpus, noise scale, weights); `ramp_job`
what this machine can do, given the task's numbers. Both return plain values for the wire.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pichak_core.measure import watched_conditions
from pichak_core.plan import CONSTANT, Plan
from pichak_core.tune import parts
from pichak_core.tune.first_guess import FirstGuess
from pichak_core.tune.parts import NO_BATCH
from pichak_core.tune.ramp_story import rows_text
from pichak_core.workload import Settings, Workload, WorkloadError, open_workload

Say = Callable[[str], None]
Partial = Callable[[dict[str, Any]], None]

#: From here on what else ran is told beside the rates of a ramp.
DISTURBING_CORES = 0.25
DISTURBING_STEAL_PERCENT = 2.0

#: Largest micro-batch that a ramp tries where nothing else bounds it.
MOST_ROWS = 512


class NoMicroBatchError(RuntimeError):
    """Not even one row fits: what it died in, and what to cut next."""


def task_job(params: Mapping[str, Any], *, progress: Say, partial: Partial) -> dict[str, Any]:
    """The numbers of the task: ``{"task": plan}``.

    `params` holds the fields of `Settings`, and ``factory``, ``seq_quantile``, ``sample`` and
    ``noise_seconds``. What a workload cannot give becomes a note. Raises `WorkloadError` and
    `CorpusError`, and what the user's own code raises.
    """
    settings = settings_of(params)
    plan = Plan(model=settings.model, data=settings.data or "", device=settings.device)

    def done_so_far() -> None:
        partial({"task": plan.to_dict()})

    with _opened(settings, plan) as workload:
        _corpus(plan, workload, settings, params, progress)
    done_so_far()
    settings = replace(settings, seq_len=_length(plan, settings))
    with _opened(settings, plan) as workload:
        if "named_weights" not in workload.missing:
            progress("norms of the trained weights")
            parts.weights(plan, workload.named_weights())
            done_so_far()
        if "grad_fn" not in workload.missing:
            progress("noise scale: first micro-batch")
            try:
                parts.noise(
                    plan,
                    workload.grad_fn,
                    budget_seconds=float(params.get("noise_seconds") or 60.0),
                    say=progress,
                )
            # The user's code may raise anything; the ramp does not hang on it.
            except Exception as error:  # noqa: BLE001
                plan.note(f"no noise scale: grad_fn raised {type(error).__name__}: {error}")
    done_so_far()
    return {"task": plan.to_dict()}


def ramp_job(params: Mapping[str, Any], *, progress: Say, partial: Partial) -> dict[str, Any]:
    """This machine's plan: ``{"plan": plan, "ramp": rungs}``.

    `params` holds the fields of `Settings`, the task's plan in ``task`` (or None), ``limit``,
    ``headroom``, ``memory_cap_bytes``, ``target_tokens``, ``step_seconds`` and ``first_guess``
    (`FirstGuess.as_dict()` of an identical device's ramp, or None). Raises `NoMicroBatchError`
    when not even one row fits; the partial result then holds the rest.
    """
    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.tune.training_step import TrainingStep

    settings = settings_of(params)
    task = params.get("task")
    plan = Plan.from_dict(dict(task)) if task else Plan(settings.model, settings.data or "")
    settings = replace(settings, seq_len=_length(plan, settings))
    target = _whole(params.get("target_tokens"))
    known = params.get("first_guess")
    guess = FirstGuess.from_dict(known) if known else None
    backend = backend_for(settings.device, cap_bytes=_whole(params.get("memory_cap_bytes")))
    plan.device = f"{settings.device}, {backend.describe()}"
    result: dict[str, Any] = {"plan": plan.to_dict()}
    with _opened(settings, plan) as workload:
        progress("building the model and one training step")
        length = workload.seq_len
        full_finetune = settings.method == "full"
        told: list[str] = []

        def on_rung(line: str) -> None:
            """What would be known if the ramp were ended here, by its own code or from outside."""
            progress(line)
            told.append(line)
            made = Plan.from_dict(plan.to_dict())
            made.note(f"the ramp did not come to its end; it ran {'; '.join(told)}")
            parts.learning_rate(made, full_finetune=full_finetune)
            partial({"plan": made.to_dict()})

        with (
            watched_conditions(settings.device) as conditions,
            TrainingStep(workload.loss_of, workload.optimizer) as step,
        ):
            found = parts.ramp(
                plan,
                step,
                tokens_per_row=length,
                backend=backend,
                headroom=float(params.get("headroom", 0.12)),
                limit=_whole(params.get("limit")) or MOST_ROWS,
                rows=_whole(plan.as_dict().get("rows_total")),
                on_progress=on_rung,
                step_seconds_limit=params.get("step_seconds") or None,
                first_guess=guess,
            )
        _note_disturbance(plan, conditions)
        if guess is not None and found is not None and found.tried[0].batch > 1:
            plan.note(
                f"the ramp began near what the peaks of {guess.where or 'an identical device'} "
                f"foretold, with {rows_text(found.tried[0].batch)}; every size in it ran here"
            )
        if found is not None:
            rungs = {**found.as_dict(), "conditions": conditions}
            result |= {"ramp": rungs, "plan": plan.to_dict()}
            partial(result)
        parts.batch(plan, target)
        parts.learning_rate(plan, full_finetune=full_finetune)
        if settings.method == "lora" and "adapter_shapes" not in workload.missing:
            shapes = workload.adapter_shapes()
            parts.rank(plan, shapes, ramp_result=found, ran_with_rank=settings.lora_rank)
    result |= {"plan": plan.to_dict()}
    if found is None:
        partial(result)
        raise NoMicroBatchError(next(note for note in plan.notes if note.startswith(NO_BATCH)))
    return result


def settings_of(params: Mapping[str, Any]) -> Settings:
    """The workload's settings from a job's params; ``factory`` joins a shipped file's path."""
    model = str(params.get("model") or "")
    if params.get("factory"):
        model = f"{model}:{params['factory']}"
    known = {
        name: params[name]
        for name in ("data", "device", "method", "seq_len", "lora_rank", "seed", "dtype")
        if params.get(name) is not None
    }
    checkpointing = bool(params.get("gradient_checkpointing"))
    return Settings(model=model, gradient_checkpointing=checkpointing, **known)


@contextlib.contextmanager
def _opened(settings: Settings, plan: Plan) -> Iterator[Workload]:
    """The workload, closed afterwards; what it cannot give is noted in the plan."""
    workload = open_workload(settings)
    try:
        for note in workload.missing.values():
            plan.note(note)
        yield workload
    finally:
        workload.close()


def _corpus(
    plan: Plan, workload: Workload, settings: Settings, params: Mapping[str, Any], say: Say
) -> None:
    data = workload.data or settings.data
    if not data:
        plan.note("no corpus was given (--data), so its numbers and the noise scale are missing")
        return
    if workload.tokenizer is None:
        plan.note("the workload has no tokenizer, so the corpus was not profiled")
        return
    parts.corpus(
        plan,
        data,
        workload.tokenizer,
        sample=params.get("sample", 512),
        quantile=float(params.get("seq_quantile") or 0.95),
        seed=settings.seed,
        buckets=(settings.seq_len,) if settings.seq_len else None,
        say=say,
    )


def _length(plan: Plan, settings: Settings) -> int | None:
    """The run's longest length: what the user insists on, else the corpus's."""
    if settings.seq_len is not None:
        plan.set("seq_len", settings.seq_len, f"{CONSTANT}: given by the user", unit="tokens")
        return settings.seq_len
    return int(plan.seq_len) if "seq_len" in plan else None


def _note_disturbance(plan: Plan, conditions: Mapping[str, Any]) -> None:
    """A slow number is explained by what else ran, or the machine is accused for its neighbours."""
    others = float(conditions.get("cpu.load_others_cores") or 0.0)
    steal = float(conditions.get("cpu.steal_percent") or 0.0)
    if others >= DISTURBING_CORES or steal >= DISTURBING_STEAL_PERCENT:
        plan.note(
            f"disturbed: while the ramp was timed, other processes used {others:.2f} cores and the "
            f"hypervisor kept {steal:.1f} % of this machine's time; its rates are those of a busy "
            "machine"
        )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


__all__ = ["NoMicroBatchError", "WorkloadError", "ramp_job", "settings_of", "task_job"]
