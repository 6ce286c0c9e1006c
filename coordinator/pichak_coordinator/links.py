"""The links of a fleet: which pairs are tested together, and what was found of each. Pure.

A pair is written (client, server): the client opens the connections. A direction is (source,
target): where the bytes go. Both name nodes as a person reads them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pichak_core.measurement import Fingerprint, Measurement, Reading, Reason, Unmeasured

Pair = tuple[str, str]
Pairs = Literal["auto", "all", "ring", "sample"]

#: Up to this many nodes ``auto`` tests all pairs.
ALL_UP_TO = 12
#: Tests a node takes part in when pairs are sampled.
SAMPLED_ROUNDS = 6

#: What a reading's name ends with, from the client's point of view.
_RTT, _SEND, _RECEIVE = "rtt_ms", "send_mb_s", "receive_mb_s"
_SEND_LOSS, _RECEIVE_LOSS = "send_loss_percent", "receive_loss_percent"


def tournament(nodes: Sequence[str]) -> list[list[Pair]]:
    """Every pair once, in rounds in which no node is twice: n − 1 rounds, n for an odd n.

    The circle method: one stays, the others move on by one place each round. Clients alternate, so
    that a node opens about as many links as it answers.
    """
    seats: list[str | None] = [*nodes]
    if len(seats) % 2:
        seats.append(None)
    count = len(seats)
    rounds: list[list[Pair]] = []
    for turn in range(count - 1):
        pairs: list[Pair] = []
        for place in range(count // 2):
            one, other = seats[place], seats[count - 1 - place]
            if one is not None and other is not None:
                opens = (place or turn) % 2
                pairs.append((one, other) if opens else (other, one))
        rounds.append(pairs)
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds


def into_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs in rounds in which no node is twice, each in the first that has room for it."""
    rounds: list[list[Pair]] = []
    busy: list[set[str]] = []
    for pair in pairs:
        for members, nodes in zip(rounds, busy, strict=True):
            if nodes.isdisjoint(pair):
                members.append(pair)
                nodes.update(pair)
                break
        else:
            rounds.append([pair])
            busy.append(set(pair))
    return rounds


def schedule(nodes: Sequence[str], pairs: Pairs = "auto", seed: int = 0) -> list[list[Pair]]:
    """The rounds of a test: ``all`` pairs, a ``ring`` (each node with two neighbours) or a
    ``sample`` (each node with `SAMPLED_ROUNDS` others); ``auto`` is all of a small fleet."""
    if len(set(nodes)) != len(nodes):
        raise ValueError("two nodes have one name")
    if pairs == "ring" and len(nodes) > 3:
        ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        # Every second one first: two rounds, three for an odd number.
        return into_rounds(ring[::2] + ring[1::2])
    if pairs == "sample" or (pairs == "auto" and len(nodes) > ALL_UP_TO):
        mixed = [*nodes]
        random.Random(seed).shuffle(mixed)  # noqa: S311 - a choice of pairs, no secret
        return tournament(mixed)[:SAMPLED_ROUNDS]
    return tournament(nodes)


def unordered(one: str, other: str) -> Pair:
    """The name of a link whoever opened it."""
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True)
class Reach:
    """Whether `client` could open a connection to `server`.

    `why` says why not. `local` and `seen_as` are the client's address as it has it and as the
    server saw it; `target_is_local`: the address asked for is one of the server's own.
    """

    client: str
    server: str
    open: bool
    why: str = ""
    stranger: bool = False
    connect_ms: float | None = None
    local: str = ""
    seen_as: str = ""
    target: str = ""
    target_is_local: bool = True

    @property
    def translated(self) -> bool:
        """A NAT gave the connection another source address."""
        return bool(self.local and self.seen_as) and self.local != self.seen_as

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def from_job(cls, client: str, server: str, record: Any) -> Reach:
        """From what a node says; `ValueError` when it is malformed."""
        if not isinstance(record, Mapping) or not isinstance(record.get("open"), bool):
            raise ValueError(f"what {client} says of {server} is no answer")
        place = record.get("place") or {}
        if not isinstance(place, Mapping):
            raise ValueError(f"the addresses between {client} and {server} are no object")
        ms = record.get("connect_ms")
        return cls(
            client,
            server,
            record["open"],
            str(record.get("why", ""))[:500],
            record.get("stranger") is True,
            float(ms) if isinstance(ms, (int, float)) else None,
            str(place.get("local", ""))[:64],
            str(place.get("seen_as", ""))[:64],
            str(place.get("target", ""))[:64],
            place.get("target_is_local", True) is True,
        )


