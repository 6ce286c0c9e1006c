"""CUDA_VISIBLE_DEVICES by CUDA's rules, as NVIDIA's guides state them."""

from __future__ import annotations

import pytest

from pichak_core.devices.cuda_visible import Physical, visible_devices
from pichak_core.devices.gpu_join import TorchGpu, join, physical
from pichak_core.devices.nvml import Gpu
from pichak_core.measurement import Unmeasured

EIGHT = [Physical(f"GPU-{i:08x}-0000-4000-8000-00000000000{i}") for i in range(8)]
U = [gpu.uuid for gpu in EIGHT]
ALIKE = [Physical("GPU-aaaa1111-1"), Physical("GPU-aaaa2222-2"), Physical("GPU-bbbb-3")]
MIG_1, MIG_2 = "MIG-11111111-aaaa", "MIG-22222222-bbbb"
SLICED = [
    Physical("GPU-parent-1", (MIG_1, MIG_2), True, ((2, 0), (9, 0))),
    Physical("GPU-whole-2"),
]


@pytest.mark.parametrize(
    ("mask", "uuids"),
    [
        # field case 18
        ("0,1,2,3,0", []),  # a repeated entry hides every device
        ("0,1,8,2,3", U[:2]),  # an invalid one hides itself and what follows
        ("", []),
        ("   ", []),
        (None, U),
        ("2,1", [U[2], U[1]]),  # the order of the list is CUDA's numbering
        ("0,2,-1,1", [U[0], U[2]]),
        ("-1", []),
        ("NoDevFiles", []),
        (" 3 , 1 ", [U[3], U[1]]),
        ("1x,2", [U[1], U[2]]),  # read as C's strtol reads it
        ("1,,2", [U[1]]),
        # field case 17
        (U[5], [U[5]]),
        (f"{U[5]},{U[0]}", [U[5], U[0]]),
        ("GPU-00000005", [U[5]]),  # a beginning that fits one
        ("gpu-00000005", [U[5]]),
        (f"{U[5]},{U[5][:20]}", []),  # the same device in two spellings is a repetition
        ("GPU-0000000", []),  # a beginning that fits all
        ("GPU-", []),
        (f"{U[5]},1", [U[5]]),  # the first entry's kind holds for the list
        (f"1,{U[5]}", [U[1]]),
    ],
)
def test_whole_gpus(mask: str | None, uuids: list[str]) -> None:
    found = visible_devices(mask, EIGHT)
    assert list(found.uuids) == uuids
    if mask is not None and mask.strip() and not uuids:
        assert found.note


def test_an_ambiguous_beginning_is_invalid_and_ends_the_list() -> None:
    assert visible_devices("GPU-bbbb,GPU-aaaa,GPU-aaaa1", ALIKE).uuids == ("GPU-bbbb-3",)
    assert visible_devices("GPU-aaaa1,GPU-bbbb", ALIKE).uuids == ("GPU-aaaa1111-1", "GPU-bbbb-3")


@pytest.mark.parametrize(
    ("mask", "uuids"),
    [
        # field cases 17 and 18: CUDA shows one MIG device, and no whole GPU beside it
        (None, [MIG_1]),
        ("0", [MIG_1]),  # a GPU in MIG mode stands for its first device
        ("0,1", [MIG_1]),
        ("1", ["GPU-whole-2"]),
        (MIG_2, [MIG_2]),
        ("MIG-2222", [MIG_2]),
        (f"{MIG_2},{MIG_1}", [MIG_2]),
        ("MIG-3333", []),
        ("MIG-GPU-parent-1/9/0", []),  # no UUID of hexadecimal digits: not the older form
    ],
)
def test_mig(mask: str | None, uuids: list[str]) -> None:
    assert list(visible_devices(mask, SLICED).uuids) == uuids


def test_the_older_name_of_a_mig_device_is_its_parents_uuid_and_its_instances() -> None:
    gpus = [Physical("GPU-0a1b", (MIG_1, MIG_2), True, ((2, 0), (9, 0)))]
    assert visible_devices("MIG-GPU-0a1b/9/0", gpus).uuids == (MIG_2,)
    assert visible_devices("MIG-GPU-0a1b/3/0", gpus).uuids == ()


def test_a_gpu_in_mig_mode_without_devices_shows_none() -> None:
    assert visible_devices(None, [Physical("GPU-1", (), True)]).uuids == ()
    assert visible_devices("0", [Physical("GPU-1", (), True)]).uuids == ()


# --- torch's device on a GPU in MIG mode ------------------------------------------------------

TORCH = TorchGpu(0, "NVIDIA A100 MIG 3g.20gb", "parent", "00000000:07:00.0", 20 * 2**30, False)


def sliced(*uuids: str) -> Gpu:
    slices = tuple(
        Gpu(0, {"uuid": uuid, "memory_total_bytes": 20 * 2**30, "mig_index": i})
        for i, uuid in enumerate(uuids)
    )
    values = {"uuid": "GPU-parent", "memory_total_bytes": 40 * 2**30, "mig_mode": True}
    return Gpu(0, values, slices=slices)


def test_a_slice_is_found_by_its_uuid_by_the_mask_or_as_the_only_one() -> None:
    # field case 17: an index would give the parent of 40 GiB
    parent = sliced(MIG_1, MIG_2)
    by_uuid = join(TorchGpu(0, "x", MIG_2[4:], "", 0, False), [parent])
    by_mask = join(TORCH, [parent], "MIG-2222")
    for found in (by_uuid, by_mask):
        assert isinstance(found, Gpu)
        assert found.text("uuid") == MIG_2
        assert found.number("memory_total_bytes") == 20 * 2**30
    only = join(TORCH, [sliced(MIG_1)])
    assert isinstance(only, Gpu)
    assert only.text("uuid") == MIG_1


def test_a_slice_that_cannot_be_told_is_refused_and_never_guessed() -> None:
    found = join(TORCH, [sliced(MIG_1, MIG_2)])
    assert isinstance(found, Unmeasured)
    assert "CUDA_VISIBLE_DEVICES" in found.detail


def test_a_read_gpu_as_the_variable_sees_it() -> None:
    gpu = sliced(MIG_1)
    gpu.slices[0].values.update(mig_gpu_instance=2, mig_compute_instance=1)
    assert physical(gpu) == Physical("GPU-parent", (MIG_1,), True, ((2, 1),))
    assert physical(Gpu(0, {"uuid": "GPU-x", "mig_mode": False})) == Physical("GPU-x")
