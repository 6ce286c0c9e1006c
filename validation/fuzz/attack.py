"""Every mutated message through `decode` and into a real store, and what must hold afterwards."""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutations import mutated, sound

from pichak_agent.messages import Job, MessageError, Outcome, decode
from pichak_coordinator.ingest import read_outcome
from pichak_coordinator.store import Store

TABLES = ("outcomes", "findings", "jobs", "runs", "plans")
#: Messages in one transaction.
BATCH = 200


def attack(path: Path, count: int, seed: int = 0) -> dict[str, Any]:
    """Figures, and under ``wrong`` each thing that should not have happened (none)."""
    began, peak = time.monotonic(), _peak_mb()
    wrong: list[str] = []
    kept: set[tuple[str, int]] = set()
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    numbers = 0
    with Store.open(path) as store:
        batch: list[tuple[str, bytes]] = []
        messages = mutated(count, seed)
        while True:
            batch = [message for _, message in zip(range(BATCH), messages, strict=False)]
            if not batch:
                break
            for what, data in batch:
                done[what] += 1
                wrong += _decode_crashes(what, data)
            answers = store.record_outcomes([data for _, data in batch])
            for (what, data), answer in zip(batch, answers, strict=True):
                if isinstance(answer, MessageError):
                    refused[what] += 1
                    continue
                parts = read_outcome(data)
                key = (parts.outcome.job_id, parts.outcome.attempt)
                if answer is (key in kept):
                    wrong.append(f"{what}: {key} is new: {answer}, but seen before: {key in kept}")
                numbers += len(parts.numbers()) if key not in kept else 0
                kept.add(key)
        counts = {table: _count(store, table) for table in TABLES}
        counts["numbers"] = sum(_numbers(store))
        if (counts["outcomes"], counts["numbers"]) != (len(kept), numbers):
            wrong.append(f"{counts} where {len(kept)} outcomes with {numbers} numbers were taken")
        if counts["findings"] or counts["plans"] or counts["runs"]:
            wrong.append(f"something of a job that nobody sent got into a run: {counts}")
        if next(iter(store.each("PRAGMA integrity_check"))) != ("ok",):
            wrong.append("the file is damaged")
        for node in store.each("SELECT DISTINCT node FROM outcome_numbers"):
            store.histories(node[0], store.metric_names(node[0]))
    return {
        "messages": count,
        "kinds": len(done),
        "refused": sum(refused.values()),
        "kept": len(kept),
        "peak_rss_growth_mb": round(_peak_mb() - peak, 1),
        "seconds": round(time.monotonic() - began, 1),
        "never_refused": sorted(set(done) - set(refused)),
        "wrong": wrong,
    }


def _decode_crashes(what: str, data: bytes) -> list[str]:
    found: list[str] = []
    for kind in (Job, Outcome):
        try:
            decode(data, kind)
        except MessageError as error:
            if len(str(error)) > 2000:
                found.append(f"{what}: a refusal of {len(str(error)):,} characters")
        except Exception as error:  # noqa: BLE001 - whatever else it raises is what is looked for
            found.append(f"{what}: {kind.__name__}: {type(error).__name__}: {str(error)[:200]}")
    return found


def _count(store: Store, table: str) -> int:
    return int(next(iter(store.each(f"SELECT count(*) FROM {table}")))[0])


def _numbers(store: Store) -> Iterator[int]:
    """How many each outcome has."""
    for (text,) in store.each("SELECT numbers_json FROM outcome_numbers"):
        yield len(json.loads(text))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


__all__ = ["attack", "sound"]
