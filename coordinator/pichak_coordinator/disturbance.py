"""Whether others used the machine while it was measured: a slow number that explains itself. Pure.

What the hypervisor takes (steal) is the host's own fault and no excuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pichak_core.tune.jobs import DISTURBING_CORES


def disturbed(conditions: Mapping[str, Any]) -> str:
    """The sentence that says who else was at work, "" when nobody was or nobody knows."""
    cores = conditions.get("cpu.load_others_cores")
    if isinstance(cores, bool) or not isinstance(cores, (int, float)) or cores < DISTURBING_CORES:
        return ""
    return f"other programs used {cores:.2f} cores meanwhile"
