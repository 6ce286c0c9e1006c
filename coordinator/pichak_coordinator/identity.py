"""Who a node is: by its machine and its GPUs, never by its address.

A rented machine comes back under another address and another Ray node id; its history is found
again by what does not change. A machine whose GPUs changed is another node, and is told.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pichak_coordinator.agent_problems import plain_problems
from pichak_coordinator.records import Finding, NodeRecord

_HASH_DIGITS = 10
_PLACE = ("address", "host", "agent_id", "node_id")


def gpu_uuids(hello: Mapping[str, Any]) -> tuple[str, ...]:
    """The sorted UUIDs of the GPUs in an agent's `hello`.

    Read from ``gpu_uuids``, a list of texts, or from ``gpus``, a list of ``{"uuid": …}``; a GPU
    whose UUID could not be read is left out.
    """
    listed = hello.get("gpu_uuids")
    if not isinstance(listed, (list, tuple)):
        gpus = hello.get("gpus")
        entries = gpus if isinstance(gpus, (list, tuple)) else ()
        listed = [entry.get("uuid") for entry in entries if isinstance(entry, Mapping)]
    return tuple(sorted(str(uuid) for uuid in listed if isinstance(uuid, str) and uuid))


def machine_key(hello: Mapping[str, Any]) -> str:
    """What stands for the machine itself: its machine id, else its host name, else its address.

    A container often has no machine id. `ValueError` when the hello names nothing at all.
    """
    for name in ("machine_id", "host", "address"):
        text = str(hello.get(name) or "").strip()
        if text:
            return text if name == "machine_id" else f"{name}:{text}"
    raise ValueError("a hello without machine_id, host or address names no machine")


def node_identity(hello: Mapping[str, Any]) -> str:
    """A short stable name: ``n-`` and ten hexadecimal digits over machine and sorted GPU UUIDs."""
    parts = (machine_key(hello), *gpu_uuids(hello))
    digest = hashlib.sha256("\x00".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    return f"n-{digest[:_HASH_DIGITS]}"


def node_identities(
    hellos: Sequence[Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]] | None = None
) -> list[str]:
    """One identity for each hello of a run, in the order given.

    Several agents on one machine that hold the same GPUs (or none) get ``-2``, ``-3`` …, by their
    address, host name and agent id in that order, so that the order in which they answered does
    not matter. `known` are the identities that the run has given already, with their hellos: who
    is at the same place keeps its own, also where others of its machine are missing now.
    """
    made = [node_identity(hello) for hello in hellos]
    order = sorted(range(len(hellos)), key=lambda i: (made[i], _place(hellos[i]), i))
    names = [""] * len(hellos)
    taken = set(known or {})
    # The whole place first: several agents may share an address and a host name.
    for length in (len(_PLACE), 2):
        kept: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(set(known or {}) - set(names)):
            hello = (known or {})[name]
            kept.setdefault((node_identity(hello), *_place(hello)[:length]), []).append(name)
        for i in order:
            there = kept.get((made[i], *_place(hellos[i])[:length]), [])
            if not names[i] and there:
                names[i] = there.pop(0)
    for i in order:
        if not names[i]:
            numbers = (made[i] if n == 1 else f"{made[i]}-{n}" for n in itertools.count(1))
            names[i] = next(name for name in numbers if name not in taken)
            taken.add(names[i])
    return names


def _place(hello: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(hello.get(k) or "") for k in _PLACE)


def gpu_changes(had: Set[str], has: Set[str]) -> list[Finding]:
    """What to say when a machine's GPUs are no longer those of its last run, by UUID.

    Confirmed at once: a UUID is read, not timed, so there is no noise to wait out. A card can
    vanish without an error anywhere else (field case 28).
    """
    missing, added = sorted(had - has), sorted(has - had)
    evidence = {"missing": missing, "added": added}
    if missing and len(added) >= len(missing):
        names = f"{', '.join(missing)} replaced by {', '.join(added)}"
        sentence = f"GPUs were swapped since the last run: {names}"
        return [Finding("gpu_swapped", "warn", sentence, evidence, "confirmed")]
    if missing:
        sentence = f"{len(missing)} of {len(had)} GPUs are gone since the last run: " + ", ".join(
            missing
        )
        return [Finding("gpu_missing", "fail", sentence, evidence, "confirmed")]
    if added:
        sentence = f"{len(added)} GPUs are new since the last run: {', '.join(added)}"
        return [Finding("gpu_added", "info", sentence, evidence, "confirmed")]
    return []


def node_record(node: str, hello: Mapping[str, Any], device: str) -> NodeRecord:
    """The record of one device of a node, from its agent's hello.

    Read from it: ``host``, ``address``, ``cpu_model``, ``versions``, ``labels``, ``simulated``,
    ``problems``, and ``gpus``, a list of ``{"name": …, "uuid": …}``. Its order is NVML's, so it
    names a GPU only where all have the same name, or where an entry says ``"device": "cuda:N"``.
    What the hello does not say stays "".
    """
    listed = hello.get("gpus")
    gpus = [g for g in listed if isinstance(g, Mapping)] if isinstance(listed, list) else []
    named = {str(g.get("name") or "") for g in gpus if g.get("device", device) == device}
    gpu_model = "" if device.startswith("cpu") or len(named) != 1 else named.pop()
    cpu_model = str(hello.get("cpu_model") or "")
    versions, labels = hello.get("versions"), hello.get("labels")
    return NodeRecord(
        node=node,
        host=str(hello.get("host") or ""),
        address=str(hello.get("address") or ""),
        device=device,
        device_name=cpu_model if device.startswith("cpu") else gpu_model,
        gpu_model=gpu_model,
        cpu_model=cpu_model,
        versions={str(k): str(v) for k, v in versions.items()}
        if isinstance(versions, Mapping)
        else {},
        labels={str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {},
        simulated=hello.get("simulated") is True,
        problems=plain_problems(hello.get("problems")),
    )
