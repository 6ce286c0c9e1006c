"""A finished run held against its peers, its own history and the rules; findings into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pichak_coordinator.judge import judge
from pichak_coordinator.records import Finding
from pichak_coordinator.store import Store


def judge_run(
    store: Store, run: str, seen: Mapping[tuple[str, str], Sequence[Finding]] | None = None
) -> int:
    """Judge every row of `run`, keep what is found, and return how many findings that was.

    What the run before it found is looked at a second time; so is `seen`, what other probes of a
    (node, device) found before.
    """
    earlier = {key: row.findings for key, row in store.previous_rows(run).items()}
    for key, more in (seen or {}).items():
        earlier[key] = (*earlier.get(key, ()), *more)
    rows = store.rows_of(run, curves=False)
    found = judge(rows, history=store.earlier_values(run, rows), earlier=earlier)
    for (node, device), findings in found.items():
        if findings:
            store.record_findings(run, node, device, findings)
    return sum(len(findings) for findings in found.values())
