"""Who may not be among the N devices of a pick, and why, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pichak_coordinator.members import Member
from pichak_coordinator.prices import PriceBook
from pichak_coordinator.records import Row
from pichak_core.plan import Value

if TYPE_CHECKING:
    from pichak_coordinator.pick_many import Wish


def barred(member: Member, wish: Wish) -> str:
    """Why a member may not be picked at all; empty where it may."""
    names = {member.label, member.row.node.host, member.row.node.node}
    if names & wish.without:
        return "left out as asked (--without)"
    if member.faults and not (names | {"all"}) & wish.allow:
        return f"a confirmed fault: {', '.join(member.faults)}"
    return ""


def unpriced(member: Member, book: PriceBook, wish: Wish) -> str:
    """Why it cannot be weighed by cost; empty where it can or need not."""
    if wish.by != "cost" or isinstance(book.price(member.row), Value):
        return ""
    return "no price is given for it"


def unmeasured(row: Row, scored: bool) -> str:
    """Why a row is no member."""
    if row.error:
        return f"{row.node.label}: its step was not measured: {row.error[:200]}"
    what = "its step in scored tokens" if scored else "its step"
    return f"{row.node.label}: {what} was not measured"


def too_few(sound: int, rows: int, wanted: int, left_out: Sequence[str]) -> str:
    """That there are not enough of them, and why."""
    some = "; ".join(left_out[:5]) + (f"; and {len(left_out) - 5} more" * (len(left_out) > 5))
    text = f"{wanted} devices are asked for, and {sound} of {rows} can be picked"
    hint = " (--allow-fault NAME lets one in)" if "a confirmed fault" in some else ""
    return f"{text}: {some}{hint}" if some else text
