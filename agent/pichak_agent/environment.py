"""The variables a job's process starts with. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The descriptor on which the child sends its frames.
RESULT_FD = "PICHAK_RESULT_FD"
#: Marks every process of a job, so that one which escaped its tree can be found.
MARK = "PICHAK_JOB"
#: A worker's own thread count, which Ray sets in every process it starts.
_THREADS = "OMP_NUM_THREADS"


def child_environment(
    own: Mapping[str, str],
    initial: Mapping[str, str] | None,
    *,
    params: Mapping[str, Any],
    working_folder: Path,
) -> dict[str, str]:
    """`own` (this process's variables) as a job should see them.

    Ray sets OMP_NUM_THREADS=1 inside a worker without CPUs; a measurement under it would read one
    core's speed, so it goes unless it was in `initial`, the variables this process was started
    with. Ray also hides the GPUs of such a worker: the job's `visible_devices`, where it has them,
    set CUDA_VISIBLE_DEVICES (text) or remove it (None). PYTHONPATH loses its relative entries and
    `working_folder`, where a user's own ``torch.py`` may lie.
    """
    made = dict(own)
    if initial is not None and _THREADS not in initial:
        made.pop(_THREADS, None)
    if "visible_devices" in params:
        made.pop("CUDA_VISIBLE_DEVICES", None)
        if params["visible_devices"] is not None:
            made["CUDA_VISIBLE_DEVICES"] = str(params["visible_devices"])
    entries = [
        entry
        for entry in own.get("PYTHONPATH", "").split(os.pathsep)
        if Path(entry).is_absolute() and Path(entry).resolve() != working_folder.resolve()
    ]
    made.pop("PYTHONPATH", None)
    if entries:
        made["PYTHONPATH"] = os.pathsep.join(entries)
    return made
