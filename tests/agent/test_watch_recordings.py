"""What the watch says of recorded drivers, read as the NVML process reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pichak_agent.nvml_keeper import NvmlKeeper
from pichak_agent.readings import HostReading, Reading
from pichak_agent.watch import Watch
from pichak_agent.watch_rules import RULES
from pichak_core.devices.nvml_child import serve
from pichak_core.devices.nvml_record import Player
from pichak_core.devices.nvml_recording import load_recording
from pichak_core.devices.nvml_session import Answer, NvmlSession, Request
from pichak_core.testing import FakeClock

RECORDINGS = Path(__file__).parents[1] / "data" / "nvml"


class Played:
    """The NVML process' own code, answering at once and in this process. Each session that is
    started after the first begins at the recording's last reading."""

    def __init__(self, name: str, last: bool) -> None:
        recording = load_recording(RECORDINGS / f"{name}.json")
        rounds = recording.rounds[-1:] if last and recording.rounds else recording.rounds
        constants = [e for events in recording.rounds for e in events if "constant" in e]
        self._player = Player([*recording.start, *constants, *(e for r in rounds for e in r)])
        self._facts = (recording.text("nvml_library") or "", recording.text("kernel_module") or "")
        self._answer: Answer | None = None
        self.pid, self.alive, self.listener_cpu_seconds = 0, True, 0.0

    @property
    def waiting(self) -> bool:
        return self._answer is not None

    def ask(self, request: Request, budget: float) -> None:
        answer = Answer(request)

        def write(record: dict[str, object]) -> None:
            if "done" not in record:
                answer.report.take(record)

        serve(
            self._player, [request] if request == "full" else ["full", "live"], write, *self._facts
        )
        if request == "live":  # what the full answer before it said is not part of this one
            answer.report.gpus = answer.report.gpus[len(answer.report.gpus) // 2 :]
        answer.ended = answer.report.gap is not None
        self._answer = answer

    def collect(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self, patience_seconds: float = 2.0) -> None:
        self.alive = False


def found(name: str, seconds: int = 400) -> dict[str, str]:
    """Code to subject of everything that the watch says within `seconds`."""
    clock = FakeClock()
    sessions: list[Played] = []

    def start() -> NvmlSession:
        sessions.append(Played(name, last=bool(sessions)))
        return sessions[-1]  # type: ignore[return-value]

    keeper, watch = NvmlKeeper(start, clock=clock), Watch(RULES)
    seen: dict[str, str] = {}
    for _ in range(0, seconds, 5):
        state = keeper.poll()
        reading = Reading(
            1.8e9 + clock.now,
            clock.now,
            HostReading(),
            state.gpus if state else (),
            keeper.gap,
            keeper.reason,
            keeper.fresh_gap,
            bool(state and state.full),
        )
        watch.take(reading)
        seen.update({f.sign.code: f.sign.subject for f in watch.findings()})
        clock.advance(5.0)
    return seen


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("container_lost_device", {"nvml_lost"}),  # field case 5
        ("falls_off_bus", {"gpu_lost"}),  # field case 26
        ("jetson_stub", set()),  # field case 7
        ("laptop", {"gpu_power_limit", "gpu_slowed"}),  # 35 of 80 W, and hot; field case 25
        ("mig_a100", set()),
        ("unified_gb10", {"gpu_foreign_process"}),  # one program computes
        ("version_mismatch", set()),
        ("vgpu_guest", set()),  # field case 21
        ("windows_geforce", {"gpu_shared_memory"}),  # browsers hold 2.9 GiB; field case 14
        ("wsl2", set()),  # field case 15
    ],
)
def test_recorded_drivers(name: str, codes: set[str]) -> None:
    assert set(found(name)) == codes


def test_a_lowered_limit_and_an_error_count_in_the_recording() -> None:
    seen = found("datacentre_h100")
    assert seen["gpu_power_limit"] == "GPU-c93b77f2-60aa-4d1e-8e55-42c8d1a6f07b"
