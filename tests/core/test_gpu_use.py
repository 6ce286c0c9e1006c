"""Whether somebody works on a GPU: each case by hand from the rule in `gpu_use.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pichak_core.devices.gpu_use import GpuUse, judge_use
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_child import gpu_from_wire
from pichak_core.devices.nvml_child import use as write_use
from pichak_core.devices.nvml_processes import GpuProcess
from pichak_core.devices.nvml_record import Player
from pichak_core.devices.nvml_recording import load_recording
from pichak_core.measurement import Reason, Unmeasured

MIB = 2**20


def row(pid: int, mib: int | None, kind: str = "compute") -> GpuProcess:
    return GpuProcess(kind, pid, None if mib is None else mib * MIB)


def look(
    work: float | None, used_mib: int | None, *rows: GpuProcess, reserved: int | None = 300
) -> Gpu:
    values: dict[str, Any] = {"name": "NVIDIA L4", "memory_total_bytes": 23_000 * MIB}
    gaps: dict[str, Unmeasured] = {}
    if work is None:
        gaps["utilisation_percent"] = Unmeasured("x", Reason.NOT_SUPPORTED, "code 3")
    else:
        values["utilisation_percent"] = work
    if used_mib is not None:
        values["memory_used_bytes"] = used_mib * MIB
    if reserved is not None:
        values["memory_reserved_bytes"] = reserved * MIB
    return Gpu(0, values, gaps, processes=rows)


def judge(looks: Sequence[Gpu], *, ours: Sequence[int] = (), wsl2: bool = False) -> GpuUse:
    return judge_use(
        "cuda:0",
        looks,
        is_ours=lambda pid: pid in ours,
        who=lambda pid: {4242: ("python3", "anna"), 7: ("Xorg", "root")}.get(pid, ("", "")),
        zero_means_nothing=wsl2,
        apart_seconds=0.4,
    )


def five(*works: float | None, used: int | None = 0, rows: Sequence[GpuProcess] = ()) -> list[Gpu]:
    return [look(work, used, *rows) for work in works]


def test_somebody_who_trains_is_named() -> None:
    use = judge(five(97, 99, 0, 98, 97, used=18_320, rows=[row(4242, 18_300)]))
    assert use.state == "busy"
    assert use.sentence == (
        "cuda:0 (NVIDIA L4) is in use by pid 4242 python3 (anna), 18,300 MiB; utilisation 0 to "
        "99 % (5 looks, 0.4 s apart)"
    )
    assert use.as_dict()["users"] == [
        {
            "pid": 4242,
            "kind": "compute",
            "name": "python3",
            "owner": "anna",
            "used_bytes": 18_300 * MIB,
        }
    ]
    assert use.utilisation_percent == 99


@pytest.mark.parametrize(
    ("looks", "state"),
    [
        # Nobody, at rest; the driver's own on an idle A100 (field case 12), by both queries.
        (five(0, 0, 0, 1, 0), "idle"),
        ([look(0, 912, reserved=None)] * 5, "idle"),
        # One look of work is enough where somebody is: training pauses to load data.
        (five(0, 0, 0, 35, 0, used=5000, rows=[row(1, 5000)]), "busy"),
        # An idle context, a notebook left open: held, and told.
        (five(0, 0, 0, 0, 0, used=5000, rows=[row(1, 5000)]), "held"),
        (five(0, 0, 9, 0, 0, used=200, rows=[row(1, 200)]), "held"),
        # A container shows no rows while memory is used (field case 29): memory stands for them.
        (five(0, 0, 0, 80, 0, used=9216), "busy"),
        (five(0, 0, 0, 0, 0, used=9216), "held"),
        # Nobody is listed and little memory is used: work in half of the looks is somebody's.
        (five(60, 0, 60, 60, 0, used=100), "busy"),
        (five(60, 0, 0, 0, 0, used=100), "idle"),
        # A display redraws: graphics alone is never training, however much it draws.
        (five(30, 40, 30, 25, 30, used=900, rows=[row(7, 800, "graphics")]), "held"),
        (five(2, 1, 0, 3, 2, used=900, rows=[row(7, 800, "graphics")]), "held"),
        # Windows lists a program with a window as both.
        (
            five(30, 40, 30, 25, 30, used=900, rows=[row(7, None), row(7, None, "graphics")]),
            "held",
        ),
        # A display and somebody who trains.
        (five(90, 90, 90, 90, 90, rows=[row(7, 800, "graphics"), row(1, 5000)]), "busy"),
    ],
)
def test_the_rule(looks: list[Gpu], state: str) -> None:
    assert judge(looks).state == state


def test_what_is_not_known_is_neither_idle_nor_busy() -> None:
    # field cases 15, 20, 21: no counter on WSL2, MIG devices, vGPUs
    for rows in ([], [row(4242, 18_300)]):
        use = judge(five(None, None, None, used=18_320, rows=rows))
        assert use.state == "unknown"
        assert use.utilisation_percent is None
        assert "not known" in use.sentence
        assert "not supported: code 3" in use.sentence
        assert "18,3" in use.sentence
    stuck = judge(five(0, 0, 0, used=18_320), wsl2=True)
    assert stuck.state == "unknown"
    assert "nothing on WSL2" in stuck.sentence
    assert judge(five(0, 70, 0, used=18_320, rows=[row(1, None)]), wsl2=True).state == "busy"


def test_memory_that_is_not_told_is_not_zero() -> None:
    # field case 14: WDDM knows no memory of a process
    use = judge(five(80, 80, used=None, rows=[row(9, None)]))
    assert use.state == "busy"
    assert use.used_bytes is None
    assert "pid 9, memory unknown" in use.sentence


def test_our_own_processes_are_nobody_else() -> None:
    ours = five(90, 90, 90, used=3_000, rows=[row(11, 2_900)])
    assert judge(ours, ours=[11]).state == "idle"
    both = five(90, 90, 90, used=9_000, rows=[row(11, 2_900), row(4242, 6_000)])
    found = judge(both, ours=[11])
    assert (found.state, [user.pid for user in found.users]) == ("busy", [4242])
    assert found.used_bytes == 6_100 * MIB


@pytest.mark.parametrize(
    ("recording", "states"),
    [
        ("datacentre_h100", ["idle", "idle"]),
        ("container_lost_device", ["idle"]),
        ("vgpu_guest", ["idle"]),
        # At work, and no list of processes: somebody's.
        ("falls_off_bus", ["busy", "busy"]),
        # A desktop that draws, one that has programs with windows, a context that does nothing.
        ("laptop", ["held"]),
        ("windows_geforce", ["held"]),
        ("unified_gb10", ["held"]),
        ("mig_a100", ["unknown"]),
        ("wsl2", ["unknown"]),
        ("jetson_stub", []),
        ("version_mismatch", []),
    ],
)
def test_recorded_machines(recording: str, states: list[str]) -> None:
    made = load_recording(Path(__file__).parents[1] / "data" / "nvml" / f"{recording}.json")
    player = Player([*made.start, *(event for part in made.rounds for event in part)])
    written: list[dict[str, Any]] = []
    write_use(player, 2, 0.0, written.append)
    looks = [gpu_from_wire(record["gpu"]) for record in written if "gpu" in record]
    cards = sorted({look.index for look in looks})
    assert states == [
        judge([look for look in looks if look.index == card], wsl2=recording == "wsl2").state
        for card in cards
    ]


def test_a_lost_gpu_is_not_known() -> None:
    gone = Gpu(0, lost=Unmeasured("gpu", Reason.LOST, "it fell off the bus"))
    use = judge([gone])
    assert use.state == "unknown"
    assert "fell off the bus" in use.sentence
    assert judge([]).state == "unknown"
    # The looks before it was lost count.
    assert judge([look(90, 5000, row(1, 5000)), gone]).state == "busy"


def test_many_users_are_not_all_named() -> None:
    use = judge(five(90, used=6000, rows=[row(pid, pid) for pid in range(1000, 1007)]))
    assert "pid 1006" in use.sentence
    assert "and 3 more" in use.sentence
