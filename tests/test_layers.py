"""The directions of imports that docs/ARCHITECTURE.md draws, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "pichak_core": ROOT / "pichak_core",
    "pichak_agent": ROOT / "agent" / "pichak_agent",
    "pichak_coordinator": ROOT / "coordinator" / "pichak_coordinator",
}
#: What the coordinator may know of the agent.
AGENT_DOORS = {
    "pichak_agent.messages",
    "pichak_agent.ray_actor",
    "pichak_agent.local",
    "pichak_agent.service",
    "pichak_agent.simulation",
}
RAY_IMPORTERS = {
    "agent/pichak_agent/ray_actor.py",
    "coordinator/pichak_coordinator/cluster.py",
    "coordinator/pichak_coordinator/dispatch.py",
}


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return names


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources("pichak_core"), ids=relative)
def test_core_knows_nobody_and_imports_the_standard_library_alone(path: Path) -> None:
    names = imported(path)
    assert not {n for n in names if n.startswith(("pichak_agent", "pichak_coordinator"))}
    roots = {n.split(".")[0] for n in imported(path, top_level_only=True)}
    assert roots - {"pichak_core", ""} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", sources("pichak_agent"), ids=relative)
def test_the_agent_knows_the_core_only(path: Path) -> None:
    assert not {n for n in imported(path) if n.startswith("pichak_coordinator")}


@pytest.mark.parametrize("path", sources("pichak_coordinator"), ids=relative)
def test_the_coordinator_enters_the_agent_by_its_doors(path: Path) -> None:
    names = {n for n in imported(path) if n.startswith("pichak_agent")}
    strangers = {
        n for n in names if not any(n == door or n.startswith(f"{door}.") for door in AGENT_DOORS)
    }
    assert strangers <= {"pichak_agent"}


def every_source() -> list[Path]:
    return [path for package in PACKAGES for path in sources(package)]


def test_sole_importers() -> None:
    ray_users = {relative(p) for p in every_source() if "ray" in roots_of(p)}
    nvml_users = {relative(p) for p in every_source() if "pynvml" in roots_of(p)}
    assert ray_users <= RAY_IMPORTERS
    assert nvml_users <= {"pichak_core/devices/nvml.py"}


def roots_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", every_source(), ids=relative)
def test_platform_is_asked_in_devices_only(path: Path) -> None:
    if "devices" in path.parts:
        return
    text = path.read_text(encoding="utf-8")
    assert "sys.platform" not in text
    assert "platform.system(" not in text


def test_nobody_imports_validation() -> None:
    assert not [p for p in every_source() if "validation" in roots_of(p)]


def test_core_imports_in_a_bare_interpreter() -> None:
    """No site-packages at all: only the standard library may be needed."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pichak_core, pichak_core.tune, "
        "pichak_core.measure, pichak_core.workload, pichak_core.devices; "
        "pichak_core.measure.probes(); print(pichak_core.Plan().report())"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
