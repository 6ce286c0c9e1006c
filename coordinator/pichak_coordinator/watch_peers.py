"""Whom a watch holds a probe against: the latest rows of its devices, each read once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pichak_coordinator.judged import Judged
from pichak_coordinator.records import NodeRecord, Row

#: Peers of a model that a probe is held against; from `verdict.WHOLE_GROUP` on more change little.
MOST_PEERS = 48

#: A node and one of its devices, whatever that one's number was in a probe.
Ident = tuple[str, str]


def ident(node: NodeRecord) -> Ident:
    """Which device it is, whatever its number was in this probe."""
    return node.node, node.gpu_uuid or node.device


class Peers:
    """The latest row of each device, in the order in which they were put: the last one was read
    last."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[Ident, tuple[str, Row]] = {}
        self._read: dict[Ident, Judged] = {}
        for row in rows:
            self.put(row)

    def put(self, row: Row) -> None:
        """What was read of a device last."""
        key = ident(row.node)
        self._rows.pop(key, None)
        self._read.pop(key, None)
        self._rows[key] = row.node.model, row

    def beside(self, rows: Sequence[Row]) -> list[Judged]:
        """Of each model of `rows`, those of other devices that were read last: the median of more
        of them is hardly steadier."""
        mine = {ident(row.node) for row in rows}
        left = dict.fromkeys((row.node.model for row in rows), MOST_PEERS)
        open_models = len(left)
        chosen: list[Judged] = []
        for key, (model, row) in reversed(self._rows.items()):
            room = left.get(model)
            if not room or key in mine:
                continue
            left[model] = room - 1
            chosen.append(self._judged(key, row))
            open_models -= room == 1
            if not open_models:
                break
        return chosen

    def _judged(self, key: Ident, row: Row) -> Judged:
        read = self._read.get(key)
        if read is None:
            read = self._read[key] = Judged(_apart(row))
        return read


def _apart(row: Row) -> Row:
    """A card of the same machine that was cuda:0 in its own probe must not pass for this one's."""
    node = row.node
    if not node.gpu_uuid:
        return row
    return replace(row, node=replace(node, device=f"cuda:{node.gpu_uuid}"))
