"""``pichak fleet report``: what the page holds, how it is written, and whose text it escapes."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("plotly", reason="the extra `report` is not installed")

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app
from pichak_coordinator.history_file import export_history, import_history
from pichak_coordinator.records import Finding, NodeRecord, Point, Row
from pichak_coordinator.report.charts import (
    GIB,
    disk_chart,
    label,
    ramp_chart,
    transfer_chart,
)
from pichak_coordinator.report.history import Series, _changes, history_chart
from pichak_coordinator.report.link_chart import link_chart
from pichak_coordinator.report.links import Direction, Directions, directions
from pichak_coordinator.report.page import json_in_html
from pichak_coordinator.simulated_fleet import drawn_fleet
from pichak_coordinator.simulated_rounds import Clock, put_network, put_profile
from pichak_coordinator.store import Store
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_store import WatchStore
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import CONSTANT, Plan

BEGIN = 1_764_000_000.0
DAY = 86400.0
#: Everything that has ever broken a page: markup, the end of a script, entities, quotes, line
#: separators, escape sequences, an override of the reading direction.
EVIL = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"'`&lt;</script>"
    "<!--\u2028\x1b[31m\u202etxt{{ 7*7 }}</style>"
)


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


class Page(HTMLParser):
    """What a browser would make of it: elements with their attributes, and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def figures(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.scripts[0])
        return made


def finish(
    store: Store, run: str, name: str, node: str, device: str, result: Mapping[str, Any]
) -> None:
    store.record_job(run, Job(name, 1, "fingerprint", {}, 9.0), node=node, device=device)
    store.record_outcome(encode(Outcome(name, 1, "fingerprint", "ok", result)))
    store.set_job_state(name, "done", attempt=1)


