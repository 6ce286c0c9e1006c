"""What is kept of an outcome's bytes, and what of it a fleet's rows share."""

from __future__ import annotations

from pichak_agent.messages import Outcome, encode
from pichak_coordinator.ingest import read_outcome
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured


def sent(*readings: Measurement | Unmeasured) -> bytes:
    made = Fingerprint({reading.name: reading for reading in readings})
    result = {"fingerprint": made.to_dict()}
    return encode(Outcome("j-1", 1, "fingerprint", "ok", result, node="n"))


def timed(name: str, **detail: object) -> Measurement:
    return Measurement(name, 2.0, "MB/s", "timed nine times", 9, 0.1, detail=detail)


def test_without_curves_nothing_but_lists_of_numbers_is_left_out() -> None:
    curve = [1.0, 2.0, 3.0]
    full = read_outcome(
        sent(
            timed("a_mb_s", samples=curve, block_bytes=4096),
            timed("b_mb_s", block_bytes=4096, samples=curve),
            timed("c_mb_s", block_bytes=4096.0),
            timed("d_mb_s", pairs=[{"source": 0}], empty=[]),
            Unmeasured("e_mb_s", Reason.FAILED, "it would not"),
        )
    )
    bare = full.without_curves().fingerprint
    details = {name: r.detail for name, r in bare.items() if isinstance(r, Measurement)}
    assert details == {
        "a_mb_s": {"block_bytes": 4096},
        "b_mb_s": {"block_bytes": 4096},
        "c_mb_s": {"block_bytes": 4096.0},
        "d_mb_s": {"pairs": [{"source": 0}], "empty": []},
    }
    assert details["a_mb_s"] is details["b_mb_s"]  # of 10,000 nodes a million
    assert isinstance(details["c_mb_s"]["block_bytes"], float)
    assert bare["e_mb_s"] == full.fingerprint["e_mb_s"]
    assert [r.name for r in bare.values()] == list(full.fingerprint)
    # What was read stays as it was.
    assert full.fingerprint["a_mb_s"].detail == {"samples": curve, "block_bytes": 4096}


def test_equal_sentences_are_kept_once() -> None:
    parts = [read_outcome(sent(timed("a_mb_s"), timed("b_mb_s"))) for _ in range(2)]
    sources = [r.source for p in parts for r in p.fingerprint.values()]  # type: ignore[union-attr]
    assert len({id(source) for source in sources}) == 1
