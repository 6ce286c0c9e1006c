"""Who has the GPU's memory: this agent's jobs, others, or the host's own memory in its place. Pure.

Process ids are never compared: in a container they are another namespace's, and a list may be empty
while memory is used. What a job does not tell of itself judges nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from pichak_agent.readings import GpuReading, OwnUse, Reading
from pichak_agent.watch import Key, Sign
from pichak_agent.watch_past import GpuSeen, Window
from pichak_core.plan import Scalar
from pichak_core.tune.spill import SPILL_FACTOR, spill_between

GIB = 2**30
_FEWEST = 4
#: A context of one's own is a few hundred MiB; more than this is somebody. Where the driver's
#: reserve (up to about 1 GiB) is not told apart, twice that.
FOREIGN_BYTES = GIB
#: In which a job's memory goes when it ends.
_SETTLE_SECONDS = 30.0


def foreign_memory(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """Other programs hold memory of a GPU: used - own, with the driver's reserve apart."""
    for key in window.gpus:
        there = ("gpu_shared_memory", key) in active
        recent = window.recent(key, window.lasting_seconds)
        if not _settled(window, recent, there=there):
            continue
        held = [_held(seen) for seen in recent]
        known = [bytes_ for bytes_ in held if bytes_ is not None]
        if len(known) < max(_FEWEST, 0.8 * len(recent)):
            continue
        gpu = recent[-1].gpu
        apart = gpu.number("memory_reserved_bytes") is not None
        limit = FOREIGN_BYTES * (1 if apart else 2) * (0.8 if there else 1)
        if min(known) < limit:
            continue
        most = "" if apart else "up to "
        ours = bool(recent[-1].at.own_on(gpu))
        yield Sign(
            "gpu_shared_memory",
            "warn" if ours else "info",
            key,
            f"{gpu.name}: programs that are not this agent's held {most}{min(known) / GIB:.1f} GiB "
            f"of its memory{' beside its job' if ours else ''} through the last "
            f"{window.lasting_seconds:.0f} s",
            {
                "bytes": min(known),
                "from_unix": recent[0].at.at_unix,
                "to_unix": recent[-1].at.at_unix,
            },
        )


