"""Before a cluster is joined: whether an address is one, whether it answers, and whether what
answers may be joined. Ray is not asked: it would knock for minutes and blame the network."""

from __future__ import annotations

import ipaddress
import os
import socket

from pichak_coordinator.open_cluster import ask

#: How long an address may take to accept a connection.
CONNECT_SECONDS = 5.0


class ClusterError(RuntimeError):
    """A cluster that cannot be used: what, where, and what to do."""


def is_address(text: str) -> bool:
    """Whether `text` is HOST:PORT with a port that there is."""
    host, _, port = text.rpartition(":")
    sound = bool(host.strip("[]")) and "/" not in host and not any(c.isspace() for c in host)
    return sound and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is of this machine alone."""
    host = address.rsplit(":", 1)[0].strip("[]")
    if host in ("auto", "localhost"):  # "auto" that is no address yet: there is nothing to join
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_silent_address(address: str, mark: str) -> None:
    """Ray itself would knock at a wrong address for minutes before it says so. What Ray takes
    "auto" for may be a cluster that ended without removing its file."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        if mark:
            raise ClusterError(
                f"{mark}the cluster at {address} on this machine, where nothing answers ({error}): "
                "start Ray here again (`ray start`), or name the head as HOST:PORT"
            ) from error
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error}); is it running there (`ray status "
            f"--address {address}`), and reachable from here?"
        ) from error


def refuse_what_answers(
    address: str,
    *,
    insecure: bool,
    has_token: bool | None = None,
    timeout_seconds: float = CONNECT_SECONDS,
) -> bool:
    """Whether the cluster asks for a token. `ClusterError` for what no cluster is, for one off
    loopback that answers without a token (a client with one joins it and does not notice), and for
    one that wants a token where this side is told to use none (`has_token`, by default what
    RAY_AUTH_MODE says): Ray would knock at them for long and blame the network. Who does not answer
    in time is let pass."""
    host, _, port = address.rpartition(":")
    answer = ask(host.strip("[]"), int(port), timeout_seconds)
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    strangers = {
        "web server": "a web server",
        "no head": "another service, as Ray's nodes have some,",
        "other": f"another program ({answer.banner!r})",
    }
    if what := strangers.get(answer.who):
        raise ClusterError(
            f"what answers at {address} is {what} and no Ray head: give the port of `ray start "
            "--head --port` (6379 without it; 8265 is the dashboard's)"
        )
    if answer.who == "open" and not insecure and not is_loopback(address):
        raise ClusterError(
            f"the cluster at {address} answers without a token: whoever reaches it can run code on "
            "all of its nodes; start it with RAY_AUTH_MODE=token on each of them, or pass "
            "--insecure if its network is private"
        )
    uses_token = mode == "token" if has_token is None else has_token
    if answer.who == "asks for a token" and not uses_token:
        raise ClusterError(
            f"the cluster at {address} wants its token, and this side is told to use none "
            f"(RAY_AUTH_MODE={mode}): unset RAY_AUTH_MODE, and put the cluster's token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN (on the head: `ray get-auth-token`)"
        )
    return answer.who == "asks for a token"


def refuse_open_cluster(address: str, *, insecure: bool) -> None:
    """`ClusterError` for a cluster off loopback that is to be joined without authentication: Ray
    runs code for whoever reaches it (CVE-2023-48022, field case 92)."""
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if insecure or mode == "token" or is_loopback(address):
        return
    raise ClusterError(
        f"the cluster at {address} would be joined without authentication (RAY_AUTH_MODE={mode}); "
        "start it with RAY_AUTH_MODE=token, or pass --insecure if its network is private"
    )
