"""Whether others used the machine while it was measured: a slow number that explains itself. Pure.

What the hypervisor takes (steal) is the host's own fault and no excuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pichak_core.tune.jobs import DISTURBING_CORES


def disturbing_cores(conditions: Mapping[str, Any]) -> float | None:
    """The cores that other programs used, None when it was little or nobody knows."""
    cores = conditions.get("cpu.load_others_cores")
    if isinstance(cores, bool) or not isinstance(cores, (int, float)) or cores < DISTURBING_CORES:
        return None
    return float(cores)


def disturbed(conditions: Mapping[str, Any]) -> str:
    """The sentence that says that others were at work, "" when nobody was or nobody knows."""
    cores = disturbing_cores(conditions)
    return "" if cores is None else f"other programs used {cores:.2f} cores meanwhile"
