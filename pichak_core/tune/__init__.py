"""The numbers of a fine-tuning plan, each derived from a measurement.

Names are loaded when they are first used: importing this package costs nothing.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pichak_core.tune.accumulation import DEFAULT_TARGET_TOKENS, MIN_UPDATES, grad_accum_for
    from pichak_core.tune.corpus import BUCKETS, CorpusProfile, profile_corpus
    from pichak_core.tune.derive import derive
    from pichak_core.tune.learning_rate import (
        DEFAULT_DIVISOR,
        FULL_FINETUNE_DIVISOR,
        LRResult,
        batch_factor,
        derive_lr,
        rewrite_scale,
    )
    from pichak_core.tune.noise import (
        DEFAULT_K,
        NoiseAccumulator,
        NoiseScale,
        measure_noise_scale,
        noise_scale_from_norms,
    )
    from pichak_core.tune.ramp import DEFAULT_HEADROOM, ramp_micro_batch
    from pichak_core.tune.ramp_result import (
        DoesNotFit,
        NoStepError,
        NotOutOfMemoryError,
        RampResult,
    )
    from pichak_core.tune.rank import RANK_LADDER, adapter_bytes_per_rank, auto_rank
    from pichak_core.tune.spill import SPILL_FACTOR, SPILL_GUARD_BYTES, forbid_spill
    from pichak_core.tune.training_step import TrainingStep

_NAMES_IN = {
    "accumulation": ("DEFAULT_TARGET_TOKENS", "MIN_UPDATES", "grad_accum_for"),
    "corpus": ("BUCKETS", "CorpusProfile", "profile_corpus"),
    "derive": ("derive",),
    "learning_rate": (
        "DEFAULT_DIVISOR",
        "FULL_FINETUNE_DIVISOR",
        "LRResult",
        "batch_factor",
        "derive_lr",
        "rewrite_scale",
    ),
    "noise": (
        "DEFAULT_K",
        "NoiseAccumulator",
        "NoiseScale",
        "measure_noise_scale",
        "noise_scale_from_norms",
    ),
    "ramp": ("DEFAULT_HEADROOM", "ramp_micro_batch"),
    "ramp_result": ("DoesNotFit", "NoStepError", "NotOutOfMemoryError", "RampResult"),
    "rank": ("RANK_LADDER", "adapter_bytes_per_rank", "auto_rank"),
    "spill": ("SPILL_FACTOR", "SPILL_GUARD_BYTES", "forbid_spill"),
    "training_step": ("TrainingStep",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = [
    "BUCKETS",
    "DEFAULT_DIVISOR",
    "DEFAULT_HEADROOM",
    "DEFAULT_K",
    "DEFAULT_TARGET_TOKENS",
    "FULL_FINETUNE_DIVISOR",
    "MIN_UPDATES",
    "RANK_LADDER",
    "SPILL_FACTOR",
    "SPILL_GUARD_BYTES",
    "CorpusProfile",
    "DoesNotFit",
    "LRResult",
    "NoStepError",
    "NoiseAccumulator",
    "NoiseScale",
    "NotOutOfMemoryError",
    "RampResult",
    "TrainingStep",
    "adapter_bytes_per_rank",
    "auto_rank",
    "batch_factor",
    "derive",
    "derive_lr",
    "forbid_spill",
    "grad_accum_for",
    "measure_noise_scale",
    "noise_scale_from_norms",
    "profile_corpus",
    "ramp_micro_batch",
    "rewrite_scale",
]


class _Package(types.ModuleType):
    """Keeps ``tune.derive`` the function: importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
