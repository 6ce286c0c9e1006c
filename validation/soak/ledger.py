"""What really happened, noted apart from the code under test: files seen in the spools, answers of
the store, ends of jobs."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pichak_agent.messages import MessageError, Outcome, decode
from pichak_coordinator.store import Store

Key = tuple[str, int]


class CountingStore(Store):
    """A store that is asked how often each outcome was new to it."""

    def count_in(self, taken: Counter[Key]) -> CountingStore:
        self._taken = taken
        return self

    def record_outcomes(self, items: Sequence[bytes]) -> list[bool | MessageError]:
        answers = super().record_outcomes(items)
        for data, new in zip(items, answers, strict=True):
            if new is True:
                outcome = decode(data, Outcome)
                self._taken[outcome.job_id, outcome.attempt] += 1
        return answers


class Spools:
    """Looks ten times a second which outcomes lie in which spool; `seen` maps (job, attempt) to the
    digests in the files' names."""

    def __init__(self, *roots: Path) -> None:
        self.seen: dict[Key, set[str]] = {}
        self.damaged: set[str] = set()
        self._roots = roots
        self._known: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def files(self) -> list[Path]:
        return sorted(path for root in self._roots for path in root.glob("agent/*/spool/*.mpk"))

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            for folder in [f for root in self._roots for f in root.glob("agent/*/spool")]:
                try:
                    names = [path.name for path in folder.iterdir()]
                except OSError:
                    continue
                for name in names:
                    if name.endswith(".mpk") and name not in self._known:
                        self._known.add(name)
                        if name.count(".") < 3:  # a stray one that was put there
                            continue
                        job_id, attempt, digest, _ = name.rsplit(".", 3)
                        self.seen.setdefault((job_id, int(attempt)), set()).add(digest)

    def lost(self, store: Store) -> list[str]:
        """Outcomes that were on a node's disk and are not in the store, byte for byte."""
        missing = []
        for (job_id, attempt), digests in self.seen.items():
            data = store.outcome_bytes(job_id, attempt)
            stored = None if data is None else hashlib.sha256(data).hexdigest()[:16]
            for digest in digests - {stored}:
                name = f"{job_id}.{attempt}.{digest}"
                if name not in self.damaged:
                    missing.append(f"{name} (stored: {stored})")
        return missing


def ends(store: Store) -> dict[str, Any]:
    """The store's own count: jobs by state, outcomes by status, readings."""
    return {
        "jobs_by_state": dict(store.each("SELECT state, count(*) FROM jobs GROUP BY 1 ORDER BY 1")),
        "outcomes_by_status": dict(
            store.each("SELECT status, count(*) FROM outcomes GROUP BY 1 ORDER BY 1")
        ),
        "outcomes_with_readings": next(iter(store.each("SELECT count(*) FROM outcome_numbers")))[0],
    }
