"""What Linux's files say, from fixed texts; and that every platform answers the same questions."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from pichak_core.devices import linux
from pichak_core.devices.host import Host, this_host
from pichak_core.devices.linux_host import LinuxHost
from pichak_core.devices.linux_identity import (
    container_evidence,
    host_kind,
    identity,
    operating_system,
)
from pichak_core.devices.other import OtherHost

X86 = "processor : 0\nmodel name : AMD EPYC 7543 32-Core Processor\nflags : fpu vme {flag} avx2\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_times_hold_no_guest_time_twice() -> None:
    # user 100 (of which guest 40), nice 10, system 20, idle 700, iowait 50, irq 5, softirq 5,
    # steal 110
    times = linux.parse_cpu_times(
        "cpu  10000 1000 2000 70000 5000 500 500 11000 4000 0\ncpu0 1 2\n", ticks_per_second=100
    )
    assert times.busy == 100 + 10 + 20 + 5 + 5
    assert times.steal == 110
    assert times.total == 140 + 700 + 50 + 110


def test_old_kernels_have_no_steal_column() -> None:
    times = linux.parse_cpu_times("cpu 1 2 3 4\n", ticks_per_second=1)
    assert (times.busy, times.steal, times.total) == (6, 0, 10)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2\n", "intr 5\n"])
def test_a_stat_without_its_line_is_an_error_not_a_zero(text: str) -> None:
    with pytest.raises(ValueError, match="/proc/stat"):
        linux.parse_cpu_times(text, 100)


def test_pressure_with_and_without_its_full_line() -> None:
    some = "some avg10=4.41 avg60=2.08 avg300=0.57 total=5137488\n"
    assert linux.parse_pressure(some).some_us == 5137488
    assert linux.parse_pressure(some).full_us is None
    both = linux.parse_pressure(some + "full avg10=0.00 avg60=0.00 avg300=0.00 total=17\n")
    assert both.full_us == 17
    with pytest.raises(ValueError, match="some"):
        linux.parse_pressure("full avg10=0.00 avg60=0.00 avg300=0.00 total=17\n")


def test_load_average() -> None:
    assert linux.parse_load_average("1.24 1.98 1.22 3/123 4567\n") == 1.24
    with pytest.raises(ValueError, match="empty"):
        linux.parse_load_average("")


def test_meminfo_is_in_bytes_and_counts_pages_as_they_are() -> None:
    found = linux.parse_meminfo("MemTotal:   24684096 kB\nHugePages_Total:      5\nBad line\nX:\n")
    assert found == {"MemTotal": 24684096 * 1024, "HugePages_Total": 5}


def test_memory_of_kernels_without_an_estimate(tmp_path: Path) -> None:
    write(tmp_path, {"meminfo": "MemFree: 100 kB\nBuffers: 20 kB\nCached: 300 kB\n"})
    assert linux.usable_memory_bytes(tmp_path, tmp_path)[0] == 420 * 1024


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (X86, "AMD EPYC 7543 32-Core Processor"),
        ("processor : 0\nBogoMIPS : 50\nCPU implementer : 0x41\nCPU part : 0xd4f\n",
         "ARM implementer 0x41 part 0xd4f"),
        ("processor : 0\nisa : rv64\n\nModel : Raspberry Pi 5 Model B\n", "Raspberry Pi 5 Model B"),
    ],
)  # fmt: skip
def test_the_cpus_name_on_each_architecture(text: str, model: str) -> None:
    assert linux.parse_cpu_model(text) == model


def test_a_cpuinfo_without_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no CPU model"):
        linux.parse_cpu_model("processor : 0\n")


def test_sizes_of_caches() -> None:
    assert linux.parse_size("266240K\n") == 272629760
    assert linux.parse_size("32M") == 32 * 2**20
    with pytest.raises(ValueError, match="not a size"):
        linux.parse_size("big")


def test_a_cache_that_cpus_share_counts_once(tmp_path: Path) -> None:
    # Four CPUs, two of them to a 32 MiB L3; their own L2 caches are not the last level.
    for cpu in range(4):
        pair = "0-1" if cpu < 2 else "2-3"
        write(
            tmp_path / f"devices/system/cpu/cpu{cpu}/cache",
            {
                "index2/level": "2\n",
                "index2/size": "1024K\n",
                "index2/shared_cpu_list": f"{cpu}\n",
                "index3/level": "3\n",
                "index3/size": "32768K\n",
                "index3/shared_cpu_list": f"{pair}\n",
            },
        )
    assert linux.last_level_cache_bytes(tmp_path) == 2 * 32 * 2**20
    with pytest.raises(FileNotFoundError, match="cache"):
        linux.last_level_cache_bytes(tmp_path / "nothing")


def test_the_distributions_name(tmp_path: Path) -> None:
    write(tmp_path, {"etc/os-release": 'NAME=X\nPRETTY_NAME="Rocky Linux 9.4 (Blue Onyx)"\n'})
    assert operating_system(tmp_path) == "Rocky Linux 9.4 (Blue Onyx)"
    with pytest.raises(FileNotFoundError):
        operating_system(tmp_path / "nothing")


# --- who the machine is ------------------------------------------------------------------------

ID = "3d1219c7c4c5404aaa1f6d2a48adfda4"


def test_the_machine_id_is_hashed_and_stable(tmp_path: Path) -> None:
    write(tmp_path, {"etc/machine-id": f"{ID}\n"})
    one = identity(tmp_path / "sys", tmp_path, in_container=False)
    assert one == identity(tmp_path / "sys", tmp_path, in_container=False)
    assert ID not in one.hashed
    assert len(one.hashed) == 16
    write(tmp_path, {"etc/machine-id": f"{ID[::-1]}\n"})
    assert identity(tmp_path / "sys", tmp_path, in_container=False).hashed != one.hashed


def test_containers_of_one_image_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"etc/machine-id": f"{ID}\n"})
    made = []
    for name in ("a1b2", "c3d4"):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        made.append(identity(tmp_path / "sys", tmp_path, in_container=True).hashed)
    assert made[0] != made[1]
    # where the firmware's id can be read, it is the machine and not the container that counts
    write(tmp_path, {"sys/class/dmi/id/product_uuid": "4C4C4544-0051\n"})
    monkeypatch.setattr("socket.gethostname", lambda: "e5f6")
    one = identity(tmp_path / "sys", tmp_path, in_container=True)
    monkeypatch.setattr("socket.gethostname", lambda: "a7b8")
    assert one == identity(tmp_path / "sys", tmp_path, in_container=True)


def test_without_ids_a_network_card_or_the_name_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    write(tmp_path, {"etc/machine-id": "uninitialized\n"})
    by_name = identity(tmp_path / "sys", tmp_path, in_container=False)
    assert "host name" in by_name.source
    # a bridge has an address but no device behind it, and it is made up anew at each start
    write(tmp_path, {"sys/class/net/br0/address": "02:42:aa:bb:cc:dd\n"})
    assert identity(tmp_path / "sys", tmp_path, in_container=False) == by_name
    write(
        tmp_path,
        {"sys/class/net/eth0/address": "52:54:00:12:34:56\n", "sys/class/net/eth0/device/x": ""},
    )
    assert "eth0" in identity(tmp_path / "sys", tmp_path, in_container=False).source


@pytest.mark.parametrize(
    ("files", "kind", "hypervisor"),
    [
        ({"proc/cpuinfo": X86.format(flag="sse")}, "bare metal", "none"),
        ({"proc/cpuinfo": X86.format(flag="hypervisor")}, "vm", "unknown"),
        (
            {
                "proc/cpuinfo": X86.format(flag="hypervisor"),
                "sys/class/dmi/id/sys_vendor": "QEMU\n",
            },
            "vm",
            "qemu/kvm",
        ),
        (
            # a bare-metal rental has its cloud's vendor, but its CPU reports no hypervisor
            {"proc/cpuinfo": X86.format(flag="sse"), "sys/class/dmi/id/sys_vendor": "Amazon EC2\n"},
            "bare metal",
            "none",
        ),
        (
            {
                "proc/cpuinfo": "processor : 0\nCPU part : 0xd40\n",
                "sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
                "sys/class/dmi/id/product_name": "c7g.metal\n",
            },
            "bare metal",
            "none",
        ),
        (
            {
                "proc/cpuinfo": "processor : 0\nCPU part : 0xd40\n",
                "sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
                "sys/class/dmi/id/product_name": "g5g.xlarge\n",
            },
            "vm",
            "nitro/xen (Amazon)",
        ),
        (
            {"proc/cpuinfo": X86.format(flag="hypervisor"), "sys/hypervisor/type": "xen\n"},
            "vm",
            "xen",
        ),
        (
            # field case 36: WSL2 tells by its kernel's release, whatever else it looks like
            {
                "proc/cpuinfo": X86.format(flag="hypervisor"),
                "proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n",
                ".dockerenv": "",
            },
            "wsl2",
            "hyper-v",
        ),
        (
            {"proc/cpuinfo": X86.format(flag="sse"), "proc/1/environ": "A=b\0container=podman\0"},
            "container",
            "none",
        ),
        (
            {
                "proc/cpuinfo": X86.format(flag="hypervisor"),
                "proc/self/cgroup": "0::/kubepods/besteffort/pod1/2\n",
            },
            "container",
            "unknown",
        ),
        ({".dockerenv": ""}, "container", "unknown"),
    ],
)
def test_the_kind_of_host(
    tmp_path: Path, files: dict[str, str], kind: str, hypervisor: str
) -> None:
    write(tmp_path, files)
    found = host_kind(tmp_path / "proc", tmp_path / "sys", tmp_path)
    assert (found.kind, found.hypervisor) == (kind, hypervisor)
    assert found.evidence


def test_silence_is_not_bare_metal(tmp_path: Path) -> None:
    # field case 24: absent is unknown
    with pytest.raises(FileNotFoundError, match="hypervisor"):
        host_kind(tmp_path / "proc", tmp_path / "sys", tmp_path)


def test_an_image_that_runs_as_a_whole_machine_is_no_container(tmp_path: Path) -> None:
    disk = "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
    write(tmp_path, {".dockerenv": "", "proc/self/mountinfo": disk})
    assert container_evidence(tmp_path / "proc", tmp_path)
    write(tmp_path, {"proc/2/comm": "kthreadd\n"})
    assert container_evidence(tmp_path / "proc", tmp_path) == []
    # a container that shares the host's process numbers still has an overlay for its root
    overlay = "27 1 0:30 / / rw - overlay overlay rw,lowerdir=/x\n"
    write(tmp_path, {"proc/self/mountinfo": overlay})
    assert container_evidence(tmp_path / "proc", tmp_path)


# --- the platforms -----------------------------------------------------------------------------


@pytest.mark.parametrize("platform", [LinuxHost, OtherHost])
def test_every_platform_answers_the_same_questions(platform: type) -> None:
    for name, question in inspect.getmembers(Host, inspect.isfunction):
        if name.startswith("_"):
            continue
        answer = getattr(platform, name)
        assert inspect.signature(answer) == inspect.signature(question), name


def test_every_question_is_answered_or_refused_by_name() -> None:
    for host in (this_host(), OtherHost()):
        for name, question in inspect.getmembers(Host, inspect.isfunction):
            if name.startswith("_"):
                continue
            arguments = {"pressure": ("cpu",), "gpu_numa_node": ("00000000:01:00.0",)}
            try:
                getattr(host, name)(*arguments.get(name, ()))
            except (OSError, NotImplementedError, ValueError) as error:
                assert str(error), f"{question}: a refusal without words"


def test_a_closed_proc_is_refused_by_name(tmp_path: Path) -> None:
    host = LinuxHost(tmp_path / "proc", tmp_path / "sys", tmp_path)
    for name in ("kernel", "cpu_model", "memory_total_bytes", "cpu_times", "load_average"):
        with pytest.raises(FileNotFoundError, match="proc"):
            getattr(host, name)()
    with pytest.raises(FileNotFoundError, match="pressure"):
        host.pressure("cpu")
    # memory comes from psutil then, which reads the real /proc by itself
    assert "psutil" in host.usable_memory_bytes()[1]


def test_memory_that_nothing_tells_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:  # what psutil does where /proc/meminfo is hidden
        raise KeyError(b"MemTotal:")

    monkeypatch.setattr("psutil.virtual_memory", broken)
    write(tmp_path, {"meminfo": ""})
    with pytest.raises(OSError, match="cannot be read"):
        linux.usable_memory_bytes(tmp_path, tmp_path)


def test_frequency_and_numa_node_are_read_from_sysfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    for cpu, khz in ((0, 1), (1, 2_400_000), (3, 3_600_000)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        write(folder, {"scaling_cur_freq": f"{khz}\n"})
    write(tmp_path, {"sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n"})
    host = LinuxHost(tmp_path / "proc", tmp_path / "sys", tmp_path)
    assert host.cpu_frequency_mhz() == 3000
    assert host.gpu_numa_node("00000000:3B:00.0") == 1  # as NVML writes it
    assert host.gpu_numa_node("0000:3b:00.0") == 1
