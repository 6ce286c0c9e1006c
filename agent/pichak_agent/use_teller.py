"""A process tells, once a second, what it uses of its GPUs; and a training how long its steps take.

Nothing here starts CUDA or calls the driver where torch knows the answer itself: a training may be
recording a graph, which calls from another thread can spoil.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pichak_agent.host_sampler import steady_seconds
from pichak_agent.readings import TOLD, OwnUse, ProcessId
from pichak_agent.told_use import write_use
from pichak_core.devices import Backend, gpu_memory_reader
from pichak_core.devices.processes import children, command_line, started_at
from pichak_core.devices.torch_backend import backend_for

#: The job parameter by which the agent says where to tell; no kind's own.
USE_FILE = "tell_use_to"
TELL_SECONDS = 1.0
#: Tells between two looks at what the process has started.
_LOOK_EVERY = 10
_END_SECONDS = 1.0
_NVML_READER = "pichak_core.devices.nvml_child"


def gpu_uses(
    torch: Any, *, alone: bool, backend: Callable[[str], Backend] | None = None
) -> list[OwnUse]:
    """What this process uses of each GPU on which it has a CUDA context; empty where that cannot be
    said completely.

    `torch` is the module or a fake of it. `alone`: nothing that this process started can use a GPU
    beside it; only then is the number of `processes` told. `backend` gives the backend of a device
    where the system counts a process's GPU memory (Windows): only these counters hold the context,
    so elsewhere `held_bytes` is left out, and the allocator's share never stands for it.
    """
    cuda = torch.cuda
    if not cuda.is_initialized():
        return []
    count = int(cuda.device_count())
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None and count > 1:
        return []
    uses = []
    for index in range(count):
        if has_context is not None and not has_context(index):
            continue
        uuid = str(getattr(cuda.get_device_properties(index), "uuid", "") or "")
        if not uuid:
            return []
        memory = backend(f"cuda:{index}").process_memory() if backend else None
        uses.append(
            OwnUse(
                uuid=uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
                processes=1 if alone else None,
                held_bytes=memory.dedicated if memory else None,
                allocated_bytes=int(cuda.memory_allocated(index)),
                reserved_bytes=int(cuda.memory_reserved(index)),
                memory=memory,
                memory_source=TOLD if memory else "",
            )
        )
    return uses


class UseTeller:
    """Tells into the file at `path`. `find_torch` gives torch once it is imported; `backend` as in
    `gpu_uses`."""

    def __init__(
        self,
        path: Path,
        *,
        find_torch: Callable[[], Any] = lambda: sys.modules.get("torch"),
        backend: Callable[[str], Backend] | None = None,
        is_alone: Callable[[], bool] | None = None,
        steady: Callable[[], float] = steady_seconds,
        interval_seconds: float = TELL_SECONDS,
    ) -> None:
        self._path, self._find_torch, self._steady = path, find_torch, steady
        self._backend = backend
        self._is_alone = is_alone or _started_nothing
        self._interval = interval_seconds
        self._alone = False
        self._tells = 0
        started = started_at(os.getpid())
        self._process = None if started is None else ProcessId(os.getpid(), started)
        self._ended = threading.Event()
        self._telling = threading.Lock()
        self.seconds_per_step: float | None = None

    def run(self) -> None:
        """Tell until `end`."""
        while True:
            # Torch of any version, or the disk, may fail in any way; the job must go on.
            with contextlib.suppress(Exception):
                self.tell()
            if self._ended.wait(self._interval):
                return

    def end(self) -> None:
        """Tell no more."""
        self._ended.set()

    def tell(self) -> None:
        """Tell once, if there is anything to tell. Raises what torch raises; nothing is written
        then."""
        with self._telling:  # its thread may be at it
            self._tell()

    def _tell(self) -> None:
        torch = self._find_torch()
        if self._tells % _LOOK_EVERY == 0:
            self._alone = self._is_alone()
        self._tells += 1
        gpus = [] if torch is None else gpu_uses(torch, alone=self._alone, backend=self._backend)
        if (gpus or self.seconds_per_step is not None) and not self._ended.is_set():
            write_use(
                self._path,
                gpus,
                steady_seconds=self._steady(),
                seconds_per_step=self.seconds_per_step,
                process=self._process,
            )


@contextlib.contextmanager
def telling(path: Path | None, *, steps: bool = False) -> Iterator[None]:
    """A thread tells into `path` while the block runs; without a path nothing does. Who lists the
    process removes the file. With `steps` `tell_step` is heard."""
    if path is None:
        yield
        return
    teller = UseTeller(path, backend=_counting_backend())
    thread = threading.Thread(target=teller.run, name="use", daemon=True)
    thread.start()
    if steps:
        _HEARING.append(teller)
    try:
        yield
    finally:
        if steps:
            _HEARING.remove(teller)
        teller.end()
        thread.join(_END_SECONDS)


def tell_step(seconds: float) -> None:
    """Say how long the training step that just ended took, for the watch over its pace.

    Heard inside `own_jobs.own_training` alone: elsewhere, and in the jobs of a probe, whose batch
    sizes vary, it does nothing. What is no positive finite number is not told.
    """
    if _HEARING and math.isfinite(seconds) and seconds > 0:
        _HEARING[-1].seconds_per_step = float(seconds)


#: Those that hear `tell_step`, the innermost last.
_HEARING: list[UseTeller] = []


def _counting_backend() -> Callable[[str], Backend] | None:
    """Backends that are made once; None where the system counts no process's GPU memory."""
    if gpu_memory_reader(lambda: "") is None:
        return None
    made: dict[str, Backend] = {}

    def backend(device: str) -> Backend:
        if device not in made:
            made[device] = backend_for(device)
        return made[device]

    return backend


def _started_nothing() -> bool:
    """Whether this process has started none but those that read NVML for it; False where that
    cannot be said."""
    found = children(os.getpid())
    return found is not None and all(
        any(_NVML_READER in word for word in command_line(pid)) for pid in found
    )
