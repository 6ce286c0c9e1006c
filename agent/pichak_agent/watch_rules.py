"""Every rule of the watch, in the order in which they look."""

from __future__ import annotations

from collections.abc import Sequence

from pichak_agent.watch import Rule


def every_rule() -> Sequence[Rule]:
    """Fresh rules."""
    return ()
