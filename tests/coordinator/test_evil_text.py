"""What a node sends is shown by every reading command in every form, and obeyed by nothing."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app
from pichak_coordinator.records import Finding
from pichak_coordinator.store import Store
from pichak_coordinator.text import csv_cell, json_text
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan, Value

EVIL = "=cmd|'/c x'!A1\x1b[2J\x1b]0;t\x07\x9b31m\u202ey\u2066z\u2028\x7f\r[bold]<script>1</script>"
OBEYED = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes that put it into everything that a node can say."""
    where = tmp_path_factory.mktemp("evil") / "fleet.db"
    with Store.open(where) as store:
        run = store.begin_run("fleet profile", {"model": EVIL, "name": EVIL, "data": EVIL})
        hellos: list[dict[str, Any]] = [
            {
                "machine_id": f"m{i}",
                "host": f"{EVIL}{i}",
                "address": EVIL,
                "cpu_model": EVIL,
                "versions": {"pichak": EVIL},
                "labels": {EVIL: EVIL},
                "gpus": [{"index": 0, "uuid": f"GPU-{i}{EVIL}", "name": EVIL}],
                "gpu_uuids": [f"GPU-{i}{EVIL}"],
            }
            for i in range(2)
        ]
        for number, node in enumerate(store.record_nodes(run, hellos)):
            job = Job(f"{run}-{number}", 1, "ramp", {"device": "cuda:0"}, 60.0)
            store.record_job(run, job, node=node)
            fingerprint = Fingerprint()
            for reading in (
                Measurement("gpu.name", EVIL, "", EVIL),
                Measurement(f"gpu.{EVIL}_mb_s", 7.0, EVIL, EVIL, conditions={EVIL: EVIL}),
                Measurement("disk.read_mb_s", 900.0, "MB/s", EVIL, suspect=EVIL),
                Unmeasured("cpu.steal_percent", Reason.FAILED, EVIL),
            ):
                fingerprint.add(reading)
            plan = Plan(EVIL, EVIL, EVIL).note(EVIL)
            plan.set("micro_batch", Value(8, EVIL, unit=EVIL))
            plan.set("scored_tokens_per_second", Value(1000.0, EVIL, unit="scored tokens/s"))
            finding = Finding(EVIL, "fail", EVIL, {EVIL: EVIL}, "confirmed", metric=EVIL)
            result = {
                "fingerprint": fingerprint.to_dict(),
                "plan": plan.to_dict(),
                "findings": [finding.as_dict()],
                "ramp": {"micro_batch": 8, "source": EVIL, "tried": [{"batch": 1, "why": EVIL}]},
            }
            store.record_outcome(
                encode(Outcome(job.job_id, 1, "ramp", "error", result, EVIL, EVIL, EVIL, EVIL))
            )
            store.set_job_state(job.job_id, "failed", error=EVIL)
        store.finish_run(run)
    return where


def shown(path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["fleet", *arguments, "--store", str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.output
    return result.output


def obeyed(text: str) -> list[str]:
    """What a terminal would obey, by name."""
    return [
        f"{ord(c):#x}"
        for c in text
        if c != "\n" and (c in OBEYED or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp"))
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare",),
        ("compare", "--json"),
        ("compare", "--format", "csv"),
        ("compare", "--format", "md"),
        ("history",),
        ("history", "--json"),
        ("history", "{node}"),
        ("history", "{node}", "--json"),
        ("history", "{node}", "gpu.name"),
        ("history", "{node}", "gpu.name", "--json"),
        ("history", "{node}", "no.such"),
        ("history", "nobody"),
        ("pick", "1"),
        ("pick", "2", "--json"),
        ("compare", "--sort", "nonsense\x1b[2J"),
    ],
    ids=" ".join,
)
def test_no_command_passes_it_on(path: Path, arguments: tuple[str, ...]) -> None:
    with Store.open(path, read_only=True) as store:
        node = store.nodes()[0].node
    text = shown(path, *(a.format(node=node) for a in arguments))
    assert obeyed(text) == []
    if "--json" in arguments and not text.startswith("pichak: "):
        assert json.loads(text)


def test_json_says_what_was_sent_and_escapes_it() -> None:
    record = {"a": EVIL, "ж": "é中\U0001f600"}
    text = json_text(record)
    assert json.loads(text) == record
    assert obeyed(text) == []
    assert "é中\U0001f600" in text
    assert json.loads(json_text({"a": "\ud83d"})) == {"a": "\ud83d"}
    with pytest.raises(ValueError, match="JSON"):
        json_text({"a": float("nan")})


def test_no_cell_of_a_spreadsheet_begins_a_formula(path: Path) -> None:
    text = shown(path, "compare", "--format", "csv")
    cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
    assert [cell for cell in cells if "cmd|" in cell]
    for cell in cells:
        first = cell.lstrip()[:1]
        assert first not in ("=", "+", "@") or cell.startswith("'")
        if first == "-":
            float(cell)
    for start in ("=1", "+1", "-1", "@a", " =1", "\t=1", "\r\n=1"):
        assert csv_cell(start).startswith("'")