@dataclass(frozen=True)
class LinkMatrix:
    """What is known of the links between `nodes`.

    `reach` by (client, server); `rtt` by unordered pair; `rate` and `loss` by direction. What was
    not measured is `Unmeasured` with its reason; what is absent was never asked for.
    """

    nodes: tuple[str, ...]
    reach: Mapping[Pair, Reach] = field(default_factory=dict)
    rtt: Mapping[Pair, Reading] = field(default_factory=dict)
    rate: Mapping[Pair, Reading] = field(default_factory=dict)
    loss: Mapping[Pair, Reading] = field(default_factory=dict)

    def with_reach(self, found: Iterable[Reach]) -> LinkMatrix:
        """These answers added, replacing earlier ones."""
        return replace(self, reach={**self.reach, **{(r.client, r.server): r for r in found}})

    def with_link(self, client: str, server: str, readings: Fingerprint) -> LinkMatrix:
        """A link's readings added, as the client's job names them (``network.PEER.rtt_ms``)."""
        rtt, rate, loss = dict(self.rtt), dict(self.rate), dict(self.loss)
        for name, reading in readings.items():
            part = name.rpartition(".")[2]
            if part == _RTT:
                rtt[unordered(client, server)] = reading
            elif part == _SEND:
                rate[client, server] = reading
            elif part == _RECEIVE:
                rate[server, client] = reading
            elif part == _SEND_LOSS:
                loss[client, server] = reading
            elif part == _RECEIVE_LOSS:
                loss[server, client] = reading
        return replace(self, rtt=rtt, rate=rate, loss=loss)

    def with_gap(self, one: str, other: str, reason: Reason, why: str) -> LinkMatrix:
        """A link of which nothing could be measured."""
        readings = Fingerprint()
        for part in (_RTT, _SEND, _RECEIVE, _SEND_LOSS, _RECEIVE_LOSS):
            readings.add(Unmeasured(f"network.{other}.{part}", reason, why))
        return self.with_link(one, other, readings)

    def without(self, pairs: Iterable[Pair]) -> LinkMatrix:
        """The same without what was measured of these links."""
        gone = {unordered(*pair) for pair in pairs}

        def kept(readings: Mapping[Pair, Reading]) -> dict[Pair, Reading]:
            return {k: v for k, v in readings.items() if unordered(*k) not in gone}

        return replace(self, rtt=kept(self.rtt), rate=kept(self.rate), loss=kept(self.loss))

    def measured_links(self, node: str) -> list[Pair]:
        """The links of a node of which something was measured, as unordered pairs."""
        return sorted(
            pair
            for pair, reading in self.rtt.items()
            if node in pair and isinstance(reading, Measurement)
        )

    @property
    def links(self) -> list[Pair]:
        """Every pair of nodes, unordered."""
        return [
            unordered(one, other)
            for index, one in enumerate(self.nodes)
            for other in self.nodes[index + 1 :]
        ]

    def skipped(self) -> list[Pair]:
        """Links that were never asked for."""
        return [pair for pair in self.links if pair not in self.rtt]

    def as_dicts(self) -> list[dict[str, Any]]:
        """A record for each link, ``--json``'s ``links``."""
        never = Unmeasured("", Reason.NOT_ASKED, "not among the chosen pairs (--pairs all)")
        return [
            {
                "a": a,
                "b": b,
                "rtt_ms": self.rtt.get((a, b), never).as_dict(),
                "a_to_b_mb_s": self.rate.get((a, b), never).as_dict(),
                "b_to_a_mb_s": self.rate.get((b, a), never).as_dict(),
                "a_to_b_loss_percent": self.loss.get((a, b), never).as_dict(),
                "b_to_a_loss_percent": self.loss.get((b, a), never).as_dict(),
            }
            for a, b in self.links
        ]


def number(reading: Reading | None) -> float | None:
    """A reading as a number that may judge: measured and not suspect."""
    if not isinstance(reading, Measurement) or reading.suspect:
        return None
    return None if isinstance(reading.value, (str, bool)) else float(reading.value)
