"""How ``validation/soak`` tells a leak from noise; the experiment is in test_experiments.py."""

from __future__ import annotations

from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "validation" / "soak"


def test_the_curves_tell_a_leak_from_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 KiB a second on a process of 100 MiB are 7 MiB an hour: within the noise; 10 are not."""
    monkeypatch.syspath_prepend(str(SOAK))
    import curves

    def grown(mib_a_second: float) -> float:
        curve = curves.Curve("x", 0, 0.0)
        curve.points = [
            # A warm-up, then steps of noise that mean nothing.
            (5.0 * n, min(100.0, 40.0 + n) + (n * 7919 % 13) / 4 + 5 * n * mib_a_second, 40)
            for n in range(720)
        ]
        found = curve.growth(720.0)
        assert found is not None
        return float(found["pss_mib_growth"])

    span = 3600 * 0.8
    assert grown(0.0) == pytest.approx(0.0, abs=0.2)
    assert grown(0.01) == pytest.approx(0.01 * span, rel=0.02)
    short = curves.Curve("x", 0, 0.0)
    assert short.growth(10.0) is None
