"""The acceptance run: refuses a machine without a GPU in a sentence, and runs all of itself on a
CPU to try the script."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "validation" / "gpu_acceptance"


def run(*arguments: str, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "sees no CUDA device" in done.stderr
    assert "--device cpu --small" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_whole_run_on_the_cpu_is_refused() -> None:
    done = run("--device", "cpu")
    assert done.returncode == 2
    assert "give --small as well" in done.stderr


def test_it_imports_what_a_gpu_machine_has() -> None:
    here = {path.stem for path in FOLDER.glob("*.py")}
    allowed = {"torch", "transformers", "pynvml", "psutil", "msgpack", "pichak_core"} | here
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                root = name.split(".")[0]
                assert root in allowed | set(sys.stdlib_module_names), f"{path.name}: {name}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_runs_through_on_a_cpu(tmp_path: Path) -> None:
    kept = (FOLDER / "result.json").exists()
    out = tmp_path / "dry.json"
    done = run("--device", "cpu", "--small", "--out", str(out), seconds=880)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["met"] is True
    assert result["dry_run"] is True
    assert (FOLDER / "result.json").exists() == kept  # a dry run leaves the result alone
    names = [stage["stage"] for stage in result["stages"]]
    assert names == [
        "fingerprint", "launch", "copies", "cap",
        *("ramp", "training") * 3, "noise", "golden", "golden",
    ]  # fmt: skip
    trained = [s for s in result["stages"] if s["stage"] == "training"]
    assert [s["figures"]["refused"] for s in trained] == [0, 0, 0]
    assert [s["figures"]["steps"] for s in trained] == [6, 6, 6]
    for stage in result["stages"]:
        assert all(holds for _, holds, _ in stage["checks"]), stage
