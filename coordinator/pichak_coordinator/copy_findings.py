"""What copies to, from and between GPUs say of a node, without looking at another one. Pure.

Copies that arrive wrong are confirmed when a second probe sees them again, like all that was run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pichak_coordinator.records import Finding, Row
from pichak_core.measurement import Measurement
from pichak_core.plan import format_number

PEERS = "gpu.peer_copy_verdict"
TOGETHER = "gpu.copies_together_ratio"
#: Below this share of its own rate a card shares its way to the host with the others.
SHARED_RATIO = 0.8


def copy_findings(row: Row) -> Iterator[Finding]:
    """The findings of a row; details that are malformed say nothing."""
    yield from _wrong_content(row)
    yield from _peers(row)
    yield from _shared_bus(row)


def _wrong_content(row: Row) -> Iterator[Finding]:
    wrong = {
        name: int(reading.detail["wrong"])
        for name, reading in row.fingerprint.items()
        if isinstance(reading, Measurement)
        and reading.detail
        and "wrong" in reading.detail
        and name.startswith("gpu.")
        and isinstance(reading.detail.get("wrong"), int)
        and reading.detail["wrong"] > 0
    }
    if wrong:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(wrong.items()))
        yield Finding(
            "copies_corrupt",
            "fail",
            f"copies arrived with other content than was sent: {listed}",
            {"wrong": wrong},
            metric=min(wrong),
        )


def _peers(row: Row) -> Iterator[Finding]:
    reading = row.fingerprint.get(PEERS)
    pairs = reading.detail.get("pairs") if isinstance(reading, Measurement) else None
    listed = pairs if isinstance(pairs, (list, tuple)) else ()
    bad = [pair for pair in listed if isinstance(pair, Mapping) and pair.get("verdict") != "works"]
    if bad:
        told = ", ".join(
            f"{pair.get('source')} to {pair.get('target')}: {pair.get('verdict')}" for pair in bad
        )
        yield Finding(
            "peer_copies_fail",
            "warn",
            f"copies between GPUs do not arrive ({told}), whatever the driver says: training on "
            "several of these GPUs hangs or computes wrong numbers unless peer access is off",
            {"pairs": [dict(pair) for pair in bad]},
            metric=PEERS,
        )


def _shared_bus(row: Row) -> Iterator[Finding]:
    ratio = row.fingerprint.number(TOGETHER)
    if ratio is not None and ratio < SHARED_RATIO:
        yield Finding(
            "shared_bus",
            "info",
            f"with all GPUs of the machine copying at once a card falls to {ratio:.0%} of its own "
            "rate: they share a way to the host",
            {"ratio": format_number(ratio), "limit": SHARED_RATIO},
            confidence="low",
            metric=TOGETHER,
        )
