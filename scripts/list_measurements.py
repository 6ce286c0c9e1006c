"""Writes docs/MEASUREMENTS.md from the registry: every measurement, its metrics and their units.

python scripts/list_measurements.py > docs/MEASUREMENTS.md
"""

from __future__ import annotations

from collections.abc import Iterator

from pichak_core.measure import Probe, probes

HEAD = """# What is measured on a machine

Each measurement reads the metrics below it, or says why it could not. This page is written by
`scripts/list_measurements.py` from the registry in `pichak_core/measure`; the seconds are the time
that a measurement may take at each depth.
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *(line for probe in probes().values() for line in _section(probe))])


def _section(probe: Probe) -> Iterator[str]:
    seconds = ", ".join(f"{depth} {limit:g} s" for depth, limit in probe.budget_seconds.items())
    yield f"## {probe.name}\n"
    yield f"On {' and '.join(probe.devices)}; {seconds}.\n"
    yield "| metric | unit | what it is |"
    yield "| --- | --- | --- |"
    for metric in probe.metrics:
        yield f"| `{metric.name}` | {metric.unit or '–'} | {metric.meaning.replace('|', '∥')} |"
    yield ""


if __name__ == "__main__":
    print(page(), end="")
