from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.files import MAX_CHUNK_BYTES, FileError, FileStore
from pichak_agent.messages import file_param

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "files").mkdir()
    return FileStore(tmp_path / "files", keep_free_bytes=0)


def ship(store: FileStore, content: bytes = CONTENT, size: int = 1000) -> None:
    digest, held = hashlib.sha256(content).hexdigest(), 0
    while True:
        held = store.put(digest, held, content[held : held + size], len(content))
        if held == len(content):
            return


def reference(path: str = "", name: str = "train.py", digest: str = DIGEST) -> dict[str, Any]:
    return {"file": {"sha256": digest, "name": name, "path": path}}


def test_a_file_arrives_in_pieces(store: FileStore, tmp_path: Path) -> None:
    assert not store.has(DIGEST)
    ship(store)
    assert store.has(DIGEST)
    made = store.resolve({"model": reference(), "n": 1}, tmp_path / "job")
    assert made["n"] == 1
    assert Path(made["model"]).name == "train.py"
    assert Path(made["model"]).read_bytes() == CONTENT
    store.forget()
    assert not store.has(DIGEST)


def test_an_empty_file_arrives(store: FileStore) -> None:
    assert store.put(EMPTY, 0, b"", 0) == 0
    assert store.has(EMPTY)


def test_pieces_that_come_twice_or_too_early_do_no_harm(store: FileStore) -> None:
    total = len(CONTENT)
    assert store.put(DIGEST, 500, CONTENT[500:600], total) == 0
    assert store.put(DIGEST, 0, CONTENT[:500], total) == 500
    assert store.put(DIGEST, 0, CONTENT[:500], total) == 500
    assert store.put(DIGEST, 400, CONTENT[400:900], total) == 900
    assert store.put(DIGEST, 900, CONTENT[900:], total) == total
    assert store.put(DIGEST, 900, CONTENT[900:], total) == total
    assert store.has(DIGEST)


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"z", CONTENT + b"z"])
def test_a_file_that_is_another_is_refused(store: FileStore, content: bytes) -> None:
    with pytest.raises(FileError, match="not the file announced"):
        store.put(DIGEST, 0, content, len(CONTENT))
    assert not store.has(DIGEST)
    ship(store)
    assert store.has(DIGEST)


def test_limits(tmp_path: Path) -> None:
    small = FileStore(tmp_path, max_file_bytes=100, keep_free_bytes=0)
    with pytest.raises(FileError, match="may have 100"):
        small.put(DIGEST, 0, b"x", 101)
    with pytest.raises(FileError, match="may have"):
        FileStore(tmp_path).put(DIGEST, 0, bytes(MAX_CHUNK_BYTES + 1), MAX_CHUNK_BYTES + 1)
    full = FileStore(tmp_path, keep_free_bytes=1 << 60)
    with pytest.raises(FileError, match="do not fit"):
        full.put(DIGEST, 0, b"x", 1)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "a" * 63, "é" * 64])
def test_a_digest_is_no_path(store: FileStore, digest: str) -> None:
    for call in (
        lambda: store.has(digest),
        lambda: store.put(digest, 0, b"", 0),
        lambda: store.resolve({"f": reference(digest=digest)}, Path("/nonexistent")),
    ):
        with pytest.raises(FileError, match="SHA-256"):
            call()


def test_the_nodes_own_copy_is_used_where_it_is_the_same(store: FileStore, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_bytes(CONTENT)
    assert store.has(DIGEST, str(own))
    assert store.resolve({"f": reference(str(own))}, tmp_path / "job") == {"f": str(own)}
    assert file_param(own) == reference(str(own), "own.py")
    own.write_bytes(CONTENT[::-1])
    assert not store.has(DIGEST, str(own))
    with pytest.raises(FileError, match="not on this node"):
        store.resolve({"f": reference(str(own))}, tmp_path / "job")
    ship(store)
    found = store.resolve({"f": reference(str(own))}, tmp_path / "job")["f"]
    assert Path(found).read_bytes() == CONTENT
    assert own.read_bytes() == CONTENT[::-1]


def test_references_are_found_at_any_depth(store: FileStore, tmp_path: Path) -> None:
    ship(store)
    params = {"a": [{"b": reference(name="x")}, 1], "file": "a word", "c": {"file": "another"}}
    made = store.resolve(params, tmp_path / "job")
    assert Path(made["a"][0]["b"]).read_bytes() == CONTENT
    assert (made["a"][1], made["file"], made["c"]) == (1, "a word", {"file": "another"})


@pytest.mark.parametrize("name", ["../../evil.py", "/etc/evil.py", "a/b/../../evil.py"])
def test_a_name_stays_in_the_jobs_folder(store: FileStore, tmp_path: Path, name: str) -> None:
    ship(store)
    found = Path(store.resolve({"f": reference(name=name)}, tmp_path / "job")["f"])
    assert found.name == "evil.py"
    assert found.resolve().is_relative_to(tmp_path / "job")


@pytest.mark.parametrize("name", ["", "..", "/"])
def test_a_name_that_is_none_is_refused(store: FileStore, tmp_path: Path, name: str) -> None:
    ship(store)
    with pytest.raises(FileError, match="not a file's name"):
        store.resolve({"f": reference(name=name)}, tmp_path / "job")


def test_a_job_that_writes_to_its_copy_harms_no_other(store: FileStore, tmp_path: Path) -> None:
    ship(store)
    first = Path(store.resolve({"f": reference()}, tmp_path / "one")["f"])
    first.write_bytes(b"changed")
    second = Path(store.resolve({"f": reference()}, tmp_path / "two")["f"])
    assert second.read_bytes() == CONTENT


def test_a_shipped_file_that_was_changed_is_not_given_out(store: FileStore, tmp_path: Path) -> None:
    ship(store)
    stored = tmp_path / "files" / DIGEST
    stored.write_bytes(b"changed")
    os.utime(stored, (1, 1))
    with pytest.raises(FileError, match="not on this node"):
        store.resolve({"f": reference()}, tmp_path / "job")
    assert not store.has(DIGEST)
