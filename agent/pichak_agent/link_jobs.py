"""The jobs of a link test: one machine listens, the others ask.

Keys and tokens are hexadecimal texts that were made for one run; a token opens one session with one
listener, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from pichak_agent.child_jobs import Partial, Progress, RefusedError
from pichak_core.measure._net_client import LinkClient
from pichak_core.measure._net_link import PLANS, measure_link, mirrored, unmeasured
from pichak_core.measure._net_server import Listener
from pichak_core.measure._net_wire import CONNECT_SECONDS, LinkError, StrangerError
from pichak_core.measurement import Fingerprint, Reason

_PARALLEL_CONNECTS = 32
_LISTEN = {"address": str, "key": str, "seconds": (int, float), "idle_seconds": (int, float)}
_PEER = {"peer": str, "address": str, "port": int, "session": str, "token": str}


def listen_job(
    params: Mapping[str, Any], *, progress: Progress, partial: Partial
) -> dict[str, Any]:
    """Listen on `address` for those who have a token made from `key`, for at most `seconds`; end
    when nobody has come for `idle_seconds`.

    The progress line "listening on port N" tells the port that the system chose. The result is
    ``{"listener": {"address", "port", "is_local", "served", "refused"}, "fingerprint"}``: the links
    that others measured with this machine, as this end has them.
    """
    _check(params, _LISTEN)
    found = Fingerprint()

    def take(peer: Any, readings: Any) -> None:
        # What is no reading raises, which ends that client's session and nothing else.
        for reading in mirrored(str(peer), dict(readings)):
            found.add(reading)

    listener = Listener(params["address"], bytes.fromhex(params["key"]), on_told=take)

    def told() -> dict[str, Any]:
        return {
            "fingerprint": found.to_dict(),
            "listener": {
                "address": listener.address,
                "port": listener.port,
                "is_local": listener.is_local,
                "served": listener.served,
                "refused": listener.refused,
            },
        }

    try:
        progress(f"listening on port {listener.port}")
        listener.serve(float(params["seconds"]), float(params["idle_seconds"]))
    finally:
        listener.close()
        partial(told())
    return told()


def reach_job(params: Mapping[str, Any], *, progress: Progress, partial: Partial) -> dict[str, Any]:
    """Open a connection to each of `peers`, all at once, and say through which addresses it went.

    ``{"reach": {peer: {"open", "why", "stranger", "connect_ms", "place"}}}``; `stranger`: something
    answers there, but not the listener.
    """
    peers = params.get("peers")
    if not isinstance(peers, list):
        raise RefusedError("peers: a list was expected")
    for peer in peers:
        _check(peer, _PEER)
    reached: dict[str, Any] = {}
    progress(f"opening connections to {len(peers)} nodes")
    with ThreadPoolExecutor(max(1, min(_PARALLEL_CONNECTS, len(peers)))) as pool:
        waits = {pool.submit(_reach, peer): str(peer["peer"]) for peer in peers}
        for done in as_completed(waits):
            reached[waits[done]] = done.result()
            partial({"reach": reached})
    return {"reach": reached}


def _reach(peer: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with _client(peer) as link:
            place = link.place()
            return {
                "open": True,
                "why": "",
                "stranger": False,
                "connect_ms": link.connect_ms,
                "place": place.as_dict(),
            }
    except (LinkError, OSError, ValueError) as error:
        return {"open": False, "why": str(error), "stranger": isinstance(error, StrangerError)}


def link_job(params: Mapping[str, Any], *, progress: Progress, partial: Partial) -> dict[str, Any]:
    """Measure the link to `peer`: ``{"fingerprint": readings named network.PEER.*, "place": …}``.

    A link that fails half-way keeps what was measured before. `own` is what this machine is called;
    the other end hears the readings under that name.
    """
    _check({k: v for k, v in params.items() if k != "depth"}, {**_PEER, "own": str})
    plan = PLANS.get(params.get("depth", "quick"))
    if plan is None:
        raise RefusedError(f"depth is {params['depth']!r}, not 'quick' or 'full'")
    prefix = f"network.{params['peer']}"
    found = Fingerprint()
    place: dict[str, Any] = {}
    why = ""
    try:
        with _client(params) as link:
            place = link.place().as_dict()
            for reading in measure_link(link, prefix, plan, progress=progress):
                found.add(reading)
                partial({"fingerprint": found.to_dict(), "place": place})
            link.tell(params["own"], found.to_dict())
    except TimeoutError:
        why = "the other end stopped answering"
    except (LinkError, OSError) as error:
        why = str(error)
    for gap in unmeasured(prefix, Reason.FAILED, why or "it was not reached"):
        if gap.name not in found:
            found.add(gap)
    return {"fingerprint": found.to_dict(), "place": place, "error": why}


def _client(peer: Mapping[str, Any]) -> LinkClient:
    return LinkClient(
        peer["address"],
        peer["port"],
        bytes.fromhex(peer["session"]),
        bytes.fromhex(peer["token"]),
        connect_seconds=CONNECT_SECONDS,
    )


def _check(params: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(params, Mapping) or set(params) != set(wanted):
        raise RefusedError(f"this job takes {', '.join(wanted)}, and nothing else")
    for name, kind in wanted.items():
        if not isinstance(params[name], kind) or isinstance(params[name], bool):
            raise RefusedError(f"{name}: {type(params[name]).__name__} is not what was expected")
    for name in ("key", "session", "token"):
        try:
            bytes.fromhex(params.get(name, ""))
        except ValueError:
            raise RefusedError(f"{name}: not hexadecimal") from None
