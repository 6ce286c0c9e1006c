"""``fleet pick`` and the prices of ``fleet compare``, on a store that was filled by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pick_store import MIB, SECONDS, all_pairs, begin, fingerprint, finish, network, profile

from pichak_coordinator.cli import app
from pichak_coordinator.cli.pick_view import _head
from pichak_coordinator.pick_many import Wish, pick_many
from pichak_coordinator.prices import NO_PRICES
from pichak_coordinator.records import Finding
from pichak_coordinator.store import Store
from pichak_coordinator.stored_links import stored_links
from pichak_core.plan import CONSTANT


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


def test_a_narrow_page_breaks_no_word(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = picked(3, "--store", path)
    for width in (30, 60, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        text = call("fleet", "pick", 3, "--store", path).stdout
        assert max(map(len, text.splitlines())) <= width
        for member in record["members"]:
            line = next(x for x in text.splitlines() if x.startswith(f"rank {member['rank']}:")
                        or x.split()[:1] == [str(member["rank"])])  # fmt: skip
            assert member["host"] in line
        for word in ("own part", "alone", "to the next", "tok/s", "MB/s"):
            assert word in text


@pytest.mark.parametrize("count", ["-1", "-12", "-1.5"])
def test_fewer_than_none_is_a_sentence(path: Path, count: str) -> None:
    """To the command line it is an option that there is not."""
    done = call("fleet", "pick", count, "--store", path)
    assert done.exit_code == 2
    assert done.stderr == f"pichak: N is {count}: give how many devices to pick, 1 or more\n"
    assert "No such option '--nope'" in call("fleet", "pick", 2, "--nope").stderr


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


def test_the_claim_goes_no_further_than_what_was_compared(tmp_path: Path) -> None:
    """One link is missing: the first line says so in each form, and what to do is below it."""
    where = tmp_path / "fleet.db"
    with Store.open(where) as store:
        run, nodes = profile(store)
        rates = all_pairs(list(SECONDS))
        del rates["alpha", "beta"]
        network(store, run, nodes, rates)
        store.finish_run(run)
    claim = "the fastest 2 of the sets whose links were measured"
    known = "of the 6 pairs among the 4 machines that could be picked, 5 have a measured link"
    for form in ("table", "csv", "md"):
        shown = call("fleet", "pick", 2, "--store", where, "--format", form)
        words = " ".join(shown.stdout.split())
        assert claim in words, form
        assert "together" not in words, form
        assert known in words, form
        assert "pichak net --pairs all" in words, form
    record = picked(2, "--store", where)
    assert record["compared"] == "measured_links"
    assert record["link_pairs"] == {"machines": 4, "pairs": 6, "measured": 5}
    assert any(known in note for note in record["notes"])
    one = call("fleet", "pick", 1, "--store", where).stdout
    assert "Pick gamma: the fastest alone, at 24 rows a step (" in " ".join(one.split())
    four = call("fleet", "pick", 4, "--store", where).stdout
    assert "the fastest 4 of the sets" in " ".join(four.split())
    alone = call("fleet", "pick", 2, "--store", where, "--without", "gamma", "--without", "delta")
    words = " ".join(alone.stdout.split())
    assert "the fastest 2 by their own parts alone, as the all-reduce is not known" in words


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.0, ""),
        (1e-12, ""),
        (1e-5, "another of them could be better by less than 0.1%."),
        (0.0004, "another of them could be better by less than 0.1%."),
        (0.125, "another of them could be better by up to 12.5%."),
    ],
)
def test_a_gap_is_never_up_to_nothing(path: Path, gap: float, words: str) -> None:
    with Store.open(path, read_only=True) as store:
        (run,) = store.runs(1)
        rows = store.rows_of(run.run)
        links = stored_links(store, [row.node.node for row in rows])
    team = replace(pick_many(rows, links, NO_PRICES, Wish(2)), gap=gap)
    assert " ".join(_head(team, "r", 9)[1:]) == (words and f"Not proved to be the best: {words}")


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
