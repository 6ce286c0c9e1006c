"""Who and where an agent is: what it says when a coordinator greets it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from pichak_agent.messages import SCHEMA
from pichak_agent.versions import own_versions
from pichak_core.devices.gpus import read_gpus
from pichak_core.devices.host import this_host
from pichak_core.devices.processes import boot_id

Answer = TypeVar("Answer")


def describe_node() -> dict[str, Any]:
    """Plain values: `schema`, `versions`, `host`, `pid`, `machine_id` (hashed), `boot` (a hash that
    the agents under one running kernel share), `cpu_model`, `cores`, `memory_bytes`, `gpus` (index,
    uuid, name), `gpu_uuids`, and `gpus_gap`, which says why no GPU could be read ("" when they
    were). What the machine does not say is None.
    """
    host, boot = this_host(), boot_id()
    report = read_gpus()
    gpus = [
        {"index": gpu.index, "uuid": gpu.text("uuid"), "name": gpu.text("name")}
        for gpu in report.gpus
    ]
    return {
        "schema": SCHEMA,
        "versions": dict(own_versions()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine_id": _said(lambda: host.identity().hashed),
        "boot": hashlib.sha256(boot.encode()).hexdigest()[:16] if boot else None,
        "cpu_model": _said(host.cpu_model),
        "cores": _said(lambda: host.usable_cores()[0]),
        "memory_bytes": _said(host.memory_total_bytes),
        "gpus": gpus,
        "gpu_uuids": [gpu["uuid"] for gpu in gpus if gpu["uuid"]],
        "gpus_gap": report.gap.describe() if report.gap else "",
    }


def _said(ask: Callable[[], Answer]) -> Answer | None:
    try:
        return ask()
    except (OSError, NotImplementedError, ValueError):
        return None
