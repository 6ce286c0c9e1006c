"""The jobs of a link test and of an all-reduce, as the agent's child runs them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pichak_agent.child_jobs import JOBS, RefusedError
from pichak_core.measure import _net_link
from pichak_core.measure._net_link import PARTS
from pichak_core.measure._net_wire import token_of

KEY = b"k" * 32


class Listening:
    """A listener's job on a thread, its port read from its progress line."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.result: dict[str, Any] = {}
        self.port = 0
        self._ready = threading.Event()
        params = {"address": address, "key": KEY.hex(), "seconds": 60, "idle_seconds": 1.0}
        self.thread = threading.Thread(target=self._run, args=(params,), daemon=True)
        self.thread.start()
        assert self._ready.wait(10)

    def _run(self, params: dict[str, Any]) -> None:
        self.result = JOBS["net_listen"](params, progress=self._progress, partial=lambda _: None)

    def _progress(self, text: str) -> None:
        match = re.search(r"on port (\d+)$", text)
        if match:
            self.port = int(match.group(1))
            self._ready.set()

    def door(self, key: bytes = KEY) -> dict[str, Any]:
        session = os.urandom(8)
        return {
            "peer": "b",
            "address": "127.0.0.1",
            "port": self.port,
            "session": session.hex(),
            "token": token_of(key, session).hex(),
        }


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in a second or so."""
    monkeypatch.setitem(_net_link.PLANS, "quick", _net_link.LinkPlan(2, 0.0, 0.5, 0.1, 0.05, 10))


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    yield made
    made.thread.join(20)
    assert not made.thread.is_alive()  # it ended by itself: nobody came any more


def run(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    return JOBS[kind](params, progress=lambda _: None, partial=lambda _: None)


def test_reach_tells_each_peer_apart(listening: Listening) -> None:
    free = {**listening.door(), "peer": "c", "port": 1}
    stranger = {**listening.door(b"x" * 32), "peer": "d"}
    reach = run("net_reach", {"peers": [listening.door(), free, stranger]})["reach"]
    assert reach["b"]["open"] is True
    assert reach["b"]["place"]["local"] == reach["b"]["place"]["seen_as"] == "127.0.0.1"
    assert reach["b"]["place"]["target_is_local"] is True
    assert (reach["c"]["open"], reach["c"]["stranger"]) == (False, False)
    assert "refused" in reach["c"]["why"]
    assert (reach["d"]["open"], reach["d"]["stranger"]) == (False, True)


def test_a_link_has_every_reading(listening: Listening) -> None:
    done = run("net_link", {**listening.door(), "own": "a", "depth": "quick"})
    assert done["error"] == ""
    assert list(done["fingerprint"]) == [f"network.b.{part}" for part in PARTS]
    assert all("value" in reading for reading in done["fingerprint"].values())
    listening.thread.join(20)
    told = listening.result["listener"]
    assert (told["served"], told["refused"], told["is_local"]) == (1, 0, True)
    for end in (done, listening.result):
        assert 0 <= end["conditions"]["cpu.steal_percent"] <= 100
    # The other end has the same link, with sending and receiving exchanged.
    here, there = done["fingerprint"], listening.result["fingerprint"]
    assert len(there) == len(PARTS)
    assert there["network.a.receive_mb_s"] == here["network.b.send_mb_s"]
    assert there["network.a.send_mb_s"] == here["network.b.receive_mb_s"]
    assert there["network.a.send_loss_percent"] == here["network.b.receive_loss_percent"]
    assert there["network.a.rtt_ms"] == here["network.b.rtt_ms"]


def test_a_link_that_cannot_be_opened_is_five_gaps_with_the_reason() -> None:
    door = {"peer": "b", "address": "127.0.0.1", "port": 1, "session": "00" * 8, "token": "00" * 32}
    done = run("net_link", {**door, "own": "a", "depth": "quick"})
    assert len(done["fingerprint"]) == len(PARTS)
    for reading in done["fingerprint"].values():
        assert reading["unmeasured"] == "failed"
        assert "refused" in reading["detail"]


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("net_listen", {}, "takes address, key"),
        ("net_listen", {"address": 3, "key": "", "seconds": 1, "idle_seconds": 1}, "address"),
        ("net_listen", {"address": "x", "key": "zz", "seconds": 1, "idle_seconds": 1}, "hexadec"),
        ("net_reach", {"peers": "all"}, "a list"),
        ("net_reach", {"peers": [{"peer": "b"}]}, "takes peer"),
        ("net_link", {"depth": "deep"}, "takes peer"),
        ("collective", {}, "cannot be made"),
        ("collective", {"speed": 1}, "no parameter 'speed'"),
        (
            "collective",
            {
                **{"rank": 0, "ranks": 1, "address": "", "store_address": "", "port": 0},
                **{"name": "n", "sizes": [4], "seconds": 1},
            },
            "two ranks",
        ),
    ],
)
def test_a_job_that_is_none_is_refused(kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        run(kind, params)


def test_an_all_reduce_from_a_foreign_address_is_a_gap_and_no_hang() -> None:
    pytest.importorskip("torch")
    params = {
        **{"rank": 0, "ranks": 2, "address": "192.0.2.7", "store_address": "192.0.2.7"},
        **{"port": 0, "name": "n", "sizes": [4096], "seconds": 1.0},
    }
    readings = run("collective", params)["fingerprint"]
    assert readings["collective.bus_mb_s"]["unmeasured"] == "failed"
    assert "none of this machine's interfaces" in readings["collective.bus_mb_s"]["detail"]
