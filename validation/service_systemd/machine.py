"""A machine whose process 1 is systemd: namespaces of its own over a copy-on-write root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

#: Of this machine's own units nothing is started; `$1` is an empty folder.
BOOT = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs tmpfs tmp
rm -rf etc/systemd/system/*.wants var/lib/pichak* etc/pichak opt/pichak
echo "$2" > etc/hostname
hostname "$2"
# What systemd mounts for one unit in a child of its own must reach process 1.
mount --make-rshared "$1/root"
exec chroot . /usr/bin/env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    /lib/systemd/systemd --unit=basic.target --log-target=journal --show-status=no
"""
_BOOT_SECONDS = 60.0
_END_SECONDS = 10.0
CGROUPS = Path("/sys/fs/cgroup")


class Machine:
    """Booted in `with`; nothing of it is left afterwards. `network` is the path of a network
    namespace, `folder` an empty one of this machine, over which the other's disk is laid."""

    def __init__(self, name: str, network: str, folder: Path) -> None:
        self._command = [
            *("nsenter", f"--net={network}"),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc"),
            *("--cgroup", "sh", "-c", BOOT, "sh", str(folder), name),
        ]
        self._root = folder / "root"
        self._outer: subprocess.Popen[bytes]
        self._pid = 0

    def __enter__(self) -> Machine:
        self._outer = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + _BOOT_SECONDS
        while not (self._find() and self.run("systemctl", "is-system-running") == "running"):
            if time.monotonic() > end or self._outer.poll() is not None:
                self.__exit__()
                raise RuntimeError("systemd did not start as process 1 here")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # the kernel ends everything of its namespace
        else:
            self._outer.kill()
        self._outer.wait()

    def _find(self) -> bool:
        """Process 1 of the machine, by its number here."""
        outer = self._outer.pid
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        self._pid = int(children[0]) if children else 0
        comm = Path(f"/proc/{self._pid}/comm")
        return bool(self._pid) and comm.read_text().strip() == "systemd"

    def start(self, *command: str, env: Sequence[str] = ()) -> subprocess.Popen[str]:
        """`command` as root of the machine, with `env` (``NAME=VALUE``) as its only variables."""
        path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
        inside = ["nsenter", "-t", str(self._pid), "--pid", "--mount", "--uts", "--ipc", "--net"]
        inside += ["--cgroup", "chroot", str(self._root), "/usr/bin/env", "-i", path, *env]
        return subprocess.Popen(
            [*inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, env: Sequence[str] = (), seconds: float = 60.0) -> str:
        """What it says, on either output; it is ended after `seconds`."""
        process = self.start(*command, env=env)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        return said.strip()

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def path(self, inside: str) -> Path:
        """Where a file of the machine is from here."""
        return Path(f"/proc/{self._pid}/root{inside}")

    def here(self, pid: int) -> int:
        """The number here of its process `pid`; 0 when there is none."""
        space = Path(f"/proc/{self._pid}/ns/pid")
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                lines = status.read_text().splitlines()
                same = (status.parent / "ns/pid").readlink() == space.readlink()
            except OSError:
                continue
            numbers = next((x.split()[1:] for x in lines if x.startswith("NSpid:")), [])
            if same and numbers and int(numbers[-1]) == pid:
                return int(status.parent.name)
        return 0


def open_to_all(machine: Machine, *places: str) -> None:
    """An interpreter in somebody's home cannot be reached by others; on this copy of it, it can."""
    for place in places:
        machine.run("chmod", "a+rx", place, *map(str, Path(place).parents))


def control_groups() -> set[Path]:
    """Those that systemd makes at the top of each hierarchy, which all namespaces share."""
    return {path for end in ("slice", "scope") for path in CGROUPS.glob(f"*/*.{end}")}


def remove_control_groups(before: set[Path]) -> None:
    """The new ones, once what was in them has gone; one that is still in use stays."""
    end = time.monotonic() + _END_SECONDS
    while (new := control_groups() - before) and time.monotonic() < end:
        for top in new:
            for path in sorted(top.glob("**/"), key=lambda each: -len(each.parts)):
                with contextlib.suppress(OSError):
                    path.rmdir()
        time.sleep(0.2)
