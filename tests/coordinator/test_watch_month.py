"""The short form of ``validation/watch_month``: a fleet that falls ill under a fake clock, watched
with the real schedule, judge and memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "validation" / "watch_month" / "month.py"


@pytest.fixture(scope="module")
def month() -> ModuleType:
    spec = importlib.util.spec_from_file_location("watch_month_month", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def test_eight_days_of_sixty_nodes(month: ModuleType) -> None:
    kinds = (("copies", month.COPY, 2), ("disk", month.DISK, 1), ("silent", "", 1))
    watched = month.Month(
        nodes=60, days=8, seed=3, noisy=6, kinds=kinds, latest_fault_day=3.5
    ).run()
    # The longest interval with its jitter, a half-hour between looks, and the second look.
    for kind, hours in (("copies", 10.6), ("silent", 10.6), ("disk", 121.0)):
        assert max(watched.hours_to_find(kind)) <= hours, kind
    assert watched.fullest_hour() <= month.BUDGET
    wrong = [each for each in watched.false if each["node"] not in watched.faults]
    assert len(wrong) <= 0.001 * watched.healthy_probes()
    again = month.Month(nodes=60, days=8, seed=3, noisy=6, kinds=kinds, latest_fault_day=3.5).run()
    assert again.digest.hexdigest() == watched.digest.hexdigest()


def test_a_fleet_without_faults_is_left_alone(month: ModuleType) -> None:
    watched = month.Month(nodes=40, days=5, seed=9, noisy=0, kinds=()).run()
    assert not watched.false
    assert not watched.events["cleared"]
