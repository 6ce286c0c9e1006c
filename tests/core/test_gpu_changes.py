"""GPUs that were there and are not any more."""

from __future__ import annotations

import pytest

from pichak_core.devices.gpu_changes import gone
from pichak_core.devices.gpu_identity import expected_capability, identity_doubt
from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpus import Report
from pichak_core.devices.nvml import Gpu
from pichak_core.measurement import Reason, Unmeasured

GIB = 2**30


def machine(*uuids: str) -> Report:
    return Report(gpus=[Gpu(i, {"uuid": uuid, "name": "L4"}) for i, uuid in enumerate(uuids)])


EIGHT = [f"GPU-{i}" for i in range(8)]


def test_a_card_that_vanished_without_a_word_is_named() -> None:
    # field case 28: 8 then 7, the rest numbered anew; the kernel's log is not needed
    now = machine(*EIGHT[:3], *EIGHT[4:])
    (lost,) = gone(machine(*EIGHT), now)
    assert (lost.uuid, lost.index) == ("GPU-3", 3)
    assert lost.why.reason is Reason.LOST
    assert "listed 8 GPUs and lists 7" in lost.why.detail
    assert gone(machine(*EIGHT), machine(*reversed(EIGHT))) == []  # another order is no change
    assert gone(now, machine(*EIGHT)) == []  # one more is none gone


def test_a_card_that_nvml_calls_lost_has_its_reason() -> None:
    now = machine("GPU-0", "GPU-1")
    now.gpus[1] = Gpu(1, lost=Unmeasured("gpu", Reason.LOST, "NVML code 15"))
    (lost,) = gone(machine("GPU-0", "GPU-1"), now)
    assert (lost.uuid, lost.why.detail) == ("GPU-1", "NVML code 15")


def test_when_nvml_itself_is_gone_so_are_all() -> None:
    # field case 5: the container lost its devices after a reload of its host's services
    gap = Unmeasured("nvml", Reason.LOST, "NVML code 999; recreate it")
    found = gone(machine("GPU-0", "GPU-1"), Report(gap=gap))
    assert [each.uuid for each in found] == ["GPU-0", "GPU-1"]
    assert {each.why for each in found} == {gap}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla V100-SXM2-32GB", "7.0"),
        ("Tesla T4", "7.5"),
        ("GRID T4-16Q", "7.5"),
        ("Quadro RTX 6000", "7.5"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "8.0"),
        ("NVIDIA A10G", "8.6"),
        ("NVIDIA RTX A6000", "8.6"),
        ("NVIDIA GeForce RTX 3090", "8.6"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA GeForce RTX 5090", "12.0"),
        ("NVIDIA GB10", "12.1"),
        ("NVIDIA GeForce RTX 3050", None),  # sold with two kinds of silicon
        ("Orin", None),
        ("", None),
    ],
)
def test_capabilities_by_name(name: str, capability: str | None) -> None:
    assert expected_capability(name) == capability


def card(**values: object) -> Gpu:
    base = {"name": "NVIDIA GeForce RTX 3090", "compute_capability": "8.6"}
    return Gpu(0, {**base, **values})  # type: ignore[dict-item]


def torch(name: str = "NVIDIA GeForce RTX 3090", total: int = 24 * GIB) -> TorchGpu:
    return TorchGpu(0, name, "u", "", total, False)


def test_a_card_that_is_not_what_it_calls_itself() -> None:
    assert identity_doubt(card()) == ""
    doubt = identity_doubt(card(compute_capability="7.5"))
    assert "8.6" in doubt
    assert "7.5" in doubt
    assert identity_doubt(card(name="Some new model", compute_capability="13.0")) == ""
    assert identity_doubt(Gpu(0, {"name": "NVIDIA GeForce RTX 3090"})) == ""  # not read: no doubt


def test_nvml_and_cuda_must_mean_the_same_card() -> None:
    assert identity_doubt(card(), torch("GeForce RTX 3090")) == ""
    assert "NVIDIA T1000" in identity_doubt(card(), torch("NVIDIA T1000"))
    full = card(memory_total_bytes=24 * GIB)
    assert identity_doubt(full, torch(total=int(23.7 * GIB))) == ""
    assert "MiB" in identity_doubt(full, torch(total=12 * GIB))
    # a MIG device's name and size are a slice's
    assert identity_doubt(card(mig_index=0, memory_total_bytes=GIB), torch("other")) == ""
