"""What runs inside a host: ``step``, ``listen``, ``link`` or ``train``; prints a line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

MICRO_BATCH = 8
WIDTH, LAYERS = 512, 4
WARM_UP, STEPS = 2, 10


def say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def model() -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def micro_batch(net: Any, device_seconds: float) -> None:
    """The wait stands for an accelerator's time."""
    import torch

    time.sleep(device_seconds)
    net(torch.randn(MICRO_BATCH, WIDTH)).square().mean().backward()


def step(device_seconds: float) -> None:
    net, times = model(), []
    for _ in range(WARM_UP + STEPS):
        begun = time.perf_counter()
        micro_batch(net, device_seconds)
        times.append(time.perf_counter() - begun)
    say(
        {
            "seconds": statistics.median(times[WARM_UP:]),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
        }
    )


def listen(address: str, key: str) -> None:
    from pichak_core.measure._net_server import Listener

    listener = Listener(address, bytes.fromhex(key))
    say({"port": listener.port})
    listener.serve(600.0, 300.0)


def link(peer: str, address: str, port: int, key: str) -> None:
    import secrets

    from pichak_core.measure._net_client import LinkClient
    from pichak_core.measure._net_link import PLANS, measure_link
    from pichak_core.measure._net_wire import SESSION_BYTES, token_of
    from pichak_core.measurement import Fingerprint

    session = secrets.token_bytes(SESSION_BYTES)
    found = Fingerprint()
    token = token_of(bytes.fromhex(key), session)
    with LinkClient(address, port, session, token, connect_seconds=10.0) as client:
        for reading in measure_link(client, f"network.{peer}", PLANS["quick"], progress=len):
            found.add(reading)
    say(found.to_dict())


def train(
    rank: int, ranks: int, store: str, address: str, device_seconds: float, micro_batches: int
) -> None:
    import torch
    import torch.distributed as dist

    from pichak_core.measure._collective_run import use_interface

    use_interface(address)
    dist.init_process_group("gloo", init_method=f"tcp://{store}:29511", rank=rank, world_size=ranks)
    net = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    times = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        begun = time.perf_counter()
        for number in range(micro_batches):
            last = number == micro_batches - 1
            with nullcontext() if last else net.no_sync():
                micro_batch(net, device_seconds)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(times[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    say({"steps": slowest.tolist(), "seconds": statistics.median(slowest.tolist())})
    dist.destroy_process_group()


def main() -> None:
    what, *given = sys.argv[1:]
    if what == "step":
        step(float(given[0]))
    elif what == "listen":
        listen(*given)
    elif what == "link":
        link(given[0], given[1], int(given[2]), given[3])
    else:
        rank, ranks, store, address, device_seconds, micro_batches = given
        train(int(rank), int(ranks), store, address, float(device_seconds), int(micro_batches))


if __name__ == "__main__":
    main()
