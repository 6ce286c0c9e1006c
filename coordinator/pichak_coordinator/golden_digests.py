"""Golden steps that came out otherwise than those of a device's kind. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pichak_coordinator.records import Finding, Row
from pichak_core.measurement import Measurement

_DIGEST = "golden.gradient_digest"


def wrong_digests(rows: Sequence[Row]) -> dict[tuple[str, str], Finding]:
    """Devices whose golden step is wrong in itself, or differs where nearly all of a kind agree.

    Kind: the same model, driver and torch (and vector instructions, on a CPU). At least two others
    must agree, and three quarters of all; two machines that differ accuse neither.
    """
    kinds: dict[tuple[str, ...], list[tuple[Row, str]]] = {}
    found: dict[tuple[str, str], Finding] = {}
    for row in rows:
        reading = row.fingerprint.get(_DIGEST)
        if not isinstance(reading, Measurement):
            continue
        if reading.suspect:  # compared with nobody's: it says itself what is wrong
            found[row.key] = Finding(
                "computes_differently",
                "fail",
                f"its fixed training step is wrong: {reading.suspect}",
                {"digest": str(reading.value), "why": reading.suspect},
                metric=_DIGEST,
            )
            continue
        if not row.node.model:
            continue
        versions = [row.fingerprint.text(n) or "" for n in ("software.driver", "software.torch")]
        vector = "" if row.node.gpu_model else str(reading.detail.get("cpu", ""))
        kind = (row.node.model, *versions, vector)
        kinds.setdefault(kind, []).append((row, str(reading.value)))
    for kind, members in kinds.items():
        ((common, count),) = Counter(digest for _, digest in members).most_common(1)
        if count < 2 or count < 0.75 * len(members) or len(members) < 3:
            continue
        for row, digest in members:
            if digest != common:
                found[row.key] = Finding(
                    "computes_differently",
                    "fail",
                    f"its fixed training step gave other bits than {count} of the {len(members)} "
                    f"devices of its kind ({kind[0]})",
                    {"digest": digest, "common": common, "agree": count, "of": len(members)},
                    metric=_DIGEST,
                )
    return found
