"""Where a ramp may begin: what identical devices needed, in this run or the one before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pichak_coordinator.records import Row
from pichak_core.tune.first_guess import FirstGuess

#: Settings that change what a row needs; two runs that differ in one foretell nothing.
_DECIDING = ("model", "data", "method", "seq_len")


class RampGuesses:
    """First guesses by the model of the device; "" is a device nobody knows, and gets none."""

    def __init__(self) -> None:
        self._known: dict[str, FirstGuess] = {}

    def learn(self, model: str, ramp: Mapping[str, Any] | None, where: str) -> None:
        """Keep what `ramp` (`RampResult.as_dict()`) foretells for the devices of `model`."""
        guess = FirstGuess.from_ramp(ramp, where)
        if model and guess is not None:
            self._known[model] = guess

    def learn_run(
        self, rows: Iterable[Row], then: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        """Keep what an earlier run saw, if it trained with the same settings (`then`, `now`)."""
        if all(then.get(name) == now.get(name) for name in _DECIDING):
            for row in rows:
                if not row.node.simulated:
                    self.learn(row.node.model, row.ramp, f"{row.node.label}, an earlier run")

    def of(self, model: str) -> dict[str, Any] | None:
        """The job parameter for a device of `model`."""
        guess = self._known.get(model)
        return guess.as_dict() if guess else None
