"""The folder that a local Ray leaves behind, and when it stays."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pytest

from pichak_coordinator.cluster import Cluster
from pichak_coordinator.ray_session import remove_session


def session(folder: Path, name: str) -> Path:
    made = folder / name
    (made / "logs" / "old").mkdir(parents=True)
    (made / "logs" / "raylet.out").write_text("it said something")
    (folder / "session_latest").unlink(missing_ok=True)
    (folder / "session_latest").symlink_to(made)
    return made


def test_it_goes_with_its_link_and_those_of_others_stay(tmp_path: Path) -> None:
    first, second = session(tmp_path, "session_1"), session(tmp_path, "session_2")
    latest = tmp_path / "session_latest"
    remove_session(first)
    assert not first.exists()
    assert latest.resolve() == second
    remove_session(latest)  # a link is no session
    assert (second / "logs" / "raylet.out").exists()
    remove_session(second)
    assert list(tmp_path.iterdir()) == []
    remove_session(second)  # nothing to do


def test_only_a_session_is_removed(tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    remove_session(mine)
    assert mine.is_dir()


class Quiet:
    def __exit__(self, *_: TracebackType | None) -> None: ...


@pytest.mark.parametrize(
    ("error", "kept"), [(None, False), (KeyboardInterrupt(), False), (RuntimeError("x"), True)]
)
def test_it_stays_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, kept: bool
) -> None:
    monkeypatch.setattr("ray.shutdown", lambda: None)
    cluster = Cluster.__new__(Cluster)
    cluster._session, cluster._quiet = session(tmp_path, "session_1"), Quiet()  # type: ignore[assignment]
    cluster.__exit__(type(error) if error else None, error, None)
    assert (tmp_path / "session_1").exists() is kept


def test_it_stays_where_ray_told_of_a_node_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.shutdown", lambda: None)
    cluster = Cluster.__new__(Cluster)
    cluster._session, cluster._quiet = session(tmp_path, "session_1"), Quiet()  # type: ignore[assignment]
    monkeypatch.setattr(cluster, "nodes", list)
    cluster.explain("n", OSError("gone"))
    cluster.close()
    assert (tmp_path / "session_1").exists()
