"""Which stored run a user means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pichak_coordinator.cli.common import UserError

if TYPE_CHECKING:
    from pichak_coordinator.records import Run


def chosen_run(runs: Sequence[Run], name: str) -> str:
    """The run with this id, beginning of an id, or name; "" is the newest that compares machines.

    `runs` are the newest first. `UserError` when there is none, or more than one.
    """
    ids = [run.run for run in runs]
    if not ids:
        raise UserError("no run is stored yet; `pichak fleet profile` makes one")
    if not name:
        return next((run.run for run in runs if run.compares), ids[0])
    named = [run.run for run in runs if run.settings.get("name") == name]
    matches = named or [run for run in ids if run.startswith(name)]
    if name in ids:
        return name
    if len(matches) != 1:
        found = f"{len(matches)} runs begin with" if matches else "there is no run"
        raise UserError(f"{found} {name!r}; `pichak fleet history` lists them")
    return matches[0]
