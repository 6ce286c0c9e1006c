"""The PowerShell scripts: parsed, and what they hand to a shell is run by one."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "deploy" / "windows").glob("*.ps1"))


def parsed(text: str) -> Any:
    tree_sitter = pytest.importorskip("tree_sitter")
    grammar = pytest.importorskip("tree_sitter_powershell")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    return parser.parse(text.encode()).root_node


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_it_is_powershell(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    assert not parsed(text).has_error
    # The check can fail: without its last brace it is not.
    assert parsed(text + "\nif ($x) {").has_error


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_mistakes_end_it_and_every_parameter_of_the_help_is_one(path: Path) -> None:
    text = path.read_text()
    assert "Set-StrictMode -Version 3.0" in text
    assert "$ErrorActionPreference = 'Stop'" in text
    declared = set(re.findall(r"^    \[[\w]+\] \$(\w+)", text, re.M))
    assert set(re.findall(r"^\.PARAMETER (\w+)", text, re.M)) <= declared


def test_what_the_installed_task_is_given_is_what_its_script_takes() -> None:
    install, run = (
        (SCRIPTS[0].parent / f"{n}-PichakProbe.ps1").read_text() for n in ("Install", "Invoke")
    )
    declared = set(re.findall(r"^    \[[\w]+\] \$(\w+)", run, re.M))
    given = set(re.findall(r"'-(OutFolder|Pichak|Keep|ProbeOptions|Distribution)'", install))
    assert given == declared


@pytest.mark.parametrize("fails", [False, True])
def test_the_command_inside_wsl(tmp_path: Path, fails: bool) -> None:
    text = (SCRIPTS[0].parent / "Invoke-PichakProbe.ps1").read_text()
    lines = re.search(r"^\$command = (.+?)^#", text, re.M | re.S)
    assert lines is not None
    assert '"' not in "".join(re.findall(r"'([^']*)'", lines[1]))
    pichak = tmp_path / "pichak"
    ending = "echo no >&2; exit 3" if fails else 'printf "\\000\\377made" > "$out"'
    pichak.write_text(
        "#!/bin/sh\n[ \"$1 $2\" = 'agent probe' ] || exit 9\n"
        f'while [ "$1" != --out ]; do shift; done; out=$2\n{ending}\n'
    )
    pichak.chmod(0o755)
    # As PowerShell would put it together: single quotes as they are, double ones with variables.
    command = "".join(
        single or double.replace("$Pichak", str(pichak))
        for single, double in re.findall(r"'([^']*)'|\"([^\"]*)\"", lines[1])
    ).replace("probe.mpk  &&", "probe.mpk --seq-len 64 &&")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, env=environment, check=False
    )
    assert done.returncode == (3 if fails else 0), done.stderr
    assert base64.b64decode(done.stdout) == (b"" if fails else b"\0\xffmade")
    assert [path.name for path in tmp_path.iterdir()] == ["pichak"]
