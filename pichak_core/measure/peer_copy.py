"""Copies between this GPU and the others of the machine, checked by the GPU that owns the memory.

Where they do not arrive, nothing that trains on several of these GPUs can be trusted.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from pichak_core.measure import Context, Metric, Probe, register
from pichak_core.measure._peer_check import WORDS, PeerCopy, from_wire
from pichak_core.measure._sisters import others_idle
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured

VERDICT = Metric("gpu.peer_copy_verdict", "", "whether copies to and from its sister GPUs arrive")
RATE = Metric("gpu.peer_copy_mb_s", "MB/s", "slowest copy to or from a sister GPU")
METRICS = (VERDICT, RATE)

#: A pair may take so long; the first one starts a process, torch and two contexts as well.
PAIR_SECONDS, START_SECONDS = 10.0, 60.0

# Isolated from the working folder, then given this process's own path.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from pichak_core.measure._peer_check import main; main(sys.argv[1:])"
)


def check_in_children(
    pairs: Sequence[tuple[str, str]],
    *,
    words: int = WORDS,
    pair_seconds: float = PAIR_SECONDS,
    start_seconds: float = START_SECONDS,
    boot: str = _BOOT,
) -> list[PeerCopy]:
    """Every pair's result, in order. A pair at which the child hangs or dies is reported so, and
    another child goes on behind it. `OSError` when no process can be started."""
    found: list[PeerCopy] = []
    while len(found) < len(pairs):
        left = pairs[len(found) :]
        lines, verdict, ending = _run_child(left, words, start_seconds, pair_seconds, boot)
        found += lines
        if len(lines) < len(left) and not (lines and lines[-1].verdict == "fails"):
            found.append(PeerCopy(*left[len(lines)], verdict, detail=ending))
    return found


def _run_child(
    pairs: Sequence[tuple[str, str]],
    words: int,
    start_seconds: float,
    pair_seconds: float,
    boot: str,
) -> tuple[list[PeerCopy], str, str]:
    """(what it reported, the verdict on the pair it did not report, how it ended)."""
    path = [entry or str(Path.cwd()) for entry in sys.path]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", boot, json.dumps(path), json.dumps(pairs), str(words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        arrived: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=_listen, args=(child, arrived), daemon=True).start()
        found: list[PeerCopy] = []
        seconds = start_seconds + pair_seconds
        try:
            while len(found) < len(pairs):
                raw = arrived.get(timeout=seconds)
                if raw is None:
                    break
                with contextlib.suppress(ValueError, TypeError):  # a library's line in between
                    found.append(from_wire(json.loads(raw)))
                    seconds = pair_seconds
        except queue.Empty:
            return found, "hangs", f"no answer within {seconds:.0f} s"
        finally:
            code = _end(child)
        errors.seek(0)
        return found, "fails", _how(code, errors.read())


def _listen(child: subprocess.Popen[bytes], arrived: queue.Queue[bytes | None]) -> None:
    if child.stdout is not None:
        for raw in child.stdout:
            arrived.put(raw)
    arrived.put(None)


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """Its exit code once it has ended; one that is stuck in the driver does not die and is left."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(timeout=1.0)
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(timeout=2.0)
    return None


def _how(code: int | None, errors: bytes) -> str:
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    if code is None:
        return "the process does not end"
    how = f"of signal {-code}" if code < 0 else f"with exit code {code}"
    return f"the process died {how}{': ' + last[0][:300] if last else ''}"


def readings(found: Sequence[PeerCopy]) -> Iterable[Reading]:
    """Both metrics, from at least one pair. Pure."""
    bad = [one for one in found if not one.works]
    good = [one for one in found if one.works and one.mb_s is not None]
    many = len({name for one in found for name in (one.source, one.target)}) - 1
    plural = "s" if many > 1 else ""
    yield Measurement(
        VERDICT.name,
        "; ".join(one.describe() for one in bad) or f"works with {many} other GPU{plural}",
        "",
        "a pattern copied from one GPU to the other, both ways, read back by the memory's owner in "
        "a process of its own",
        detail={"pairs": [dict(vars(one)) for one in found]},
    )
    if not good:
        yield Unmeasured(RATE.name, Reason.FAILED, "no copy between two GPUs arrived")
        return
    slowest = min(good, key=lambda one: one.mb_s or 0.0)
    yield Measurement(
        RATE.name,
        slowest.mb_s or 0.0,
        RATE.unit,
        f"the slowest of {len(good)} directions, {slowest.source} to {slowest.target}, wall clock",
        detail={"direct": slowest.access},
    )


def run(context: Context) -> Iterable[Reading]:
    import torch

    own = int(context.device.partition(":")[2] or 0)
    others = others_idle(context, own, torch.cuda.device_count())
    if isinstance(others, Unmeasured):
        for metric in METRICS:
            yield Unmeasured(metric.name, others.reason, others.detail)
        return
    pairs = [pair for other in others for pair in ((f"cuda:{own}", other), (other, f"cuda:{own}"))]
    yield from readings(check_in_children(pairs))


register(
    Probe(
        "peer_copy",
        METRICS,
        run,
        {"quick": 10.0, "full": 30.0},
        needs=("torch",),
        devices=("cuda",),
    )
)
