"""Which stored run a name means."""

from __future__ import annotations

import pytest

from pichak_coordinator.cli.common import UserError
from pichak_coordinator.cli.run_choice import chosen_run
from pichak_coordinator.records import Run

RUNS = [
    Run("20261202T01-c", 3.0, None, "net"),
    Run("20261201T01-b", 2.0, None, "import", {"name": "friday"}),
    Run("20261130T01-a", 1.0, None, "fleet profile"),
]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        # A network test compares no machines.
        ("", "20261201T01-b"),
        ("20261202T01-c", "20261202T01-c"),
        ("20261130", "20261130T01-a"),
        ("friday", "20261201T01-b"),
    ],
)
def test_an_id_its_beginning_or_a_name(name: str, run: str) -> None:
    assert chosen_run(RUNS, name) == run


@pytest.mark.parametrize(
    ("name", "said"), [("2026", "3 runs begin"), ("monday", "no run 'monday'")]
)
def test_none_or_several_are_told(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        chosen_run(RUNS, name)
    with pytest.raises(UserError, match="no run is stored"):
        chosen_run([], name)
