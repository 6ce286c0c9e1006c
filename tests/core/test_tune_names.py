"""`pichak_core.tune` as a caller imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pichak_core import tune


@pytest.mark.parametrize("name", tune.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(tune, name) is not None
    assert name in dir(tune)


def test_the_constants_are_those_of_the_contract() -> None:
    assert tune.DEFAULT_HEADROOM == 0.12
    assert tune.SPILL_FACTOR == 1.6
    assert tune.SPILL_GUARD_BYTES == 512 * 2**20
    assert tuple(tune.RANK_LADDER) == (64, 32, 16, 8, 4)
    assert tuple(tune.BUCKETS) == (256, 512, 1024, 2048, 4096, 8192, 16384)
    assert tune.DEFAULT_TARGET_TOKENS == 65_536
    assert tune.MIN_UPDATES == 300
    assert tune.DEFAULT_K == 16
    assert tune.DEFAULT_DIVISOR == 32
    assert tune.FULL_FINETUNE_DIVISOR == 320


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'luck'"):
        _ = tune.luck
    with pytest.raises(ImportError):
        from pichak_core.tune import luck  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    "program",
    [
        "import pichak_core.tune; assert 'torch' not in sys.modules",
        "from pichak_core.tune import ramp_micro_batch, TrainingStep, forbid_spill, RampResult; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules",
        "from pichak_core.tune import derive; assert callable(derive); "
        "from pichak_core.tune import derive; assert callable(derive)",
        "import pichak_core.tune.derive; from pichak_core.tune import derive; "
        "assert callable(derive); from pichak_core.tune.derive import derive as same; "
        "assert derive is same; import pichak_core; assert pichak_core.derive is derive",
    ],
)
def test_names_are_loaded_when_they_are_used(program: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys; {program}"], check=True, timeout=120)
