"""The ramp under a cap, and real training at what it found; each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEADROOM = 0.12
MIB = 2**20
SHORTEST_ROW = 8
#: A Llama of 94M weights, and one that a CPU can train.
LLAMA = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12,
         "num_attention_heads": 10, "num_key_value_heads": 10, "vocab_size": 24_576}  # fmt: skip
SMALL_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}  # fmt: skip


def open_model(model: str, device: str, tokens: int, small: bool, folder: str) -> Any:
    """The workload; ``hf`` is a Llama of random weights that is saved to `folder` before."""
    from pichak_core.workload import Settings, open_workload

    if model == "hf":
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape: dict[str, Any] = SMALL_LLAMA if small else LLAMA
        path = Path(folder) / "model"
        LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=1024)).save_pretrained(path)
        model = f"hf:{path}"
    return open_workload(Settings(model=model, device=device, seq_len=tokens))


def ramp(
    report: Any, device: str, model: str, cap_mib: int, tokens: int, small: bool, folder: str
) -> None:
    from pichak_core.devices.torch_backend import backend_for
    from pichak_core.tune import TrainingStep, forbid_spill, ramp_micro_batch

    whole, source = forbid_spill(device)
    cap_bytes = min(whole, cap_mib * MIB)
    backend_for(device, cap_bytes=cap_bytes)
    workload = open_model(model, device, tokens, small, folder)
    step = TrainingStep(workload.loss_of, workload.optimizer)
    found = ramp_micro_batch(
        step,
        device=device,
        headroom=HEADROOM,
        limit=65_536,
        tokens_per_row=tokens,
        keep="largest",
    )
    report.figures = {**found.as_dict(), "cap_bytes": cap_bytes, "whole_cap": source}
    report.check(
        "it ends at memory",
        found.limited_by not in ("limit", "rows", "time", "no step"),
        f"{found.micro_batch_max} rows, limited by {found.limited_by}, {found.steps_run} steps",
    )
    budget = int(cap_bytes * (1 - HEADROOM))
    report.check(
        "its peak leaves the headroom",
        0 < found.peak_bytes <= budget,
        f"{found.peak_bytes / MIB:,.0f} of {budget / MIB:,.0f} MiB",
    )


def training(
    report: Any,
    device: str,
    model: str,
    tokens: int,
    small: bool,
    folder: str,
    rows: int,
    cap_bytes: int,
    steps: int,
) -> None:
    """`steps` optimizer steps of two micro-batches of mixed length under the whole cap."""
    import torch

    from pichak_core.devices.torch_backend import backend_for

    backend = backend_for(device, cap_bytes=cap_bytes)
    workload = open_model(model, device, tokens, small, folder)
    optimizer = workload.optimizer
    lengths = torch.Generator().manual_seed(7)
    refused, done, first = 0, 0, ""
    with backend.watch() as seen:
        for number in range(steps):
            try:
                for _ in range(2):
                    drawn = int(torch.randint(SHORTEST_ROW, tokens + 1, (1,), generator=lengths))
                    workload.seq_len = drawn if number else tokens
                    workload.loss_of(rows).backward()
                optimizer.step()
                done += 1
            except torch.OutOfMemoryError as error:
                refused += 1
                first = first or f"step {number}: {str(error).splitlines()[0][:200]}"
            optimizer.zero_grad(set_to_none=True)
        backend.synchronize()
    report.figures = {
        "rows": rows,
        "steps": done,
        "refused": refused,
        "peak_bytes": seen.reserved,
        "cap_bytes": cap_bytes,
    }
    report.check(f"{steps} steps of {rows} rows", done == steps, f"{refused} refused {first}")
    report.check(
        "they stay below the cap",
        seen.reserved <= cap_bytes,
        f"peak {seen.reserved / MIB:,.0f} of {cap_bytes / MIB:,.0f} MiB",
    )