@pytest.fixture(scope="module")
def fleet_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two profiles and a network test of eight simulated hosts."""
    path = tmp_path_factory.mktemp("report") / "fleet.db"
    fleet = drawn_fleet(8, seed=5, fault_rate=0.0)
    clock = Clock(BEGIN)
    with Store.open(path, clock=clock) as store:
        for day in (0, 1):
            clock.now = BEGIN + day * DAY
            put_profile(store, fleet.hosts, clock, settings={"name": f"day {day}"})
        names = [host.host for host in fleet.hosts]
        clock.now += 60
        put_network(store, fleet.hosts, clock, slow={names[2]: 0.1}, closed={(names[0], names[1])})
    return path


@pytest.fixture(scope="module")
def page(fleet_store: Path) -> Page:
    made = fleet_store.with_name("fleet.html")
    done = call("fleet", "report", "--html", made, "--store", fleet_store, "--title", "My <fleet>")
    assert done.exit_code == 0, done.output
    return Page(made.read_text(encoding="utf-8"))


def test_the_page_holds_everything_and_asks_for_nothing(page: Page) -> None:
    assert "My <fleet>" in page.text
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data"):
            target = attributes.get(name) or ""
            assert target.startswith(("#", "data:")) or not target, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    policies = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    assert len(policies) == 1
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")
    assert "unsafe-inline'; img" in policies[0]  # of the style alone
    assert "script-src 'sha256-" in policies[0]
    # The figures, plotly once, and the page's own.
    assert len(page.scripts) == 3
    assert sum("plotly.js v" in script[:200] for script in page.scripts) == 1


def test_every_device_has_its_row_section_plan_and_charts(page: Page, fleet_store: Path) -> None:
    with Store.open(fleet_store, read_only=True) as store:
        rows = store.rows_of(store.runs()[1].run)
        assert store.runs()[1].settings["name"] == "day 1"
    assert len(rows) == 8
    sections = [a["id"] for t, a in page.elements if t == "details" and a.get("class") == "device"]
    assert len(sections) == 8
    for row in rows:
        assert row.plan is not None
        for name in row.plan:
            assert name in page.text
            assert " ".join(row.plan.why(name).split()) in " ".join(page.text.split())
    drawn = {name.rsplit("-", 1)[1] for name in page.figures}
    assert drawn >= {"1", "2", "3", "4", "links"}
    assert "simulated" in page.text
    assert "All results on this page are simulated" in page.text
    assert "day 1" in page.text


def test_the_pick_is_that_of_compare(page: Page, fleet_store: Path) -> None:
    record = json.loads(call("fleet", "compare", "--json", "--store", fleet_store).stdout)
    assert record["comparison"]["pick"]["why"] in page.text


# -- charts -------------------------------------------------------------------------------------


def test_the_page_counts_what_compare_counts(fleet_store: Path, tmp_path: Path) -> None:
    """Also what only a network test after the profile, or a watch, knows of its nodes."""
    path = tmp_path / "fleet.db"
    with Store.open(fleet_store, read_only=True) as old, WatchStore.open(path) as store:
        moved = tmp_path / "all.mpk"
        export_history(old, moved, None)
        import_history(store, moved)
        profile = next(run for run in store.runs() if run.command == "fleet profile")
        (node, device) = store.rows_of(profile.run)[0].key
        held = Finding("slow_disk", "warn", "it is slow", state="confirmed", metric="disk.read")
        uuid = store.rows_of(profile.run)[0].node.gpu_uuid
        store.remember([], {(node, uuid or device): Memory(findings=(held,))})
    shown = json.loads(call("fleet", "compare", "--store", path, "--json").stdout)
    every = [f for n in shown["nodes"] for f in n["findings"]]
    assert [f["evidence"]["seen_by"] for f in every if f["code"] == "slow_disk"] == ["fleet watch"]
    words = call("fleet", "compare", "--store", path).stdout
    assert "held open by the watch: it is slow" in " ".join(words.split())
    made = tmp_path / "page.html"
    call("fleet", "report", "--store", path, "--html", made)
    text = " ".join(Page(made.read_text(encoding="utf-8")).text.split())
    count = Counter((f["severity"], f["state"]) for f in every)
    for severity in ("fail", "warn"):
        assert f"confirmed {severity} {count[severity, 'confirmed']} " in text
    assert f"suspected {count['fail', 'suspected'] + count['warn', 'suspected']} " in text
    info = count["info", "confirmed"] + count["info", "suspected"]
    assert (f"info {info} " in text) == (info > 0)
    said = re.search(r"Findings \((\d+)(?:; (\d+) more in the same words)?\)", text)
    assert said is not None
    assert sum(int(n or 0) for n in said.groups()) == len(every)


def row(ramp: Mapping[str, Any] | None = None, device: str = "cuda:0", **readings: Any) -> Row:
    found = Fingerprint()
    for name, reading in readings.items():
        metric = name.replace("__", ".")
        if isinstance(reading, Unmeasured):
            found.add(Unmeasured(metric, reading.reason, reading.detail))
        else:
            value, detail = reading if isinstance(reading, tuple) else (reading, {})
            found.add(Measurement(metric, value, "MB/s", "timed", detail=detail))
    return Row(NodeRecord("n-1", "box", device=device), found, ramp=ramp)


def rung(batch: int, gib: float | None, verdict: str = "ok") -> dict[str, Any]:
    peak = None if gib is None else int(gib * GIB)
    return {"batch": batch, "peak_bytes": peak, "seconds": 0.1, "verdict": verdict, "why": ""}


def test_a_ramp_is_drawn_in_gib_and_a_refused_size_where_the_memory_ends() -> None:
    ramp = {
        "tried": [rung(1, 2.0), rung(8, 9.0), rung(16, None, "refused")],
        "micro_batch": 8,
        "micro_batch_max": 8,
        "peak_bytes": 9 * GIB,
        "capacity_bytes": 10 * GIB,
        "budget_bytes": int(8.8 * GIB),
    }
    made = ramp_chart(row(ramp))
    assert made.figure is not None
    ran, refused, kept = made.figure["data"]
    assert (ran["x"], ran["y"]) == ([1, 8], [2.0, 9.0])
    assert (refused["x"], refused["y"]) == ([16], [10.0])
    assert "refused, no peak" in refused["text"][0]
    assert kept["x"] == [8]
    levels = [shape["y0"] for shape in made.figure["layout"]["shapes"]]
    assert levels == [10.0, pytest.approx(8.8)]
    assert made.sentence == "Kept 8 rows: peak 9 GiB of 10 GiB; 16 rows: refused."


def test_without_a_ramp_the_page_says_so_with_the_reason() -> None:
    failed = Row(NodeRecord("n-1", "box"), error="ramp: lost")
    assert ramp_chart(failed).figure is None
    assert ramp_chart(failed).sentence == "Not measured: ramp: lost"
    assert ramp_chart(row({"tried": "nonsense"})).figure is None


def test_the_disk_curve_is_that_of_the_depths() -> None:
    rates = [{"depth": d, "mb_s": r, "spread": 5.0} for d, r in ((1, 400.0), (4, 900.0))]
    made = disk_chart(row(disk__read_mb_s=(900.0, {"rates": rates}), disk__read_best_depth=4))
    assert made.figure is not None
    assert made.figure["data"][0]["x"] == [1, 4]
    assert made.figure["data"][0]["y"] == [400.0, 900.0]
    assert made.figure["data"][1]["x"] == [4]
    cached = row(disk__read_mb_s=Unmeasured("", Reason.NOT_SUPPORTED, "cached: refused"))
    assert disk_chart(cached).figure is None
    assert "cached: refused" in disk_chart(cached).sentence


def test_copies_stand_against_what_the_link_carries() -> None:
    """PCIe 4.0 x16: 16 GT/s × 16 lanes × 128/130 / 8 = 31,508 MB/s."""
    made = transfer_chart(
        row(
            gpu__h2d_pinned_mb_s=25000.0,
            gpu__d2h_pinned_mb_s=Unmeasured("", Reason.TIMED_OUT, "no time"),
            gpu__link_under_load="PCIe 4.0 x16 under load",
        )
    )
    assert made.figure is not None
    assert made.figure["layout"]["shapes"][0]["x0"] == pytest.approx(31508, rel=1e-3)
    # What was not measured is no bar of length 0.
    assert made.figure["data"][0]["x"] == [25000.0]
    assert made.notes == ("GPU → host, pinned: not measured (timed out: no time)",)
    assert transfer_chart(row(device="cpu")).figure is None


def point(value: float | None, day: int, **more: Any) -> Point:
    return Point("run", "cpu", "disk.read_mb_s", BEGIN + day * DAY, value, unit="MB/s", **more)


def test_history_marks_what_is_more_than_three_spreads() -> None:
    """√(1² + 1²) × 3 = 4.24: a step of 4 is within it, one of 10 is not."""
    points = (
        point(100.0, 0, spread=1.0),
        point(96.0, 1, spread=1.0),
        point(None, 2, unmeasured="timed out"),
        point(900.0, 3, spread=1.0, suspect="faster than the device"),
        point(86.0, 4, spread=1.0),
    )
    node = NodeRecord("n-1", "box")
    changed = tuple(_changes(node, points))
    assert [number for number, _ in changed] == [4]
    assert (changed[0][1].before, changed[0][1].after) == (96.0, 86.0)
    made = history_chart([Series("disk.read_mb_s", points, changed)])
    assert made.figure is not None
    line, marks = made.figure["data"]
    assert line["y"] == [100.0, 96.0, None, None, 86.0]
    assert marks["y"] == [86.0]
    assert "1 change by more than noise" in made.sentence
    gaps = "2 readings are missing (timed out; suspect: faster than the device)"
    assert any(gaps in note for note in made.notes)


# -- links --------------------------------------------------------------------------------------


def test_a_cell_without_a_number_is_a_sign_and_never_a_zero() -> None:
    ways = {
        ("a", "b"): Direction("measured", "r", 100.0, 1.0),
        ("b", "a"): Direction("measured", "r", 90.0, 1.0, closed="timed out"),
        ("a", "c"): Direction("not measured", "r", why="lost: gone"),
        ("c", "a"): Direction("suspect", "r", why="faster than the wire"),
        ("b", "c"): Direction("unreachable", "r", why="refused", closed="refused"),
    }
    made = link_chart(Directions(ways, {"r": BEGIN}), {"a": "A", "b": "B", "c": "C"})
    assert made.figure is not None
    heat = made.figure["data"][0]
    assert heat["z"] == [[None, 100.0, None], [None, None, None], [None, None, None]]
    assert (heat["zmin"], heat["zmax"]) == (50.0, 100.0)
    signs = {(n["y"], n["x"]): n["text"] for n in made.figure["layout"]["annotations"]}
    assert signs == {(0, 2): "–", (1, 0): "✕", (1, 2): "✕", (2, 0): "?", (2, 1): "·"}
    assert "90 MB/s over one that the other side opened" in heat["customdata"][1][0].replace(
        "&lt;", "<"
    )
    assert "2 cannot be opened" in made.sentence


def test_links_come_from_the_stored_tests(fleet_store: Path) -> None:
    with Store.open(fleet_store, read_only=True) as store:
        nodes = {node.host: node.node for node in store.nodes()}
        found = directions(store, list(nodes.values()))
        hosts = [row.node.host for row in store.rows_of(store.runs()[0].run)]
    assert len(found.ways) == 8 * 7
    closed = [way for way, made in found.ways.items() if made.closed]
    assert closed == [(nodes[hosts[0]], nodes[hosts[1]])]
    slow = {source for (source, _), way in found.ways.items() if way.mb_s and way.mb_s < 400}
    assert slow == {nodes[hosts[2]]}
    assert all(way.simulated for way in found.ways.values() if way.mb_s)


def test_a_device_that_gave_nothing_this_time_keeps_its_history(tmp_path: Path) -> None:
    fleet = drawn_fleet(2, seed=5, fault_rate=0.0)
    clock = Clock(BEGIN)
    with Store.open(tmp_path / "fleet.db", clock=clock) as store:
        for day in range(3):
            clock.now = BEGIN + day * DAY
            silent = {fleet.hosts[0].host} if day == 2 else set()
            put_profile(store, fleet.hosts, clock, settings={}, silent=silent)
    made = tmp_path / "fleet.html"
    done = call("fleet", "report", "--html", made, "--store", tmp_path / "fleet.db")
    assert done.exit_code == 0, done.output
    page = Page(made.read_text(encoding="utf-8"))
    failed = next(
        a["id"] for t, a in page.elements if t == "details" and "device" in (a.get("class") or "")
    )
    drawn = {name.removeprefix(f"c-{failed}-") for name in page.figures if failed in name}
    assert drawn == {"4"}  # the history alone
    assert "gives nothing any more" in page.text
    assert "Nothing to compare: this run or the one before has no results of it." in page.text


def test_without_a_network_test_the_page_says_what_would_make_one() -> None:
    assert "`pichak net` makes one" in link_chart(Directions(), {"a": "A", "b": "B"}).sentence


def test_many_machines_are_a_list_of_the_slowest() -> None:
    names = {f"n{i}": f"h{i}" for i in range(70)}
    ways = {
        (a, b): Direction("measured", "r", 10.0 + i)
        for i, (a, b) in enumerate((a, b) for a in names for b in names if a != b)
    }
    made = link_chart(Directions(ways, {"r": BEGIN}), names)
    assert made.figure is None
    assert "h0 → h1: 10 MB/s" in made.notes[1]


# -- hostile text -------------------------------------------------------------------------------


@pytest.fixture
def evil_store(tmp_path: Path) -> Path:
    path = tmp_path / "evil.db"
    with Store.open(path) as store:
        run = store.begin_run("fleet profile", {"model": EVIL, "name": EVIL})
        hello = {"machine_id": "m", "host": EVIL, "address": EVIL, "cpu_model": EVIL}
        other = {"machine_id": "o", "host": f"{EVIL}2"}
        node, second = store.record_nodes(run, [hello, other])
        found = Fingerprint()
        found.add(Measurement(f"x.{EVIL}", EVIL, EVIL, EVIL, conditions={EVIL: EVIL}))
        found.add(Unmeasured(f"y.{EVIL}", Reason.FAILED, EVIL))
        found.add(Measurement("disk.read_mb_s", 5.0, "MB/s", EVIL, detail={"rates": EVIL}))
        plan = Plan(EVIL, EVIL, EVIL).set("micro_batch", 4, EVIL, unit="rows").note(EVIL)
        ramp = {"tried": [{"batch": 1, "peak_bytes": 5, "verdict": EVIL, "why": EVIL}, EVIL]}
        told = Finding("disk_slow", "fail", EVIL, {EVIL: [EVIL]}, "confirmed", metric=EVIL)
        result = {
            "fingerprint": found.to_dict(),
            "plan": plan.to_dict(),
            "ramp": ramp,
            "findings": [told.as_dict()],
        }
        finish(store, run, f"{run}-a", node, "cpu", result)
        store.record_node(run, other, node=second, error=EVIL)
        store.finish_run(run)
    return path


def test_text_of_nodes_is_escaped_everywhere(evil_store: Path, tmp_path: Path) -> None:
    made = tmp_path / "evil.html"
    done = call("fleet", "report", "--html", made, "--store", evil_store, "--title", EVIL)
    assert done.exit_code == 0, done.output
    text = made.read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.scripts) == 3
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [a for _, a in page.elements if any(n.startswith("on") for n in a)]
    for raw in ("\u2028", "\x1b", "\u202e"):
        assert raw not in text
    assert "\\u202e" in page.text
    assert "\\x1b[31m" in page.text
    assert "{{ 7*7 }}" in page.text
    for figure in page.figures.values():
        # Plotly reads tags in its texts.
        assert "<script" not in json.dumps(figure)


def test_json_in_a_page_ends_no_script() -> None:
    value = {EVIL: EVIL}
    made = json_in_html(value)
    assert json.loads(made) == value
    assert not re.search(r"[<>&\u2028\u2029]", made)


def test_a_label_holds_no_tag_and_no_entity() -> None:
    assert label("<b>&amp;</b>") == "&lt;b&gt;&amp;amp;&lt;/b&gt;"
    assert "\u202e" not in label("\u202e")


# -- writing ------------------------------------------------------------------------------------


def test_a_page_replaces_a_page_and_nothing_else(fleet_store: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine.html"
    place.write_text("my own page", encoding="utf-8")
    asked = ("fleet", "report", "--html", place, "--store", fleet_store)
    refused = call(*asked)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert place.read_text(encoding="utf-8") == "my own page"
    assert call(*asked, "--force").exit_code == 0
    first = place.read_bytes()
    assert call(*asked).exit_code == 0
    assert len(place.read_bytes()) == len(first)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.html"]


def test_a_link_is_followed(fleet_store: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "fleet.html"
    link.symlink_to(tmp_path / "real" / "fleet.html")
    assert call("fleet", "report", "--html", link, "--store", fleet_store).exit_code == 0
    assert link.is_symlink()
    assert (tmp_path / "real" / "fleet.html").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("place", "words"),
    [("", ["folder"]), ("no/such.html", ["no folder"]), ("/dev/null", ["device", "--html -"])],
)
def test_a_place_that_cannot_be_is_one_sentence(
    fleet_store: Path, tmp_path: Path, place: str, words: list[str]
) -> None:
    done = call("fleet", "report", "--html", tmp_path / place, "--store", fleet_store)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr


def test_a_failed_write_leaves_the_old_page(
    fleet_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "fleet.html"
    assert call("fleet", "report", "--html", place, "--store", fleet_store).exit_code == 0
    before = place.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pichak_coordinator.report.writing.os.fsync", full)
    assert call("fleet", "report", "--html", place, "--store", fleet_store).exit_code != 0
    assert place.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fleet.html"]


def test_standard_output_and_json(fleet_store: Path, tmp_path: Path) -> None:
    done = call("fleet", "report", "--html", "-", "--store", fleet_store)
    assert done.exit_code == 0
    assert done.stdout.startswith("<!doctype html>")
    assert call("fleet", "report", "--html", "-", "--json", "--store", fleet_store).exit_code == 2
    place = tmp_path / "fleet.html"
    told = call("fleet", "report", "--html", place, "--json", "--store", fleet_store)
    record = json.loads(told.stdout)
    assert (record["devices"], record["sections"]) == (8, 8)
    assert record["bytes"] == place.stat().st_size


@pytest.mark.parametrize("missing", ["jinja2", "plotly"])
def test_a_missing_extra_is_named(
    fleet_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = call("fleet", "report", "--html", tmp_path / "x.html", "--store", fleet_store)
    assert done.exit_code == 2
    assert "pip install 'pichak-fleet[report]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


# -- many devices -------------------------------------------------------------------------------


@pytest.fixture
def thousand(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "many.db"
    with Store.open(path) as store:
        run = store.begin_run("fleet profile", {})
        hellos = [{"machine_id": f"m{i}", "host": f"h{i:04d}"} for i in range(1000)]
        nodes = store.record_nodes(run, hellos)
        with store.atomically():
            for i, node in enumerate(nodes):
                plan = Plan("m", "d", "cpu").set("seconds_per_step", 1.0, "timed", unit="s")
                plan.set("scored_tokens_per_second", 100.0 + i, "timed", unit="scored tokens/s")
                plan.set("headroom", 0.12, CONSTANT)
                finish(store, run, f"{run}-{i}", node, "cpu", {"plan": plan.to_dict()})
            bad = Finding("disk_slow", "fail", "its disk is slow", {}, "confirmed")
            store.record_findings(run, nodes[7], "cpu", [bad])
        store.finish_run(run)
    yield path


def test_a_thousand_devices_are_all_in_the_table_and_the_worst_have_sections(
    thousand: Path, tmp_path: Path
) -> None:
    made = tmp_path / "many.html"
    asked = ("fleet", "report", "--html", made, "--store", thousand, "--sections", "5")
    assert call(*asked).exit_code == 0
    page = Page(made.read_text(encoding="utf-8"))
    assert len([1 for tag, a in page.elements if tag == "th" and a.get("scope") == "row"]) >= 1000
    sections = [a for t, a in page.elements if t == "details" and a.get("class") == "device"]
    assert len(sections) == 5
    assert "5 of 1,000 devices" in page.text
    # The faulty one is among the slowest, and has a section all the same: the first.
    links = [a["href"] for tag, a in page.elements if tag == "a" and "href" in a]
    assert links.count(f"#{sections[0]['id']}") == 2  # from the table and from its finding


def test_lost_devices_take_no_section_from_those_that_answered(
    thousand: Path, tmp_path: Path
) -> None:
    with Store.open(thousand) as store:
        run = store.runs()[0].run
        with store.atomically():
            for i in range(50):
                lost = {"machine_id": f"lost{i}", "host": f"lost{i}"}
                store.record_node(run, lost, error="it did not answer in time")
    made = tmp_path / "many.html"
    asked = ("fleet", "report", "--html", made, "--store", thousand, "--sections", "5")
    assert call(*asked).exit_code == 0
    text = made.read_text(encoding="utf-8")
    sections = text.split('<section id="devices">')[1]
    assert "<h3><bdi>h0007</bdi></h3>" in sections
    assert "<h3><bdi>lost" not in sections
    assert "it did not answer in time" in text