def foreign_processes(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """More programs compute on a GPU than this agent has there."""
    for key in window.gpus:
        seen = [s for r in window.full for s in _on(r, key)][-3:]
        recent = window.recent(key, window.lasting_seconds)
        there = ("gpu_foreign_process", key) in active
        if len(seen) < 3 or not _settled(window, recent, there=there):
            continue
        extra = [_strangers(each) for each in seen]
        gpu = seen[-1].gpu
        if any(count is None or count <= 0 for count in extra):
            continue
        count = min(count for count in extra if count is not None)
        ours = bool(seen[-1].at.own_on(gpu))
        yield Sign(
            "gpu_foreign_process",
            "warn" if ours else "info",
            key,
            f"{gpu.name}: {count} program{'s' if count != 1 else ''} that "
            f"{'are' if count != 1 else 'is'} not this agent's compute{'s' if count == 1 else ''} "
            "on it",
            {
                "processes": count,
                "from_unix": seen[0].at.at_unix,
                "to_unix": seen[-1].at.at_unix,
            },
        )


def spill(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """A job's memory, or another program's, was moved to system memory, and nothing was refused.

    Pinned host memory raises the shared counter alone, and is none. Counters that are missing say
    nothing either way.
    """
    for (job, uuid), past in window.jobs.items():
        uses = [(r, use) for r in window.since(window.lasting_seconds) for use in _of(r, job, uuid)]
        gpu = _gpu(window, uuid)
        subject = gpu.key if gpu else uuid
        name = gpu.name if gpu else "the GPU"
        yield from _above_physical(uses, gpu, job)
        known = [(r, use.memory, use.memory_source) for r, use in uses if use.memory is not None]
        after = [memory for _, memory, _ in known[-3:]]
        if past.memory is None or len(after) < 3:
            continue
        told = [spill_between(past.memory, each) for each in after]
        at, last, source = known[-1]
        figures: dict[str, Scalar | None] = {
            "before_unix": past.memory_at,
            "before_dedicated_bytes": past.memory.dedicated,
            "before_shared_bytes": past.memory.shared,
            "before_reserved_bytes": past.memory.reserved,
            "dedicated_bytes": last.dedicated,
            "shared_bytes": last.shared,
            "reserved_bytes": last.reserved,
            "source": source,
            "at_unix": at.at_unix,
        }
        evidence = {key: value for key, value in figures.items() if value not in (None, "")}
        if all(each.kind == "spill" for each in told):
            moved = min(each.moved_bytes or 0 for each in told)
            yield Sign(
                "gpu_spill",
                "fail",
                subject,
                f"{name}: {moved / GIB:.1f} GiB of the job {job} lie in system memory instead of "
                "on the card, and no allocation was refused",
                {**evidence, "moved_bytes": moved},
            )
        if all(each.others_bytes for each in told):
            pushed = min(each.others_bytes or 0 for each in told)
            yield Sign(
                "gpu_pushed_out",
                "warn",
                subject,
                f"{name}: {pushed / GIB:.1f} GiB of other programs were pushed into system memory "
                f"since the job {job} began",
                {**evidence, "others_bytes": pushed},
            )


def pace(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """A job's steps take much longer than they did, also where no counter can say why."""
    for (job, uuid), past in window.jobs.items():
        there = ("throughput_collapse", job) in active
        now, best = past.pace, past.best
        if now is None or best is None or now < best.value * (1.3 if there else SPILL_FACTOR):
            continue
        gpu = _gpu(window, uuid)
        pages = gpu is not None and gpu.pages
        hint = "; this driver pages instead of refusing memory" if pages else ""
        yield Sign(
            "throughput_collapse",
            "warn",
            job,
            f"the job {job} takes {now:.3g} s a step where it took {best.value:.3g} s{hint}",
            {
                "seconds_per_step": now,
                "before_seconds_per_step": best.value,
                "before_unix": best.at_unix,
                "at_unix": window.now.at_unix,
            },
        )


def _above_physical(
    uses: Sequence[tuple[Reading, OwnUse]], gpu: GpuReading | None, job: str
) -> Iterator[Sign]:
    """What a card cannot hold lies elsewhere: the proof where there are no counters (WSL2)."""
    total = gpu.number("memory_total_bytes") if gpu else None
    held = [
        max(use.allocated_bytes or 0, use.held_bytes or 0)
        for _, use in uses
        if use.allocated_bytes is not None or use.held_bytes is not None
    ]
    if gpu is None or not total or len(held) < 3 or min(held[-3:]) <= total:
        return
    yield Sign(
        "gpu_spill",
        "fail",
        gpu.uuid,
        f"{gpu.name}: the job {job} holds {held[-1] / GIB:.1f} GiB and the card has "
        f"{total / GIB:.1f} GiB: the rest lies in system memory, and no allocation was refused",
        {"held_bytes": held[-1], "total_bytes": total, "at_unix": uses[-1][0].at_unix},
    )


def _settled(window: Window, recent: Sequence[GpuSeen], *, there: bool) -> bool:
    """Whether the readings last, and no job of this agent began or ended shortly before them."""
    if len(recent) < _FEWEST:
        return False
    span = recent[-1].at.steady_seconds - recent[0].at.steady_seconds
    if not there and span < 0.5 * window.lasting_seconds:
        return False
    gpu = recent[-1].gpu
    before = window.since(window.lasting_seconds + _SETTLE_SECONDS)
    return len({tuple(sorted(use.job for use in r.own_on(gpu))) for r in before}) == 1


def _held(seen: GpuSeen) -> float | None:
    """What others hold; None where a job of this agent does not say what it has."""
    used = seen.gpu.number("memory_used_bytes")
    own = [use.held_bytes for use in seen.at.own_on(seen.gpu)]
    if used is None or None in own:
        return None
    return max(0.0, used - sum(held or 0 for held in own))


def _strangers(seen: GpuSeen) -> int | None:
    """Programs beyond this agent's; None where that cannot be said: WDDM lists the desktop's, and a
    job may not say how many it has."""
    count = seen.gpu.facts.get("compute_processes")
    own = [use.processes for use in seen.at.own_on(seen.gpu)]
    if not isinstance(count, int) or None in own or "driver_model" in seen.gpu.facts:
        return None
    return count - sum(number or 0 for number in own)


def _on(reading: Reading, key: str) -> list[GpuSeen]:
    return [GpuSeen(reading, gpu) for gpu in reading.gpus if gpu.key == key and not gpu.lost]


def _of(reading: Reading, job: str, uuid: str) -> list[OwnUse]:
    return [use for use in reading.own if (use.job, use.uuid) == (job, uuid)]


def _gpu(window: Window, uuid: str) -> GpuReading | None:
    """The GPU of a job; the only one where the job does not say."""
    every = window.gpus
    seen = next(iter(every.values())) if not uuid and len(every) == 1 else every.get(uuid, ())
    return seen[-1].gpu if seen else None
