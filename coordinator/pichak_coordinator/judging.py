"""A finished run held against its peers, its own history and the rules; findings into the store."""

from __future__ import annotations

from pichak_coordinator.judge import judge
from pichak_coordinator.store import Store


def judge_run(store: Store, run: str) -> int:
    """Judge every row of `run`, keep what is found, and return how many findings that was."""
    earlier = {key: row.findings for key, row in store.previous_rows(run).items()}
    found = judge(store.rows_of(run), history=store.earlier_values(run), earlier=earlier)
    for (node, device), findings in found.items():
        if findings:
            store.record_findings(run, node, device, findings)
    return sum(len(findings) for findings in found.values())
