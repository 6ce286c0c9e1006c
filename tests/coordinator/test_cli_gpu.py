"""``pichak gpu``: the page, the JSON, and every way to end."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_coordinator.cli import app
from pichak_coordinator.cli.fingerprint_page import page_lines
from pichak_core import measure
from pichak_core.devices import gpu_look
from pichak_core.devices.gpu_use import GpuUse
from pichak_core.measure import Context
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["gpu", *arguments], standalone_mode=False)


def sample() -> Fingerprint:
    made = Fingerprint()
    made.add(Measurement("software.python", "3.11.7", "", "the interpreter"))
    made.add(
        Measurement(
            "gpu.kernel_launch_us",
            4.25,
            "us",
            "3000 tiny dependent kernels, each of which needs the last one's result before it runs",
            samples=150,
            spread=0.5,
            conditions={"cpu.steal_percent": 0.5, "gpu.lost": "no"},
            detail={"p95_us": 6.5, "samples": [1.0, 2.0]},
        )
    )
    made.add(
        Measurement(
            "host.memory_copy_mb_s",
            11_000_000.0,
            "MB/s",
            "copies",
            samples=9,
            spread=1.0,
            suspect="faster than any memory",
            conditions={"cpu.steal_percent": 2.5},
        )
    )
    made.add(Unmeasured("gpu.vbios", Reason.NOT_SUPPORTED, "NVML code 3"))
    made.add(Unmeasured("gpu.pcie_width", Reason.NOT_SUPPORTED, "NVML code 3"))
    made.add(Unmeasured("software.ray", Reason.NOT_INSTALLED, "pip install ray"))
    return made


def test_a_page_holds_value_spread_count_source_and_suspicion() -> None:
    text = "\n".join(page_lines(sample(), 100))
    assert "  gpu.kernel_launch_us             4.25 us ± 0.5, n = 150\n" in text
    assert "      3000 tiny dependent kernels" in text
    assert "[p95_us 6.5]" in " ".join(text.split())  # single numbers of the detail, not its curves
    assert "SUSPECT: faster than any memory" in text
    assert "  software.python                  3.11.7                the interpreter\n" in text


def test_a_page_tells_conditions_as_ranges_and_gaps_by_reason() -> None:
    lines = page_lines(sample(), 100)
    conditions = lines[lines.index("WHILE IT RAN") + 1]
    assert "cpu.steal_percent 0.5 to 2.5" in conditions
    assert "gpu.lost no" in conditions
    assert lines[lines.index("NOT MEASURED (3)") :] == [
        "NOT MEASURED (3)",
        "  not supported: NVML code 3",
        "      gpu.vbios, gpu.pcie_width",
        "  package not installed: pip install ray",
        "      software.ray",
    ]


def test_many_names_behind_one_reason_are_counted() -> None:
    made = Fingerprint()
    for i in range(20):
        made.add(Unmeasured(f"gpu.m{i}", Reason.NO_DEVICE, "measured on cuda"))
    made.add(Unmeasured("cpu.quota_cores", Reason.NO_DEVICE, "measured on cuda"))
    assert page_lines(made, 90) == [
        "NOT MEASURED (21)",
        "  no such device: measured on cuda",
        "      gpu.*: 20 of them (gpu.m0, gpu.m1, gpu.m2 …), cpu.quota_cores",
    ]


def test_the_head_says_who_it_is_and_the_page_does_not_say_it_again() -> None:
    made = sample()
    for name, value in (
        ("gpu.name", "NVIDIA L4"),
        ("gpu.compute_capability", "8.9"),
        ("gpu.uuid", "GPU-1"),
        ("gpu.pci_bus_id", "00000000:3B:00.0"),
        ("gpu.virtualisation_mode", "vGPU"),
        ("gpu.driver_model", "Linux"),
        ("software.driver", "550.90.07"),
        ("software.cuda_driver", "12.4"),
        ("host.kind", "vm"),
        ("host.hypervisor", "kvm"),
        ("software.kernel", "6.1.0"),
    ):
        made.add(Measurement(name, value, "", "NVML"))
    made.add(Measurement("gpu.vgpu_licensed", False, "", "NVML"))
    lines = page_lines(made, 90, "pichak gpu: box, cuda:0")
    assert lines[:8] == [
        "pichak gpu: box, cuda:0",
        "  GPU       NVIDIA L4, compute capability 8.9",
        "  UUID      GPU-1",
        "  PCI       00000000:3B:00.0",  # the VBIOS is among the gaps
        "  virtual   vGPU, NOT licensed",
        "  driver    550.90.07 (Linux), for CUDA up to 12.4",
        "  host      vm (kvm), kernel 6.1.0",
        "",
    ]
    assert "\n".join(lines).count("NVIDIA L4") == 1


def test_verdicts_come_first_and_the_worst_of_them_before_the_others() -> None:
    made = sample()
    findings = [
        {"code": "gpu_ecc_history", "severity": "info", "sentence": "only told"},
        {"code": "gpu_ecc", "severity": "fail", "sentence": "broken"},
    ]
    made.add(Measurement("gpu.state_verdict", "gpu_ecc", "", "NVML", detail={"findings": findings}))
    made.add(Measurement("gpu.transfer_verdict", "a fabric, not a bus", "", "copies"))
    made.add(Measurement("cpu.steal_percent", 9.0, "%", "counters"))
    made.add(Unmeasured("software.driver", Reason.FAILED, "library and module differ"))
    lines = page_lines(made, 100)
    assert lines[:7] == [
        "VERDICTS (5)",
        "  fail  the GPUs cannot be read: library and module differ",  # field case 6
        "  fail  broken",
        "  warn  the hypervisor gave 9.0 % of the CPU's time to others while it was probed",
        "  info  only told",
        "  info  gpu.transfer: a fabric, not a bus",
        "",
    ]


def test_nothing_judged_is_not_all_is_well() -> None:
    assert not [line for line in page_lines(sample(), 100) if "VERDICTS" in line]
    judged = Fingerprint()
    judged.add(Measurement("gpu.state_verdict", "nothing found", "", "x", detail={"findings": []}))
    assert page_lines(judged, 100) == [
        "VERDICTS",
        "  nothing found by the rules that could be applied",
    ]


@pytest.mark.parametrize("width", [20, 60, 78, 100, 200])
def test_a_page_keeps_its_width(width: int) -> None:
    made = sample()
    # a digest is one word that is wider than its column
    made.add(Measurement("golden.gradient_digest", "ab" * 16, "", "one seeded step, run twice"))
    made.add(Measurement("gpu.sister_cards", "word " * 40, "", "long " * 40))
    lines = page_lines(made, width, "a title " * 20)
    assert max(map(len, lines)) <= min(100, max(60, width)) + 8
    text = " ".join(" ".join(lines).split())
    assert "needs the last one's result before it runs" in text


def test_what_a_driver_wrote_cannot_command_a_terminal() -> None:
    made = Fingerprint()
    made.add(Measurement("gpu.name", "RTX\x1b[2J 4090\n", "", "NVML"))
    assert not [line for line in page_lines(made, 80) if "\x1b" in line or "\n" in line]


def test_an_empty_fingerprint_is_an_empty_page() -> None:
    assert page_lines(Fingerprint(), 120) == []


def test_the_page_of_this_machine() -> None:
    done = run("--device", "cpu", "--only", "virtualisation", "--only", "software")
    assert done.return_value == 0
    assert done.stdout.startswith("pichak gpu: ")
    assert "software.python" in done.stdout
    assert "  host      " in done.stdout
    assert "measuring virtualisation" in done.stderr
    assert "measuring" not in done.stdout


def test_json_is_alone_on_stdout() -> None:
    done = run("--device", "cpu", "--only", "software", "--json")
    record = json.loads(done.stdout)
    assert record["schema"] == 1
    assert (record["device"], record["depth"]) == ("cpu", "quick")
    again = Fingerprint.from_dict(record["fingerprint"])
    assert again.text("software.python")
    assert record["fingerprint"]["gpu.name"]["unmeasured"] == "no such device"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "gpu"), "write auto, cpu, cuda or cuda:N"),
        (("--device", "cuda:x"), "write auto"),
        (("--device", "cuda:97"), "--device cpu"),
        (("--only", "nothing"), "no such measurement; there are software"),
    ],
)
def test_usage_errors_say_what_to_do(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, Exception)
    assert words in str(done.exception)
    assert done.exception.exit_code == 2  # type: ignore[attr-defined]


Told = Callable[[Fingerprint], None]


def replace_probes(
    monkeypatch: pytest.MonkeyPatch, ending: Callable[[Told], None], seen: list[Context]
) -> None:
    def fake(context: Context, *, only: Any, on_progress: Any, on_readings: Told) -> None:
        seen.append(context)
        ending(on_readings)

    monkeypatch.setattr(measure, "run_probes", fake)


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(tell: Told) -> None:
        tell(sample())
        raise KeyboardInterrupt

    replace_probes(monkeypatch, ending, [])
    done = run("--device", "cpu", "--json")
    assert done.return_value == 130
    assert "gpu.kernel_launch_us" in json.loads(done.stdout)["fingerprint"]
    assert "interrupted" in done.stderr


def test_nothing_measured_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Fingerprint()
    made.add(Unmeasured("cpu.op_dispatch_us", Reason.NOT_INSTALLED, "No module named 'torch'"))
    replace_probes(monkeypatch, lambda tell: tell(made), [])
    done = run("--device", "cpu")
    assert "No module named 'torch'" in done.stdout
    assert "doctor" in str(done.exception)
    assert done.exception.exit_code == 1  # type: ignore[union-attr]


def test_auto_is_the_cpu_without_torch_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Context] = []
    replace_probes(monkeypatch, lambda tell: tell(sample()), seen)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    assert run("--depth", "full").return_value == 0
    assert (seen[0].device, seen[0].depth) == ("cpu", "full")
    refused = run("--device", "cuda:0")
    assert "pip install" in str(refused.exception)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[Context]:
    """A machine with one GPU on which anna works; the contexts that were measured all the same."""
    seen: list[Context] = []
    replace_probes(monkeypatch, lambda tell: tell(sample()), seen)
    command = importlib.import_module("pichak_coordinator.cli.gpu")
    monkeypatch.setattr(command, "_resolved", lambda _device: "cuda:0")
    users = GpuUse("busy", "cuda:0 (NVIDIA L4) is in use by pid 4242 python3 (anna), 18,300 MiB")
    monkeypatch.setattr(gpu_look, "look_at", lambda _device: users)
    return seen


def test_a_gpu_that_somebody_uses_is_left_alone(busy: list[Context]) -> None:
    done = run()
    assert busy == []
    assert done.exception.exit_code == 1  # type: ignore[union-attr]
    assert str(done.exception) == (
        "cuda:0 (NVIDIA L4) is in use by pid 4242 python3 (anna), 18,300 MiB; it was left alone; "
        "--wait-if-busy SECONDS waits for it, --even-if-busy measures it anyway"
    )


def test_who_insists_measures_it_and_is_told(busy: list[Context]) -> None:
    done = run("--even-if-busy", "--json")
    assert done.return_value == 0
    assert len(busy) == 1
    assert "in use by pid 4242" in done.stderr
    assert json.loads(done.stdout)["device"] == "cuda:0"


def test_what_does_not_load_the_gpu_does_not_ask(busy: list[Context]) -> None:
    assert run("--only", "software", "--only", "cpu").return_value == 0
    assert len(busy) == 1


def test_help_has_examples() -> None:
    done = CliRunner().invoke(app, ["gpu", "--help"])
    assert done.exit_code == 0
    assert "pichak gpu --device cuda:1" in done.stdout
