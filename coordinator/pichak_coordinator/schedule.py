"""Which node is probed when: what is known of each and the time now in, decisions out. Pure.

A node is probed lightly often and fully rarely. Both intervals are the policy's times the node's
own `pace`, which follows its noise: at `USUAL_NOISE` it is 1, at half of that 2, within
[`SHORTEST`, `LONGEST`]; it moves there by at most `_GROWTH` upwards and by half downwards a probe.
Something odd makes it the shortest at once. Each next time is jittered by up to ±`JITTER` of the
interval, by a hash of seed, node and count, so that a fleet spreads out and a schedule can be
repeated.

Seconds of probing are accounted for before they are spent: a probe starts only when its *longest*
time, with all that was charged for starts of the last hour, fits the budget. When it has ended it
is charged what it took. So no hour ever holds more than the budget, also when this process dies.
The hour's budget is spread over it: a regular probe waits while the last ten minutes hold their
share, so that what leaves the hour together is not begun together. The shares leave `RESERVE` of
the hour to second looks, which wait for the hour alone. Only the probe that fills a share may pass
it, so that none is wasted whatever a probe takes. Whoever has waited longest goes first, and what
does not fit yet makes those behind it wait: a full probe cannot be starved by light ones.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pichak_coordinator.schedule_terms import (
    DEPTHS,
    HOUR,
    SHARE_SECONDS,
    Charge,
    Decision,
    Depth,
    End,
    Entry,
    Policy,
    Probe,
)

__all__ = [
    "DEPTHS",
    "HOUR",
    "Charge",
    "Decision",
    "Depth",
    "Entry",
    "Policy",
    "Probe",
    "begun",
    "charged",
    "decide",
    "ended",
    "everything_due",
    "first",
    "fitted",
    "jumped",
    "resumed",
]


SHORTEST, LONGEST = 0.25, 4.0
JITTER = 0.25
#: The relative deviation from its own earlier readings at which a node's pace is 1.
USUAL_NOISE = 0.02
_GROWTH = 1.25
#: What regular probes leave of the hour's budget: a suspicion is looked at again at once.
RESERVE = 1 / 6
#: A pause between two looks at the schedule after which it is taken up anew, not caught up with.
GAP_SECONDS = 300.0
#: The first wait for a device that is busy, or a node that gave nothing; doubled each time.
RETRY_SECONDS = 60.0
_CRON_SPREAD_SECONDS = 300.0


def first(policy: Policy, node: str, now: float, *, devices: int = 1) -> Entry:
    """A node seen for the first time: each depth falls somewhere in the coming interval, so that a
    fleet that joins at once is not probed at once."""
    entry = Entry(node, {}, devices=devices)
    due = {
        depth: now + _share(policy, entry, depth) * policy.interval_seconds(depth, 1.0)
        for depth in policy.depths
    }
    return replace(entry, due={**due, **_by_cron(policy, entry, now)})


def fitted(policy: Policy, entry: Entry, now: float) -> Entry:
    """An entry of an earlier watch under the present policy: depths that are new fall into the
    coming interval, those no longer wanted are dropped, and no time lies further ahead than its
    interval allows, which also heals a clock that was set back."""
    new = first(policy, entry.node, now).due
    due: dict[Depth, float] = {}
    for depth in policy.depths:
        old, latest = entry.due.get(depth, math.inf), _latest(policy, entry, depth, now)
        due[depth] = old if old <= latest else new[depth]
    again = entry.again if entry.again in policy.depths else None
    return replace(entry, due=due, again=again)


def resumed(policy: Policy, entries: Iterable[Entry], now: float) -> list[Entry]:
    """The schedule after a sleep, a stop or a jump of the clock: what was missed is run once, some
    time within half of its interval, and never in a burst."""
    made: list[Entry] = []
    for each in entries:
        entry = fitted(policy, each, now)
        spread = {
            depth: now
            + _share(policy, entry, depth) * 0.5 * policy.interval_seconds(depth, entry.pace)
            for depth, due in entry.due.items()
            if due < now
        }
        made.append(replace(entry, due={**entry.due, **spread}))
    return made


def jumped(last_look: float | None, now: float) -> bool:
    """Whether the time since the last look is not one that a running watch leaves."""
    return last_look is None or not -1.0 <= now - last_look <= GAP_SECONDS


def charged(charges: Iterable[Charge], now: float, within: float = HOUR) -> float:
    """Probe-seconds of starts within the last so many seconds; a start in the future (the clock was
    set back) counts too."""
    return sum(c.seconds for c in charges if c.started > now - within)


def decide(
    policy: Policy,
    entries: Sequence[Entry],
    charges: Sequence[Charge],
    running: Iterable[str],
    now: float,
) -> Decision:
    """What to begin now. `running` are the nodes that are being probed; each has one probe at a
    time, since measurements on one machine disturb each other."""
    busy = set(running)
    look_again = freed = math.inf
    wanted: list[tuple[bool, float, str, int]] = []
    for number, entry in enumerate(entries):
        due = entry.waits_until
        if entry.node in busy:
            continue
        if due > now:
            look_again = min(look_again, due)
        else:
            wanted.append((entry.again is None, due, entry.node, number))
    # Of hundreds that wait a few begin: they are taken off a heap, the others left in it.
    heapq.heapify(wanted)
    left = share = math.inf
    if policy.budget_seconds is not None:
        left = policy.budget_seconds - charged(charges, now)
        if policy.spread:
            share = policy.budget_seconds * (1 - RESERVE) * SHARE_SECONDS / HOUR
            share -= charged(charges, now, SHARE_SECONDS)
    probes: list[Probe] = []
    blocked = 0
    while wanted:
        regular, _, node, number = heapq.heappop(wanted)
        entry = entries[number]
        if len(busy) + len(probes) >= policy.most_at_once:
            break  # the end of one of them makes room, and a look
        depth = _wanted_depth(policy, entry, now)
        cost = policy.longest_seconds[depth] * entry.devices
        quiet = policy.quiet.ends_after(now, cost) if policy.quiet else None
        if quiet is not None:
            look_again = min(look_again, quiet)
            continue
        if blocked or cost > left or (regular and share <= 0):
            if not blocked:
                freed = _freed(charges, now, HOUR if cost > left else SHARE_SECONDS)
            blocked += 1
            if policy.quiet is None:  # all behind it wait for the same
                blocked += len(wanted)
                break
            continue
        left -= cost
        share -= cost
        probes.append(Probe(node, depth, "due" if regular else "second look", cost))
    return Decision(tuple(probes), min(look_again, freed), blocked)


def begun(policy: Policy, entry: Entry, depth: Depth, now: float) -> Entry:
    """The entry when a probe has begun: the next one is an interval away whatever becomes of this
    one, so that a watch which is killed again and again does not probe again and again."""
    count = entry.probes + 1
    entry = replace(entry, probes=count, again=None, since={**entry.since, depth: now})
    # A full probe holds the light one.
    covered = [d for d in policy.depths if depth in (d, "full")]
    due = {d: _following(policy, entry, d, now) for d in covered}
    return replace(entry, due={**entry.due, **due})


def ended(
    policy: Policy,
    entry: Entry,
    depth: Depth,
    now: float,
    end: End,
    *,
    noise: float | None = None,
    look_again: bool = False,
) -> Entry:
    """The entry when a probe has ended. `noise` is the relative deviation from the node's earlier
    readings, None where there are none; `look_again` asks for a second look at once."""
    if end in ("busy", "failed"):
        wait = min(
            RETRY_SECONDS * 2.0 ** min(entry.retries, 20),
            policy.interval_seconds(depth, LONGEST),
        )
        wait *= 1 + JITTER * _share(policy, entry, depth)
        return replace(
            entry,
            retries=entry.retries + 1,
            failing=end == "failed" or entry.failing,
            due={**entry.due, depth: now + wait},
            again=None,
        )
    aim = USUAL_NOISE / noise if noise else LONGEST
    pace = SHORTEST if end == "restless" else max(entry.pace / 2, min(entry.pace * _GROWTH, aim))
    entry = replace(entry, pace=min(LONGEST, max(SHORTEST, pace)), retries=0, failing=False)
    due = {d: _following(policy, entry, d, entry.since.get(d, now)) for d in policy.depths}
    # Another depth keeps its time unless the new pace asks for an earlier one.
    kept = {d: t if d == depth else min(t, entry.due.get(d, t)) for d, t in due.items()}
    late = {d: max(t, now) for d, t in kept.items() if d not in policy.cron}
    return replace(entry, due={**entry.due, **late}, again=depth if look_again else None)


def everything_due(entries: Iterable[Entry], now: float) -> list[Entry]:
    """For a single round: who was never probed is due now."""
    return [replace(e, due=dict.fromkeys(e.due, now)) if not e.probes else e for e in entries]


def _wanted_depth(policy: Policy, entry: Entry, now: float) -> Depth:
    """What an entry that is due waits for: of two depths that are due the full one, which holds the
    light one."""
    if entry.again is not None:
        return entry.again
    return [depth for depth in policy.depths if entry.due[depth] <= now][-1]


def _following(policy: Policy, entry: Entry, depth: Depth, start: float) -> float:
    if depth in policy.cron:
        return _by_cron(policy, entry, start)[depth]
    interval = policy.interval_seconds(depth, entry.pace)
    return start + interval * (1 + JITTER * (2 * _share(policy, entry, depth) - 1))


def _by_cron(policy: Policy, entry: Entry, now: float) -> dict[Depth, float]:
    due: dict[Depth, float] = {}
    for depth, cron in policy.cron.items():
        start = cron.after(now)
        spread = min(_CRON_SPREAD_SECONDS, JITTER * (cron.after(start) - start))
        due[depth] = start + spread * _share(policy, entry, depth)
    return due


def _latest(policy: Policy, entry: Entry, depth: Depth, now: float) -> float:
    if depth in policy.cron:
        return policy.cron[depth].after(now) + _CRON_SPREAD_SECONDS
    return now + policy.interval_seconds(depth, entry.pace) * (1 + JITTER)


def _freed(charges: Iterable[Charge], now: float, within: float) -> float:
    """When the oldest charge of the last so many seconds falls out of them."""
    started = [c.started for c in charges if c.started > now - within and c.seconds > 0]
    return min(started, default=math.inf) + within


def _share(policy: Policy, entry: Entry, depth: Depth) -> float:
    """In [0, 1): the node's own, and another one for each of its probes."""
    text = f"{policy.seed}/{entry.node}/{entry.probes}/{depth}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
