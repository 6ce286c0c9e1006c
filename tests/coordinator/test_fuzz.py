"""The short form of ``validation/fuzz``: messages that are not what they should be crash nothing,
and nothing of them is stored."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "validation" / "fuzz"


def assaulted(monkeypatch: pytest.MonkeyPatch, path: Path, count: int, seed: int) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("attack", "mutations"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from attack import attack  # type: ignore[import-not-found]

    found = attack(path, count, seed)
    assert found["wrong"] == []
    assert found["never_refused"] == ["replayed"]
    assert found["refused"] > 0.8 * count
    assert 0 < found["kept"] < 0.2 * count


def test_twelve_thousand_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assaulted(monkeypatch, tmp_path / "fleet.db", 12_000, 1)


@pytest.mark.slow
def test_a_hundred_thousand_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assaulted(monkeypatch, tmp_path / "fleet.db", 100_000, 2)
