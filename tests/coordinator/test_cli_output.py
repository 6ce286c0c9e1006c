"""Where output goes: a reader that leaves early, and encodings that have not every character."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pichak_coordinator.store import Store

PICHAK = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history whose listing is longer than a pipe holds (64 KiB)."""
    path = tmp_path_factory.mktemp("output") / "fleet.db"
    with Store.open(path) as made:
        run = made.begin_run("fleet profile", {"model": "µ-net – ±1"})
        hellos = [{"machine_id": f"m{i}", "host": f"host-{i:05d}-µ"} for i in range(3000)]
        nodes = made.record_nodes(run, hellos)
        with made.atomically():
            for hello, node in zip(hellos, nodes, strict=True):
                made.record_node(run, hello, node=node, error="it never answered – not once")
        made.finish_run(run)
    return path


@pytest.mark.parametrize(
    "command",
    [
        "fleet nodes --all",
        "fleet nodes --json",
        "fleet nodes --format csv",
        "fleet nodes --format md",
        "fleet compare --all",
        "fleet compare --json",
        "fleet compare --format csv",
        "fleet compare --format md",
    ],
)
def test_a_reader_that_leaves_early_is_no_error(store: Path, command: str) -> None:
    """As in `pichak … | head -1`."""
    process = subprocess.Popen(
        [*PICHAK, *command.split(), "--store", str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    code = process.wait(60)
    process.stderr.close()
    assert said == ""
    # Nothing was measured in this run, which `compare` would say by 1 at its end.
    assert code in (0, 1)


def told(store: Path, *words: str, encoding: str) -> bytes:
    env = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"}
    done = subprocess.run(
        [*PICHAK, *words, "--store", str(store)], capture_output=True, env=env, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert b"Error" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_an_encoding_lacks_is_written_plain(store: Path, encoding: str) -> None:
    text = told(store, "fleet", "compare", encoding=encoding).decode(encoding)
    assert "3,000 machines" in text
    assert "it never answered - not once" in text or encoding == "cp1252"
    listed = told(store, "fleet", "history", encoding=encoding).decode(encoding)
    assert "-net" in listed


def test_json_keeps_every_letter_in_any_encoding(store: Path) -> None:
    texts = [told(store, "fleet", "nodes", "--json", encoding=e) for e in ("ascii", "utf-8")]
    assert texts[0].isascii()
    one, other = (json.loads(text) for text in texts)
    assert one == other
    assert one["nodes"][0]["host"].endswith("-µ")
