"""``fleet pick`` and the prices of ``fleet compare``, on a store that was filled by hand."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app
from pichak_coordinator.records import Finding
from pichak_coordinator.store import Store
from pichak_coordinator.stored_links import stored_links
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import CONSTANT, Plan

MIB = 2**20
#: Seconds of a micro-batch of 4 rows, 20 scored tokens each.
SECONDS = {"alpha": 1.0, "beta": 1.1, "gamma": 0.2, "delta": 1.3}
#: The way to gamma is slow.
SLOW = 2.0


def plan(seconds: float) -> Plan:
    made = Plan("builtin:gpt-1m", "train.jsonl", "cpu")
    made.set("micro_batch", 4, "4 ran", unit="rows").set("rows_total", 36000, "counted")
    made.set("supervised_per_row", 20.0, "counted", unit="scored tokens")
    made.set("target_tokens", 480.0, "the measured noise scale", unit="scored tokens")
    made.set("gradient_bytes", 12 * MIB, "counted", unit="bytes")
    made.set("seconds_per_step", seconds, "timed", unit="s")
    return made.set("scored_tokens_per_second", 80 / seconds, "timed", unit="scored tokens/s")


def finish(store: Store, run: str, job_id: str, kind: str, node: str, device: str, result: Any):
    job = Job(job_id, 1, kind, {}, 9.0)
    store.record_job(run, job, node=node, device=device)
    store.record_outcome(encode(Outcome(job_id, 1, kind, "ok", result)))
    store.set_job_state(job_id, "done", attempt=1)


def fingerprint(prefix: str, **values: float) -> dict[str, Any]:
    made = Fingerprint()
    for name, value in values.items():
        made.add(Measurement(f"{prefix}.{name}", value, "", "timed"))
    return {"fingerprint": made.to_dict()}


def begin(store: Store, command: str, hosts: Sequence[str]) -> tuple[str, dict[str, str]]:
    run = store.begin_run(command, {})
    hellos = [
        {"machine_id": f"m-{host}", "host": host, "address": f"10.0.0.{i}"}
        for i, host in enumerate(hosts)
    ]
    return run, dict(zip(hosts, store.record_nodes(run, hellos), strict=True))


def profile(store: Store) -> tuple[str, dict[str, str]]:
    run, nodes = begin(store, "fleet profile", list(SECONDS))
    for host, node in nodes.items():
        result = {"plan": plan(SECONDS[host]).to_dict()}
        finish(store, run, f"{run}-ramp-{host}", "ramp", node, "cpu", result)
    return run, nodes


def network(
    store: Store,
    run: str,
    nodes: Mapping[str, str],
    rates: Mapping[tuple[str, str], float],
    reduced: Sequence[str] = (),
) -> None:
    count = itertools.count()

    def job_id(what: str) -> str:
        return f"{run}-net-{next(count):05d}-{what}"

    for node in nodes.values():
        finish(store, run, job_id("listen"), "net_listen", node, "", {"listener": {}})
    for (a, b), rate in rates.items():
        found = fingerprint(f"network.{b}", send_mb_s=rate, receive_mb_s=2 * rate, rtt_ms=1.0)
        finish(store, run, job_id("link"), "net_link", nodes[a], "", found)
    for rank, host in enumerate(reduced):
        bus = Measurement(
            "collective.bus_mb_s",
            50.0,
            "MB/s",
            "timed",
            detail={
                "curve": [
                    {"bytes": s * MIB, "seconds": s * 0.05, "spread_seconds": None, "samples": 3}
                    for s in (1, 16)
                ]
            },
        )
        made = Fingerprint()
        if rank == 0:
            made.add(bus)
        result = {"fingerprint": made.to_dict()}
        finish(store, run, job_id("all-reduce"), "collective", nodes[host], "", result)


def all_pairs(hosts: Sequence[str], rate: float = 60.0) -> dict[tuple[str, str], float]:
    return {p: SLOW if "gamma" in p else rate for p in itertools.combinations(hosts, 2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "fleet.db"
    with Store.open(where) as store:
        run, nodes = profile(store)
        network(store, run, nodes, all_pairs(list(SECONDS)))
        store.finish_run(run)
    return where


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], standalone_mode=True)


def picked(*arguments: Any) -> dict[str, Any]:
    done = call("fleet", "pick", *arguments, "--json")
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)["pick"]
    return record


def hosts(record: Mapping[str, Any]) -> list[str]:
    return sorted(member["host"] for member in record["members"])


def test_the_fast_node_behind_a_slow_link_is_left_out(path: Path) -> None:
    """480 tokens are 24 rows, 8 each: 2 micro-batches. delta: 2.6 s; the ring's 4 steps of 4 MiB
    at 60 MB/s (the slower direction), half a millisecond each."""
    record = picked(3, "--store", path)
    assert hosts(record) == ["alpha", "beta", "delta"]
    reduce = 4 * (0.0005 + 4 * MIB / 60e6)
    assert record["compute_seconds"]["value"] == pytest.approx(2.6)
    assert record["reduce_seconds"]["value"] == pytest.approx(reduce)
    assert record["tokens_per_second"]["value"] == pytest.approx(480 / (2.6 + reduce))
    # 36,000 rows in steps of 24.
    assert record["hours_per_epoch"]["value"] == pytest.approx(1500 * (2.6 + reduce) / 3600)
    assert record["bottleneck"].startswith("delta: its own part takes 2.6 s")
    assert record["best_possible_gap"] == 0
    assert record["price_per_hour"]["unmeasured"] == "not asked for"
    assert [m["rank"] for m in record["members"]] == [0, 1, 2]
    assert hosts(picked(1, "--store", path)) == ["gamma"]
    light = picked(2, "--store", path, "--gradient-mib", 0.001)
    assert "gamma" in hosts(light)
    assert list(light["constants"]) == ["gradient_bytes"]


def test_the_page(path: Path) -> None:
    done = call("fleet", "pick", 3, "--store", path)
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    assert "Pick alpha, beta, delta: the fastest 3 together" in words
    assert "slowest member, delta: 8 rows: 2 × 1.3 s" in words
    assert "60 MB/s, round trip 1 ms (measured in" in words
    assert "Bottleneck: delta" in words
    assert "price" not in words


def test_csv_and_markdown_say_all_that_the_page_says(path: Path) -> None:
    asked = ["fleet", "pick", 2, "--store", path, "--without", "gamma", "--format"]
    lines = list(csv.DictReader(io.StringIO(call(*asked, "csv").stdout)))
    of = {
        kind: [line for line in lines if line["kind"] == kind]
        for kind in {x["kind"] for x in lines}
    }
    record = picked(2, "--store", path, "--without", "gamma")
    assert sorted(line["node"] for line in of["member"]) == hosts(record)
    pace = next(line for line in of["figure"] if line["name"] == "pace")
    assert float(pace["value"]) == pytest.approx(record["tokens_per_second"]["value"])
    assert pace["source"] == record["tokens_per_second"]["source"]
    assert [line["text"] for line in of["bottleneck"]] == [record["bottleneck"]]
    assert [line["text"] for line in of["left_out"]] == record["left_out"]
    assert any("gamma" in line["text"] for line in of["left_out"])
    assert of["head"][0]["text"].startswith("Pick alpha, beta: the fastest 2")
    text = call(*asked, "md").stdout
    assert "| pace |" in text
    assert f"Bottleneck: {record['bottleneck'].split(':')[0]}" in text
    assert "- left out: gamma" in text
    assert "measured in" in text


def test_by_cost_with_a_price_list(path: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[hosts]\nalpha = 9\nbeta = 1.5\ndelta = 1.5\n"omega" = 1\n')
    done = call("fleet", "pick", 2, "--store", path, "--prices", prices, "--by", "cost", "--json")
    record = json.loads(done.stdout)["pick"]
    assert hosts(record) == ["beta", "delta"]
    assert record["price_per_hour"]["value"] == 3.0
    pace = record["tokens_per_second"]["value"]
    assert record["cost_per_million_tokens"]["value"] == pytest.approx(3.0 / 3600 / pace * 1e6)
    assert record["cost_per_epoch"]["value"] == pytest.approx(
        3.0 * record["hours_per_epoch"]["value"]
    )
    assert CONSTANT in record["price_per_hour"]["source"]
    assert "no host 'omega' in this run" in done.stderr
    assert any("gamma: no price" in sentence for sentence in record["left_out"])
    assert "cost:" in call("fleet", "pick", 2, "--store", path, "--prices", prices).stdout


def test_compare_with_prices(path: Path, tmp_path: Path) -> None:
    """alpha: 80 tokens/s are 0.288 M an hour; 36,000 rows at 4 a second are 2.5 hours."""
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\n[hosts]\nalpha = 2.88\n')
    done = call("fleet", "compare", "--store", path, "--prices", prices, "--json")
    comparison = json.loads(done.stdout)["comparison"]
    rows = {row["node"]: row for row in comparison["rows"]}
    alpha = next(row for row in rows.values() if row["host"] == "alpha")
    assert alpha["cost_per_million_scored_tokens"] == pytest.approx(10.0)
    assert alpha["hours_per_epoch"] == pytest.approx(2.5)
    assert alpha["cost_per_epoch"] == pytest.approx(7.2)
    assert comparison["pick"]["host"] == "alpha"
    assert comparison["pick"]["currency"] == "EUR"
    fast = call("fleet", "compare", "--store", path, "--prices", prices, "--by", "speed", "--json")
    assert json.loads(fast.stdout)["comparison"]["pick"]["host"] == "gamma"
    shown = call("fleet", "compare", "--store", path, "--prices", prices, "--sort", "cost").stdout
    assert "EUR" in shown
    assert shown.index("alpha") < shown.index("gamma")


def test_links_of_a_later_network_test_and_its_all_reduce(path: Path) -> None:
    """A second look at a pair in one run counts, and so does a newer run; an all-reduce over just
    the picked ones goes before the model."""
    with Store.open(path) as store:
        run, nodes = begin(store, "net", ["delta", "alpha", "beta"])
        rates = {("delta", "alpha"): 30.0, ("alpha", "beta"): 5.0}
        network(store, run, nodes, rates, ["delta", "alpha", "beta"])
        again = fingerprint("network.alpha", send_mb_s=40.0, receive_mb_s=40.0, rtt_ms=2.0)
        finish(store, run, f"{run}-net-00099-link", "net_link", nodes["beta"], "", again)
        store.finish_run(run)
    with Store.open(path, read_only=True) as store:
        links = stored_links(store, list(nodes.values()))
    assert {round(link.mb_s) for link in links.links.values()} == {30, 40, 60}
    newest = links.between(nodes["beta"], nodes["alpha"])
    assert newest is not None
    assert (newest.mb_s, newest.rtt_ms) == (40.0, 2.0)
    record = picked(3, "--store", path)
    assert record["reduce_seconds"]["value"] == pytest.approx(0.6)
    assert run in record["reduce_seconds"]["source"]


def test_a_fault_that_a_later_network_test_confirmed(path: Path) -> None:
    with Store.open(path) as store:
        run, nodes = begin(store, "net", list(SECONDS))
        fault = Finding("node_unreachable", "fail", "nobody reaches it", state="confirmed")
        store.record_findings(run, nodes["beta"], "", [fault])
        store.finish_run(run)
    record = picked(2, "--store", path)
    assert hosts(record) == ["alpha", "delta"]
    assert any("beta: a confirmed fault: node_unreachable" in s for s in record["left_out"])
    allowed = picked(2, "--store", path, "--allow-fault", "beta")
    assert hosts(allowed) == ["alpha", "beta"]
    assert any("beware: beta" in note for note in allowed["notes"])
    done = call("fleet", "pick", 4, "--store", path)
    assert done.exit_code == 2
    assert "--allow-fault" in done.stderr


def test_without_links(tmp_path: Path) -> None:
    where = tmp_path / "fleet.db"
    with Store.open(where) as store:
        run, _ = profile(store)
        store.finish_run(run)
    record = picked(2, "--store", where)
    assert "unmeasured" in record["tokens_per_second"]
    assert any("pichak net --pairs all" in note for note in record["notes"])
    assumed = picked(2, "--store", where, "--assume-link-mbit", 800, "--assume-rtt-ms", 2)
    # 2 steps of 6 MiB at 100 MB/s and 1 ms.
    assert assumed["reduce_seconds"]["value"] == pytest.approx(2 * (0.001 + 6 * MIB / 100e6))
    assert "--assume-link-mbit 800" in next(iter(assumed["constants"].values()))["source"]
    page = call("fleet", "pick", 2, "--store", where, "--assume-link-mbit", 800).stdout
    assert "NOT MEASURED (1): link" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pick"], ["N"]),
        (["pick", "0"], ["0"]),
        (["pick", "9"], ["9 devices are asked for, and 4 of 4 can be picked"]),
        (["pick", "2", "2099"], ["no run", "2099", "fleet history"]),
        (["pick", "2", "--prices", "none.toml"], ["--prices none.toml", "No such file"]),
        (["pick", "2", "--by", "cost"], ["0 of 4 can be picked", "no price"]),
        (["pick", "2", "--without", "omega"], ["--without omega", "alpha"]),
        (["pick", "2", "--allow-fault", "omega"], ["--allow-fault omega", "alpha"]),
        (["pick", "2", "--assume-rtt-ms", "5"], ["--assume-link-mbit"]),
        (["pick", "2", "--gradient-mib", "nan"], ["--gradient-mib", "finite"]),
        (["compare", "--prices", "none.toml"], ["--prices none.toml", "No such file"]),
        (["compare", "--by", "cost"], ["--by cost", "price"]),
        (["profile", "--prices", "none.toml", "--seq-len", "64"], ["--prices none.toml"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    path: Path, arguments: list[str], words: list[str]
) -> None:
    done = call("fleet", *arguments, "--store", path)
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_a_run_in_which_nothing_was_measured(tmp_path: Path) -> None:
    where = tmp_path / "fleet.db"
    with Store.open(where) as store:
        run, _ = begin(store, "fleet profile", ["alpha"])
        store.finish_run(run)
    done = call("fleet", "pick", 1, "--store", where)
    assert done.exit_code == 1
    assert "nothing was measured" in done.stderr
