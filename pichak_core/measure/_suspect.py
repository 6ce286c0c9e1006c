"""Rule 6: a result that cannot be is marked, with the reason, and never ranks. Pure.

A faster copy than its link, memory faster than the part's peak, more operations than the units do
in a cycle: a cache or a bug answered. What is marked is `Measurement.suspect`; its reason names the
ceiling, so that a person can check it.
"""

from __future__ import annotations

from pichak_core.plan import format_number

#: Clocks may be set above what the part lists, and a timing has its own error.
ALLOWANCE = 0.05


def beyond(
    value: float, ceiling: float | None, unit: str, what: str, *, allowance: float = ALLOWANCE
) -> str:
    """Why `value` cannot be, "" when it can or when no ceiling is known.

    `what` completes "the N that …": "this link carries at most".
    """
    if ceiling is None or ceiling <= 0 or value <= ceiling * (1 + allowance):
        return ""
    return (
        f"{value / ceiling:.2f} times the {format_number(ceiling)} {unit} that {what}: "
        "a cache or a bug answered"
    )


def reasons(*each: str) -> str:
    """Those that there are, in one sentence."""
    return "; ".join(reason for reason in each if reason)
