"""Which call of the platform exists where, and who may rely on it.

A call that Windows or macOS lacks, used outside the files that ask first, is an error nobody sees
on Linux. The tables below say where Python has each; the first test holds them to be true on the
system that runs the tests, the second holds the package to them, and the third imports and asks the
package as it would be on Windows.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINUX, MAC, WINDOWS = "linux", "darwin", "win32"
POSIX = frozenset({LINUX, MAC})

#: Attributes of `os`: where Python has them (Library Reference, os).
OS_CALLS: dict[str, frozenset[str]] = {
    "O_DIRECT": frozenset({LINUX}),
    "O_TMPFILE": frozenset({LINUX}),
    "O_TEMPORARY": frozenset({WINDOWS}),
    "O_BINARY": frozenset({WINDOWS}),
    "O_CLOEXEC": POSIX,
    "O_DIRECTORY": POSIX,
    "SEEK_DATA": POSIX,
    "SEEK_HOLE": POSIX,
    "fork": POSIX,
    "getloadavg": POSIX,
    "getxattr": frozenset({LINUX}),
    "getpgid": POSIX,
    "geteuid": POSIX,
    "killpg": POSIX,
    "posix_fadvise": frozenset({LINUX}),
    "preadv": POSIX,
    "sched_getaffinity": frozenset({LINUX}),
    "sched_setaffinity": frozenset({LINUX}),
    "setsid": POSIX,
    "statvfs": POSIX,
    "sysconf": POSIX,
    "uname": POSIX,
}

MODULES: dict[str, frozenset[str]] = {
    "fcntl": POSIX,
    "grp": POSIX,
    "msvcrt": frozenset({WINDOWS}),
    "pwd": POSIX,
    "resource": POSIX,
    "termios": POSIX,
    "winreg": frozenset({WINDOWS}),
}

#: Who uses what some platform lacks, having asked which one this is (or caught the answer).
ASKS_FIRST: dict[str, frozenset[str]] = {
    "pichak_core/devices/direct_io.py": frozenset(
        {"O_TMPFILE", "O_TEMPORARY", "O_BINARY", "O_CLOEXEC", "posix_fadvise", "fcntl"}
    ),
    "pichak_core/devices/extents.py": frozenset({"SEEK_DATA", "SEEK_HOLE", "fcntl"}),
    # Where there are no control groups nothing of these is reached.
    "pichak_core/devices/job_group.py": frozenset({"O_CLOEXEC", "O_DIRECTORY", "fcntl"}),
    "pichak_core/devices/own_group.py": frozenset({"geteuid", "getxattr"}),
    "pichak_core/devices/linux_host.py": frozenset(
        {"statvfs", "sysconf", "sched_getaffinity", "resource"}
    ),
    "pichak_core/devices/other.py": frozenset({"getloadavg"}),
    "pichak_core/devices/processes.py": frozenset({"sysconf", "resource", "pwd"}),
    "pichak_core/devices/windows_pdh.py": frozenset({"winreg"}),
    "pichak_core/measure/_disk_files.py": frozenset({"posix_fadvise"}),
}


@pytest.mark.parametrize("name", OS_CALLS)
def test_python_has_the_call_where_the_table_says(name: str) -> None:
    if sys.platform not in (LINUX, MAC, WINDOWS):
        pytest.skip("a system of its own")
    assert hasattr(os, name) == (sys.platform in OS_CALLS[name])


@pytest.mark.parametrize("name", MODULES)
def test_python_has_the_module_where_the_table_says(name: str) -> None:
    if sys.platform not in (LINUX, MAC, WINDOWS):
        pytest.skip("a system of its own")
    assert (importlib.util.find_spec(name) is not None) == (sys.platform in MODULES[name])


def _uses(path: Path) -> set[str]:
    used = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in OS_CALLS:
                used.add(node.attr)
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names} & set(MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            used.add(node.module)
    return used


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "pichak_core").rglob("*.py")),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_only_who_asks_first_uses_what_a_platform_lacks(path: Path) -> None:
    allowed = ASKS_FIRST.get(path.relative_to(ROOT).as_posix(), frozenset())
    assert _uses(path) == allowed


@pytest.mark.parametrize("package", ["pichak_core", "agent", "coordinator"])
def test_the_platform_is_asked_for_in_devices_alone(package: str) -> None:
    askers = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr)
                in {("sys", "platform"), ("_sys", "platform"), ("platform", "system")}
            ):
                askers.add(path.relative_to(ROOT).parent.as_posix())
    assert askers <= {"pichak_core/devices"}


# As Windows: the standard library is loaded first (it would look for Windows' own modules), then
# everything that Windows lacks is taken away, then the package comes.
_AS_WINDOWS = """
import asyncio, concurrent.futures, contextlib, ctypes, importlib, json, mmap, multiprocessing
import os, pathlib, pkgutil, platform, random, re, shutil, signal, socket, sqlite3, ssl, statistics
import subprocess, sys, tempfile, threading, uuid, zlib
missing_calls, missing_modules = json.loads(sys.argv[1])
for name in missing_calls:
    if hasattr(os, name):
        delattr(os, name)
for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE"):
    delattr(mmap, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    delattr(signal, name)
for name in missing_modules:
    sys.modules[name] = None
sys.platform = "win32"
os.O_BINARY = 0
import pichak_core
failed = {}
for module in pkgutil.walk_packages(pichak_core.__path__, "pichak_core."):
    if not module.name.startswith("pichak_core.workload"):
        try:
            importlib.import_module(module.name)
        except BaseException as error:
            failed[module.name] = repr(error)
from pichak_core.devices import gpu_memory_reader, host
from pichak_core.devices.direct_io import aligned_buffer
from pichak_core.devices.linux import affinity_count
read = gpu_memory_reader(lambda: "")
use = read()
print(json.dumps({
    "failed": failed,
    "host": type(host.this_host()).__name__,
    "cores": affinity_count()[0],
    "buffer": len(aligned_buffer(1)),
    "spill": [use.reason.value, use.detail],
}))
"""


def test_the_core_as_it_is_on_windows() -> None:
    calls = [name for name, where in OS_CALLS.items() if WINDOWS not in where]
    modules = [name for name, where in MODULES.items() if WINDOWS not in where]
    done = subprocess.run(
        [sys.executable, "-c", _AS_WINDOWS, json.dumps([calls, modules])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["failed"] == {}
    assert seen["host"] == "OtherHost"
    assert seen["cores"] == os.cpu_count()
    assert seen["buffer"] >= 4096
    # no gdi32 and no pdh on the system that runs this: a named gap, and no zero (field case 39)
    assert seen["spill"][0] in {"failed", "not supported"}
    assert seen["spill"][1].startswith("spill unknown")
