"""A new run of ``fleet profile``, or the last one that goes on: what it was asked, and how it was
sent."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import UserError
from pichak_coordinator.cli.profile_request import MOST_DEADLINE, check_request
from pichak_coordinator.text import printable

if TYPE_CHECKING:
    from pichak_coordinator.records import Run
    from pichak_coordinator.request import ProfileRequest
    from pichak_coordinator.store import Store

#: What of a run may be another when it goes on; the network test belongs to what is measured.
_KINDS = ("fingerprint", "task", "ramp")
_NETWORK = {None: "neither --network nor --no-network", True: "--network", False: "--no-network"}


@dataclass(frozen=True)
class Sending:
    """Where a profile's jobs go and how, which decides nothing of what they measure, and whether
    links are tested. `address` is "" for a local Ray."""

    address: str = ""
    insecure: bool = False
    network: bool | None = None
    at_once: int | None = None

    @classmethod
    def of(
        cls, address: str | None, insecure: bool, network: bool | None, at_once: int | None
    ) -> Sending:
        """As the options and RAY_ADDRESS say."""
        if address is not None and not address.strip():
            raise UserError(
                "the address is empty: write HOST:PORT (Ray's default port is 6379) or 'auto', or "
                "leave it out for a local Ray"
            )
        where = (os.environ.get("RAY_ADDRESS", "") if address is None else address).strip()
        return cls("" if where == "local" else where, insecure, network, at_once)

    def settings(self, request: ProfileRequest) -> dict[str, Any]:
        """What is kept with the run, so that it can go on in the same way."""
        return {
            "cluster": self.address,
            "insecure": self.insecure,
            "network": self.network,
            "at_once": self.at_once,
            "deadline_seconds": dict(request.deadline_seconds),
            "even_if_busy": request.even_if_busy,
            "wait_seconds": request.wait_seconds,
        }


def new_run(store: Store, request: ProfileRequest, sending: Sending) -> str:
    """A new run; says so where one was cut off that could go on."""
    from pichak_coordinator.cut_runs import (
        COORDINATOR,
        PROFILE,
        count_ended,
        run_to_go_on,
        this_process,
    )

    settings = request.settings()
    with contextlib.suppress(ValueError):
        cut = run_to_go_on(store, PROFILE, settings)
        if cut.finished_unix is None:
            done, jobs = count_ended(store, cut.run)
            click.echo(
                f"pichak: {cut.run} was cut off when {done} of {jobs} jobs were done; --resume "
                "goes on with it, this is a new profile",
                err=True,
            )
    sent = sending.settings(request)
    return store.begin_run(PROFILE, {**settings, **sent, COORDINATOR: this_process()})


def resumed(
    store: Store, request: ProfileRequest, sending: Sending, named: Container[str]
) -> tuple[str, ProfileRequest, Sending]:
    """The run that is to go on, what it was asked and how it is sent; `UserError` where there is
    none, or where an option that was `named` contradicts it."""
    from pichak_coordinator.cut_runs import COORDINATOR, PROFILE, run_to_go_on, this_process

    asked = {name: value for name, value in request.settings().items() if name in named}
    try:
        cut = run_to_go_on(store, PROFILE, asked)
    except ValueError as error:
        raise UserError(f"--resume: {error}") from error
    try:
        request = _as_it_was_sent(request.with_settings(cut.settings), cut, named)
        sending = _sent_as_it_was(sending, cut, named)
    except ValueError as error:
        raise UserError(f"--resume: {cut.run} cannot go on: {error}") from error
    check_request(request)
    _say(store, cut, request, sending)
    store.reopen_run(cut.run, {**sending.settings(request), COORDINATOR: this_process()})
    return cut.run, request, sending


def _sent_as_it_was(sending: Sending, cut: Run, named: Container[str]) -> Sending:
    """`sending` with what the run had where nothing else was named."""
    from pichak_coordinator.cut_runs import begun_here

    was = cut.settings.get("cluster")
    network = _kept(cut, "network", None, (bool, type(None)))
    at_once = _kept(cut, "at_once", None, (int, type(None)))
    if at_once is not None and at_once < 1:
        raise ValueError(f"its at_once is {at_once}, which cannot be")
    if was == "" and sending.address:
        raise UserError(
            f"--resume: {cut.run} is of this machine alone; leave --address and RAY_ADDRESS out"
        )
    if "network" in named and "network" in cut.settings and network != sending.network:
        raise UserError(
            f"--resume: {cut.run} cannot go on with other settings: it had {_NETWORK[network]} "
            f"where now {_NETWORK[sending.network]} is asked"
        )
    if was and not sending.address:
        # A cluster gets this machine's token: an address that came in a file is not believed.
        if not isinstance(was, str) or not begun_here(cut.settings):
            raise UserError(
                f"--resume: {cut.run} is of the cluster at {was}; give --address (or RAY_ADDRESS), "
                "for this machine alone is another fleet"
            )
        sending = replace(sending, address=was)
    if "insecure" not in named and sending.address == was and begun_here(cut.settings):
        sending = replace(sending, insecure=_kept(cut, "insecure", False, (bool,)))
    if "network" not in named:
        sending = replace(sending, network=network)
    if "at_once" not in named:
        sending = replace(sending, at_once=at_once)
    return sending


def _as_it_was_sent(request: ProfileRequest, cut: Run, named: Container[str]) -> ProfileRequest:
    """`request` with the deadlines of the run and what it did on a busy GPU."""
    if "deadlines" not in named:
        deadlines = cut.settings.get("deadline_seconds", {})
        if not isinstance(deadlines, Mapping) or not all(
            kind in _KINDS and _is_number(seconds) and 0 < seconds <= MOST_DEADLINE
            for kind, seconds in deadlines.items()
        ):
            raise ValueError("its deadline_seconds cannot be")
        request = replace(request, deadline_seconds=dict(deadlines))
    if "even_if_busy" not in named:
        request = replace(request, even_if_busy=_kept(cut, "even_if_busy", False, (bool,)))
    if "wait_seconds" not in named:
        wait = cut.settings.get("wait_seconds", 0.0)
        if not _is_number(wait) or not 0 <= wait <= MOST_DEADLINE:
            raise ValueError(f"its wait_seconds is {str(wait)[:40]!r}, which cannot be")
        request = replace(request, wait_seconds=float(wait))
    return request


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _kept(cut: Run, name: str, default: Any, allowed: tuple[type, ...]) -> Any:
    value = cut.settings.get(name, default)
    if type(value) not in allowed:
        raise ValueError(f"its {name} is {str(value)[:40]!r}, which cannot be")
    return value


def _say(store: Store, cut: Run, request: ProfileRequest, sending: Sending) -> None:
    """With what the run goes on, in one line."""
    from pichak_coordinator.cut_runs import count_ended

    done, jobs = count_ended(store, cut.run)
    told = [f"--address {sending.address}" if sending.address else "this machine alone"]
    told += ["--insecure"] if sending.insecure else []
    told += [_NETWORK[sending.network]] if sending.network is not None else []
    told += [f"--at-once {sending.at_once}"] if sending.at_once is not None else []
    told += [f"--deadline {kind}={s:g}" for kind, s in sorted(request.deadline_seconds.items())]
    told += ["--even-if-busy"] if request.even_if_busy else []
    told += [f"--wait-if-busy {request.wait_seconds:g}"] if request.wait_seconds else []
    asked = f"--model {request.model}"
    asked += f" --data {request.data}" if request.data else ""
    text = (
        f"going on with {cut.run}, of which {done} of {jobs} jobs are done, as it was asked "
        f"({asked}, …) on {told[0]}"
    )
    text += f" with {' '.join(told[1:])}" if told[1:] else ""
    click.echo(f"pichak: {printable(text)}", err=True)
