"""Copies between GPUs: what the owner of the memory reads decides."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pichak_core.measure import Context, peer_copy  # noqa: E402
from pichak_core.measure._mover import fill  # noqa: E402
from pichak_core.measure._peer_check import (  # noqa: E402
    DevicePair,
    PeerCopy,
    check,
    check_all,
    classify,
)
from pichak_core.measure.peer_copy import check_in_children, readings  # noqa: E402
from pichak_core.measurement import Measurement, Reason, Unmeasured  # noqa: E402

WORDS = 1024


class Sick(DevicePair):
    """Plain memory for a path that the driver calls good: what the owner finds is `arrives`."""

    arrives = "zeros"
    writer_fooled = False

    def access(self) -> bool | None:
        return True

    def copy(self) -> None:
        if self.arrives == "zeros":
            self._to.zero_()
        elif self.arrives == "mirrored":
            self._to.copy_(self._from.flip(0))
        elif self.arrives == "wrong":
            self._to.copy_(self._from)
            self._to[100:103] += 1

    def writer_reads(self) -> Any:
        return self._from.clone() if self.writer_fooled else super().writer_reads()


def sick(arrives: str, *, fooled: bool = False) -> Sick:
    made = Sick("cpu", "cpu", WORDS)
    made.arrives, made.writer_fooled = arrives, fooled
    return made


def test_a_copy_that_arrives_is_timed() -> None:
    found = check(DevicePair("cpu", "cpu", WORDS), WORDS)
    assert found.works
    assert found.mb_s is not None
    assert found.mb_s > 0


@pytest.mark.parametrize("arrives", ["zeros", "mirrored", "wrong", "unchanged"])
def test_what_the_owner_reads_is_the_verdict_whatever_the_driver_says(arrives: str) -> None:
    # field case 99
    found = check(sick(arrives), WORDS)
    assert found.verdict == arrives
    assert not found.works
    assert found.mb_s is None
    assert "though the driver says that they reach each other" in found.describe()


def test_a_writer_that_reads_its_own_pattern_back_proves_nothing() -> None:
    # field case 99
    found = check(sick("zeros", fooled=True), WORDS)
    assert (found.verdict, found.writer_sees_it) == ("zeros", True)
    assert "the writer reads its own pattern back" in found.describe()


def test_a_path_that_works_once_is_looked_at_again() -> None:
    pair = DevicePair("cpu", "cpu", WORDS)
    real, calls = pair.copy, 0

    def copy() -> None:
        nonlocal calls
        calls += 1
        if calls != 4:
            real()

    pair.copy = copy  # type: ignore[method-assign]
    found = check(pair, WORDS)
    assert (found.verdict, found.detail) == ("wrong", "copy 4 arrived wrong")


def test_wrong_words_are_counted() -> None:
    sent = torch.zeros(WORDS, dtype=torch.int32)
    fill(sent, 1)
    seen = sent.clone()
    seen[7] += 1
    seen[9] += 1
    verdict, detail = classify(seen, sent, torch.zeros_like(sent))
    assert verdict == "wrong"
    assert detail == "2 of 1,024 words are wrong, the first is word 7"


def test_a_device_error_costs_its_pair_and_ends_the_child() -> None:
    def make(source: str, target: str, words: int) -> DevicePair:
        if source == "b":
            raise RuntimeError("CUDA error: peer access is not supported\nmore")
        return DevicePair("cpu", "cpu", words)

    found = list(check_all([("a", "x"), ("b", "x"), ("c", "x")], WORDS, make))
    assert [one.verdict for one in found] == ["works", "fails"]
    assert found[1].detail == "CUDA error: peer access is not supported"


def test_a_real_child_reports_every_pair() -> None:
    found = check_in_children([("cpu", "cpu")] * 2, words=WORDS)
    assert [one.verdict for one in found] == ["works", "works"]


#: A child that reports its first pair, and at a second one hangs, dies or fails.
_BOOT = """
import json, os, sys, time
sys.argv.pop(1)
pairs = json.loads(sys.argv[1])
for source, target in pairs:
    if target == "hang":
        time.sleep(600)
    if target == "die":
        os.kill(os.getpid(), 11)
    if target == "exit":
        sys.exit("no such device")
    print("a library's line")
    verdict = "fails" if target == "fails" else "works"
    print(json.dumps({"source": source, "target": target, "verdict": verdict}), flush=True)
    if verdict == "fails":
        break
"""


def test_a_pair_that_hangs_dies_or_fails_costs_itself_alone() -> None:
    # field case 99
    targets = ["good", "hang", "good", "die", "exit", "fails", "good"]
    begun = time.monotonic()
    found = check_in_children(
        [("cuda:0", target) for target in targets],
        start_seconds=5.0,
        pair_seconds=0.5,
        boot=_BOOT,
    )
    assert [one.target for one in found] == targets
    verdicts = [one.verdict for one in found]
    assert verdicts == ["works", "hangs", "works", "fails", "fails", "fails", "works"]
    assert "no answer within" in found[1].detail
    assert "signal 11" in found[3].detail
    assert "exit code 1: no such device" in found[4].detail
    assert time.monotonic() - begun < 60


def test_bad_pairs_are_the_verdict_and_good_ones_the_rate() -> None:
    good = PeerCopy("cuda:0", "cuda:1", "works", 48_000.0, True)
    slow = PeerCopy("cuda:1", "cuda:0", "works", 21_000.0, True)
    bad = PeerCopy("cuda:0", "cuda:2", "zeros", None, True, True, "the owner reads zeros")
    verdict, rate = readings([good, slow])
    assert isinstance(verdict, Measurement)
    assert verdict.value == "works with 1 other GPU"
    assert isinstance(rate, Measurement)
    assert rate.value == 21_000.0
    verdict, rate = readings([good, bad])
    assert isinstance(verdict, Measurement)
    assert str(verdict.value).startswith("cuda:0 to cuda:2: zeros (the owner reads zeros), though")
    assert isinstance(rate, Measurement)
    _, rate = readings([bad])
    assert isinstance(rate, Unmeasured)


def test_one_gpu_has_no_sister(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for reading in peer_copy.run(Context(device="cuda:0")):
        assert isinstance(reading, Unmeasured)
        assert reading.reason is Reason.NO_DEVICE
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peer_copy, "others_idle", lambda *_: ["cuda:1"])
    asked: list[Any] = []

    def children(pairs: Any) -> list[PeerCopy]:
        asked.extend(pairs)
        return [PeerCopy(*pair, "works", 5.0) for pair in pairs]

    monkeypatch.setattr(peer_copy, "check_in_children", children)
    assert len(list(peer_copy.run(Context(device="cuda:0")))) == 2
    assert asked == [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]
