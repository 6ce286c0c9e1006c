"""``pichak corpus``: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pichak_coordinator.cli import app
from pichak_coordinator.cli.corpus import report
from pichak_core.tune.corpus import profile_corpus
from pichak_core.tune.corpus_profile import CorpusProfile


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "train.jsonl"
    rows = [{"prompt": "p" * (i % 300 + 1), "completion": "c" * 20} for i in range(1200)]
    lines = [json.dumps(row) for row in rows]
    lines[4] = "{broken"
    made.write_text("\n".join(lines) + "\n")
    return made


def run(*arguments: object, **environment: str):
    return CliRunner().invoke(app, ["corpus", *map(str, arguments)], env=environment)


def test_the_report_says_every_number_of_the_profile(path):
    result = run(path, "--sample", "all")
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())
    made = profile_corpus(path, "bytes", sample=None)
    assert "JSON Lines, 1,200 rows (all read, 1,199 usable), in tokens of bytes" in said
    assert f"p50 {made.token_p50}, p95 {made.token_p95}" in said
    assert "prompt_completion 1,199" in said
    assert "completion_only; completions p95 20 tokens" in said
    assert f"512: {made.seq_source}" in said
    assert "20 a row at that length" in said
    assert "1 × not valid JSON (left out), first at line 5" in said
    assert result.stderr == ""


def test_plain_when_piped(path):
    assert "\x1b" not in run(path).stdout


@pytest.mark.parametrize("width", [40, 50, 78, 120, 200])
def test_no_line_is_wider_than_the_terminal(path, width):
    made = profile_corpus(path, "bytes")
    lines = list(report(made, "a-long-name" * 3, width))
    assert max(map(len, lines)) <= width
    printed = run(path, COLUMNS=str(width)).stdout.splitlines()
    assert max(map(len, printed)) <= width


def test_the_bars_are_in_proportion(path):
    made = profile_corpus(path, "bytes", sample=None)
    lines = [line for line in report(made, "x", 100, bar="#") if "#" in line]
    assert len(lines) == len(made.histogram)
    longest = max(made.histogram, key=lambda bar: bar[2])[2]
    for line, (low, below, rows) in zip(lines, made.histogram, strict=True):
        assert line.strip().startswith(f"{low:,}-{below - 1:,} ")
        full = max(other.count("#") for other in lines)
        assert abs(line.count("#") - rows / longest * full) <= 1
        assert line.rstrip().endswith("%")
    assert lines[-1].rstrip().endswith("100.0 %")


def test_json_is_alone_on_stdout_and_complete(path):
    result = run(path, "--json", "--sample", "100", "--seed", "7", "--quantile", "0.5")
    record = json.loads(result.stdout)
    assert (record.pop("schema"), record.pop("file")) == (1, str(path))
    made = CorpusProfile.from_dict(record)
    wanted = profile_corpus(path, "bytes", sample=100, seed=7, quantile=0.5)
    assert (made.token_p50, made.seq_source) == (wanted.token_p50, wanted.seq_source)
    assert made.sampled == 100
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl"], "no file none.jsonl: check the path"),
        (["."], "is a folder: name one file in it"),
        (["empty"], "empty holds no rows"),
        (["odd"], "the only row read as JSON Lines cannot be used"),
        (["ok", "missing/tokenizer.json"], "no tokenizer at missing/tokenizer.json"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "odd").write_bytes(b'{"a": 1}')
    (tmp_path / "ok").write_bytes(b'{"text": "a"}')
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("pichak: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("option", [["--sample", "x"], ["--sample", "0"], ["--quantile", "0"]])
def test_options_out_of_range(path, option):
    result = run(path, *option)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_help_has_examples():
    result = run("--help")
    assert "pichak corpus train.jsonl" in result.stdout
    assert "--sample N|all" in result.stdout


def test_a_name_in_brackets_is_printed_as_it_is(tmp_path):
    (tmp_path / "[bold]x.txt").write_text("a\n")
    assert "[bold]x.txt: plain text" in run(tmp_path / "[bold]x.txt").stdout


def shell(line: str, path: Path) -> subprocess.CompletedProcess[str]:
    program = "from pichak_coordinator.cli import main; main()"
    return subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" corpus "$2" {line}', sys.executable, program, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("json_too", ["", "--json"])
def test_an_output_that_is_closed_or_full_is_one_sentence(path, json_too):
    closed = shell(f"{json_too} >&-", path)
    assert (closed.returncode, closed.stderr.count("\n")) == (2, 1)
    assert "standard output is closed" in closed.stderr
    if Path("/dev/full").exists():
        full = shell(f"{json_too} > /dev/full", path)
        assert (full.returncode, full.stderr.count("\n")) == (1, 1)
        assert "pichak: the output cannot be written (No space left" in full.stderr
