"""Price lists: whose price is whose, what follows from it, and what a bad file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.compare import compare
from pichak_coordinator.economics import economics
from pichak_coordinator.identity import node_record
from pichak_coordinator.prices import (
    CURRENCY_LABEL,
    PRICE_LABEL,
    PriceBook,
    PriceError,
    load_prices,
    with_default_currency,
)
from pichak_coordinator.records import NodeRecord, Row
from pichak_core.measurement import Unmeasured
from pichak_core.plan import CONSTANT, Plan, Value


def plan(rate: float = 1000.0, rows: int = 36000) -> Plan:
    """`rate` scored tokens/s, at 100 a row: `rate`/100 rows a second."""
    made = Plan().set("micro_batch", 4, "4 ran").set("seconds_per_step", 400 / rate, "timed")
    made.set("scored_tokens_per_second", rate, "timed", unit="scored tokens/s")
    return made.set("rows_total", rows, "counted")


def row(name: str = "n-1", host: str = "alpha", **more) -> Row:
    labels = more.pop("labels", {})
    gpu, device = more.pop("gpu", ""), more.pop("device", "cpu")
    node = NodeRecord(
        name, host, device=device, gpu_model=gpu, device_name=gpu, cpu_model="Xeon", labels=labels
    )
    return Row(node, plan=more.pop("plan", plan()), **more)


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "prices.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


LIST = """
currency = "eur"
[hosts]
alpha = 2
"box.example" = 3.5
[nodes]
n-9 = 4.0
[devices]
"NVIDIA H100" = 1.25
"""


def test_whose_price_it_is(tmp_path: Path) -> None:
    """An identity goes before a host name, which goes before a model."""
    book = load_prices(written(tmp_path, LIST))
    assert (book.currency, book.money(1.5)) == ("EUR", "EUR 1.5")
    price = book.price(row())
    assert isinstance(price, Value)
    assert (float(price), price.unit) == (2.0, "EUR/h")
    assert price.source == f"{CONSTANT}: prices.toml, host alpha"
    assert not price.measured
    assert book.price(row("n-9")) == 4.0
    gpu = row("n-2", "other", gpu="nvidia h100", device="cuda:0")
    assert book.price(gpu, 4) == 1.25
    # Four devices of a machine share its price.
    shared = book.price(row("n-3", "box.example", gpu="NVIDIA H100", device="cuda:1"), 4)
    assert isinstance(shared, Value)
    assert float(shared) == 3.5 / 4
    assert "shared by 4 devices" in shared.source
    assert shared.source.startswith(CONSTANT)


def test_no_price_is_no_number(tmp_path: Path) -> None:
    book = load_prices(written(tmp_path, LIST))
    none = economics(row("n-7", "elsewhere"), book)
    for figure in (none.price_per_hour, none.cost_per_million_scored_tokens, none.cost_per_epoch):
        assert isinstance(figure, Unmeasured)
        assert "no price" in figure.detail
    assert none.hours_per_epoch == 1.0


def test_what_follows_from_a_price() -> None:
    """1,000 tokens/s are 3.6 M an hour: at 7.2 an hour, 2 a million. 36,000 rows of 100 tokens at
    10 rows a second are an hour."""
    book = PriceBook(hosts={"alpha": 7.2})
    found = economics(row(), book)
    assert float(found.cost_per_million_scored_tokens) == pytest.approx(2.0)  # type: ignore[arg-type]
    assert float(found.hours_per_epoch) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert float(found.cost_per_epoch) == pytest.approx(7.2)  # type: ignore[arg-type]
    assert isinstance(found.cost_per_epoch, Value)
    assert "host alpha" in found.cost_per_epoch.source
    assert CONSTANT in found.cost_per_epoch.source
    no_speed = economics(row(plan=None), book)
    assert isinstance(no_speed.cost_per_million_scored_tokens, Unmeasured)
    assert isinstance(no_speed.hours_per_epoch, Unmeasured)
    uncounted = economics(row(plan=Plan().set("micro_batch", 4, "x")), book)
    assert isinstance(uncounted.cost_per_epoch, Unmeasured)


def test_the_table_has_cost_columns_and_puts_what_has_no_price_last() -> None:
    rows = [row("n-1", "alpha"), row("n-2", "beta", plan=plan(5000.0)), row("n-3", "gamma")]
    table = compare(rows, prices=PriceBook(hosts={"alpha": 7.2, "gamma": 3.6}, currency="EUR"))
    assert [line.row.node.host for line in table.sorted_by("cost").lines] == [
        "gamma",
        "alpha",
        "beta",
    ]
    assert [line.row.node.host for line in table.sorted_by("cost", descending=True).lines] == [
        "alpha",
        "gamma",
        "beta",
    ]
    headings = {column.key: column.heading for column in table.columns}
    assert headings["cost_per_million_scored_tokens"] == "cost EUR/M scored"
    assert headings["cost_per_epoch"] == "epoch cost EUR"
    record = {entry["host"]: entry for entry in table.as_dict()["rows"]}
    assert record["alpha"]["cost_per_epoch"] == pytest.approx(7.2)
    assert record["beta"]["cost_per_epoch"] is None
    assert record["beta"]["economics"]["price_per_hour"] == {
        "unmeasured": "not asked for",
        "detail": "no price is given for it",
    }
    assert CONSTANT in record["alpha"]["economics"]["price_per_hour"]["source"]
    assert table.pick.node == "n-3"
    assert "EUR 1 per million scored tokens" in table.pick.sentence
    assert "1 without a price left out" in table.pick.sentence


def test_labels_of_ray_nodes() -> None:
    record = {
        "NodeID": "ab",
        "Alive": True,
        "Labels": {PRICE_LABEL: "2.50", "ray.io/node-id": "ab", "region": "eu"},
    }
    node = ClusterNode.from_ray(record)
    assert node.labels == {PRICE_LABEL: "2.50", "region": "eu"}
    labels = node_record("n-1", {"host": "alpha", "labels": dict(node.labels)}, "cpu").labels
    price = PriceBook().price(row(labels=labels))
    assert isinstance(price, Value)
    assert float(price) == 2.5
    assert "node label" in price.source
    # A list goes before a label, and a label that is no price is none.
    assert PriceBook(hosts={"alpha": 1.0}).price(row(labels=labels)) == 1.0
    for text in ("free", "nan", "0", "-1", "inf", "1e308", "1e-300", ""):
        assert isinstance(PriceBook().price(row(labels={PRICE_LABEL: text})), Unmeasured)
    # Amounts in another currency are not mixed in.
    euro = row(labels={PRICE_LABEL: "2", CURRENCY_LABEL: "EUR"})
    assert isinstance(PriceBook().price(euro), Unmeasured)
    assert with_default_currency(PriceBook(), [euro]).price(euro) == 2.0
    assert compare([euro]).pick.currency == "EUR"


def test_entries_that_nobody_goes_by_are_told(tmp_path: Path) -> None:
    book = load_prices(written(tmp_path, LIST))
    told = "\n".join(book.unknown([row("n-1", "alpha"), row("n-2", "box.exampl")]))
    assert "'alpha'" not in told
    assert "no host 'box.example' in this run (there is 'box.exampl')" in told
    assert "no node 'n-9'" in told
    assert "no device 'NVIDIA H100'" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hosts]\nalpha = ", ["not TOML", "2.50"]),
        (b"\xff\xfe", ["not UTF-8"]),
        ("", ["no price", "[hosts]"]),
        ("[hosts]\n", ["no price"]),
        ("[host]\nalpha = 1", ["'host'", "did you mean 'hosts'"]),
        ("alpha = 1", ["'alpha' is none of"]),
        ("hosts = 3", ["hosts is 3", "[hosts]"]),
        ("[hosts]\nalpha = '2'", ["[hosts] 'alpha'", "'2'", "positive"]),
        ("[hosts]\nalpha = true", ["True", "positive"]),
        ("[hosts]\nalpha = 0", ["0", "leave out"]),
        ("[hosts]\nalpha = -1.0", ["-1.0"]),
        ("[hosts]\nalpha = nan", ["nan"]),
        ("[hosts]\nalpha = inf", ["inf", "leave out"]),
        ("[hosts]\nalpha = 1e308", ["1e+308", "no machine's price", "1e-06 to 1,000,000,000"]),
        ("[devices]\nH100 = 1e-300", ["1e-300", "no machine's price"]),
        (f"[hosts]\nalpha = 1{'0' * 400}", ["a number of 1,329 bits"]),
        (f"[hosts]\nalpha = -1{'0' * 400}", ["a number of 1,329 bits", "leave out"]),
        (f"[hosts]\nalpha = 0x{'f' * 20000}", ["a number of 80,000 bits"]),
        (f"[hosts]\nalpha = {'9' * 5000}", ["not TOML"]),
        ("[hosts]\nbox.example = 2", ["'box'", "quotes"]),
        ("[hosts]\nalpha = 2\nalpha = 3", ["not TOML"]),
        ("currency = 3\n[hosts]\nalpha = 2", ["currency is 3", "EUR"]),
        ("currency = 'dollars'\n[hosts]\nalpha = 2", ["'dollars'"]),
        ("[devices]\nH100 = 2\nh100 = 3", ["twice", "capitals"]),
        (b"#" * 1_000_001, ["1,000,000 bytes"]),
    ],
)
def test_a_bad_list_says_what_is_wrong(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PriceError) as caught:
        load_prices(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match="No such file"):
        load_prices(tmp_path / "none.toml")
    with pytest.raises(PriceError, match="directory"):
        load_prices(tmp_path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load_prices(written(tmp_path, b"\xef\xbb\xbf[hosts]\na = 1\n")).hosts == {"a": 1.0}
