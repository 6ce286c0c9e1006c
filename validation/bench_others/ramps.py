"""Each tool's search for the largest batch, through its public entry point."""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from steps import Counted, FakeTorch, device_for, real_parts, under_cap

from pichak_core.testing import MIB, FakeDevice, affine_memory
from pichak_core.tune import ramp_micro_batch

#: More than any edge here; the default limit of 512 would end the search at 1,000.
LIMIT = 4096
#: Lightning never builds a batch larger than its data.
DATA_ROWS = 20_000

Find = Callable[[Counted, FakeDevice | None], int | None]


def lightning(mode: str, **options: Any) -> Find:
    def find(step: Counted, _: FakeDevice | None) -> int | None:
        import torch
        from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
        from lightning.pytorch.tuner import Tuner  # type: ignore[import-not-found]

        class Rows(torch.utils.data.Dataset[int]):
            def __len__(self) -> int:
                return DATA_ROWS

            def __getitem__(self, index: int) -> int:
                return index

        class Module(LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.batch_size = 2
                self.weight = torch.nn.Parameter(torch.zeros(()))

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                step(len(batch))
                return self.weight * 0.0

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(Rows(), batch_size=self.batch_size)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            found: int | None = Tuner(trainer).scale_batch_size(Module(), mode=mode, **options)
        return found

    return find


def accelerate(start: int) -> Find:
    def find(step: Counted, _: FakeDevice | None) -> int | None:
        from accelerate.utils import (  # type: ignore[import-not-found]
            find_executable_batch_size,
        )

        def train(batch_size: int) -> int:
            step(batch_size)
            return batch_size

        found: int = find_executable_batch_size(train, starting_batch_size=start)()
        return found

    return find


def earlier(step: Counted, device: FakeDevice | None) -> int | None:
    from pichak.tune import ramp_micro_batch as earlier_ramp  # type: ignore[import-not-found]

    if device is None:
        found = earlier_ramp(step, device="cpu", limit=512)
    else:
        found = earlier_ramp(step, torch_mod=FakeTorch(device))
    answer: int = found.micro_batch
    return answer


#: What is compared, by name; the same on the made-up memory and on the real model.
OTHERS: dict[str, Find] = {
    "Lightning power": lightning("power"),
    "Lightning binsearch": lightning("binsearch"),
    "Lightning binsearch, margin 0": lightning("binsearch", margin=0.0),
    "accelerate from 128": accelerate(128),
    "accelerate from 2048": accelerate(2048),
    "pichak 0.4.1": earlier,
}
OURS = {
    "Pichak Fleet": {"headroom": 0.0, "keep": "largest"},
    "Pichak Fleet, 12 % headroom, fastest": {},
}
GUESSED = "Pichak Fleet, first guess"


def made_up(tool: str, edge: int) -> dict[str, Any]:
    """One tool on the made-up memory. An error is what the row says."""
    device = device_for(edge, counters=tool == "pichak 0.4.1")
    step = Counted(device.train)
    if tool in OTHERS:
        return row(tool, step, lambda: {"answer": OTHERS[tool](step, device)})
    options: dict[str, Any] = dict(OURS.get(tool, OURS["Pichak Fleet"]))
    if tool == GUESSED:
        richer = device_for(edge + max(1, edge * 3 // 10))
        first = our_ramp(Counted(richer.train), richer, {"limit": LIMIT, **options})
        options["first_guess"] = first["result"].guess_for(device.capacity_bytes)
    return row(tool, step, lambda: our_ramp(step, device, {"limit": LIMIT, **options}))


def real(tool: str) -> dict[str, Any]:
    """One tool on the real model under the real cap."""
    training, backend = real_parts()
    with training:
        if tool in OTHERS:
            step = Counted(under_cap(training, backend))
            return row(tool, step, lambda: {"answer": OTHERS[tool](step, None)})
        step = Counted(training)
        return row(tool, step, lambda: our_ramp(step, backend, OURS[tool]))


def real_edge(_: str = "") -> dict[str, Any]:
    """By trying every size from 1 upwards, three steps each."""
    training, backend = real_parts()
    step = Counted(under_cap(training, backend))

    def try_all() -> dict[str, Any]:
        for rows in itertools.count(1):
            for _ in range(3):
                try:
                    step(rows)
                except RuntimeError:
                    return {"answer": rows - 1}
        raise AssertionError

    with training:
        return row("every size", step, try_all)


def our_ramp(step: Counted, backend: Any, options: dict[str, Any]) -> dict[str, Any]:
    clock = backend.clock if isinstance(backend, FakeDevice) else time.perf_counter
    found = ramp_micro_batch(step, backend=backend, clock=clock, **options)
    return {
        "answer": found.micro_batch_max,
        "kept": found.micro_batch,
        "steps_run": found.steps_run,
        "repeat_steps": found.repeat_steps,
        "result": found,
    }


def row(tool: str, step: Counted, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"answer": None}
    try:
        found = find()
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is its result
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    found.pop("result", None)
    return {"tool": tool, "ended": True, **found, **step.counts()}


def our_worst(edge: int) -> dict[str, Any]:
    """This ramp on other shapes of affine memory around the same edge: the worst of each count."""
    steps = refusals = shapes = wrong = 0
    for share, granule, extra, headroom in itertools.product(
        (0.0, 0.1, 0.5, 0.9), (512, 2 * MIB, 20 * MIB), (MIB * 7 // 10, 37 * MIB), (0.0, 0.12)
    ):
        per_row = granule + extra
        base = int(share / (1 - share) * per_row * edge) + 123

        def reserved(rows: int, a: int = base, c: int = per_row, unit: int = granule) -> int:
            return -(-(a + c * rows) // unit) * unit

        budget = (reserved(edge) + reserved(edge + 1)) // 2
        device = FakeDevice(
            int(budget / (1 - headroom)),
            affine_memory(base, per_row),
            held_bytes=base // 2,
            rounding_bytes=granule,
        )
        allowed = int(device.capacity_bytes * (1 - headroom))
        truth = max(rows for rows in range(edge + 2) if reserved(rows) <= allowed)
        found = our_ramp(
            Counted(device.train),
            device,
            {"limit": LIMIT, "headroom": headroom, "keep": "largest"},
        )["result"]
        shapes += 1
        wrong += found.micro_batch_max != truth
        steps, refusals = max(steps, found.steps_run), max(refusals, found.refusals)
    return {"shapes": shapes, "wrong": wrong, "most_steps": steps, "most_refusals": refusals}
