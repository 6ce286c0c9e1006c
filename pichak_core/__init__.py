"""Pichak Fleet's library: numbers of a fine-tuning run, each with the measurement behind it.

Importing it needs the standard library alone; torch, NVML and psutil are imported where they are
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pichak_core.plan import CONSTANT, Plan, Value

if TYPE_CHECKING:
    from pichak_core.tune.derive import derive

__version__ = "0.1.0"

__all__ = ["CONSTANT", "Plan", "Value", "__version__", "derive"]


def __getattr__(name: str) -> Any:
    if name == "derive":
        from pichak_core.tune.derive import derive

        return derive
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
