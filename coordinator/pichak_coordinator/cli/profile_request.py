"""From the options of ``fleet profile`` and ``agent probe`` to what they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pichak_coordinator.cli.common import UserError
from pichak_coordinator.cli.options import check_data, check_length, check_model

if TYPE_CHECKING:
    from pichak_coordinator.request import ProfileRequest

#: The longest time that a job may be given, in seconds.
MOST_DEADLINE = 86400.0


def profile_request(asked: Mapping[str, Any], deadlines: Sequence[str]) -> ProfileRequest:
    """The request of a command's options, checked; `UserError` says what is wrong with them."""
    request = unchecked_request(asked, deadlines)
    check_request(request)
    return request


def unchecked_request(asked: Mapping[str, Any], deadlines: Sequence[str]) -> ProfileRequest:
    """The request of a command's options, of which some may yet come from a stored run."""
    from pichak_coordinator.request import ProfileRequest

    given = dict(asked)
    given["memory_cap_bytes"] = given.pop("memory_cap")
    return ProfileRequest(**given, deadline_seconds=_deadlines(deadlines))


def check_request(request: ProfileRequest) -> None:
    """`UserError` says what of it cannot be."""
    from pichak_core.measure import probes

    check_data(request.data)
    known = list(probes())
    for name in request.only:
        if name not in known:
            raise UserError(f"--only {name}: the measurements are {', '.join(known)}")
    check_model(request.model)
    check_length(request.model, request.data, request.seq_len)


def _deadlines(texts: Sequence[str]) -> dict[str, float]:
    made: dict[str, float] = {}
    for text in texts:
        kind, _, seconds = text.partition("=")
        try:
            made[kind] = float(seconds)
        except ValueError:
            made[kind] = 0.0
        if kind not in ("fingerprint", "task", "ramp") or not 0 < made[kind] <= MOST_DEADLINE:
            raise UserError(f"--deadline {text}: write fingerprint=90, task=180 or ramp=240")
    return made
