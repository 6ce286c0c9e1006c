"""What the documents say exists: files, commands, options, finding codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pichak_agent import watch_rules
from pichak_coordinator import gpu_findings
from pichak_coordinator.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def commands(text: str) -> list[list[str]]:
    """Every ``pichak …`` of the code blocks and spans, without comments and redirections."""
    found = re.findall(r"(?<![\w-])pichak ((?:[a-z]+ ?)+[^`\n#>]*)", text)
    return [line.split() for line in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        command: click.Command = app
        context = click.Context(app)
        for word in words:
            if isinstance(command, click.Group):
                known = command.get_command(context, word)
                assert known is not None, f"pichak {' '.join(words)}"
                command = known
            elif word.startswith("--"):
                options = {o for p in command.params for o in p.opts}
                assert word.strip("`.,;)") in options, f"{word} of pichak {' '.join(words)}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_finding_code_has_its_line() -> None:
    page = (ROOT / "docs" / "FINDINGS.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", page, re.M))
    used: set[str] = set()
    for path in (ROOT / "coordinator").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"Finding\(\s*\"([a-z_]+)\"", text))
        used |= set(re.findall(r"\"(slower_than_[a-z]+)\"", text))
    used |= set(gpu_findings.STATES)
    assert watch_rules.CODES
    used |= watch_rules.CODES
    assert used == documented


def test_every_code_of_the_watch_is_in_its_list() -> None:
    found: set[str] = set()
    for path in (ROOT / "agent" / "pichak_agent").glob("watch_*.py"):
        found |= set(re.findall(r"[sS]ign\(\s*\"([a-z_]+)\"", path.read_text(encoding="utf-8")))
    assert found == watch_rules.CODES


def test_the_page_of_measurements_is_that_of_the_registry() -> None:
    written = subprocess.run(
        [sys.executable, ROOT / "scripts" / "list_measurements.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = (ROOT / "docs" / "MEASUREMENTS.md").read_text(encoding="utf-8")
    assert page == written, "python scripts/list_measurements.py > docs/MEASUREMENTS.md"


@pytest.mark.parametrize("name", ["", *sorted(app.list_commands(click.Context(app)))])
def test_every_command_explains_itself(name: str) -> None:
    """Every command has a help text and examples."""
    context = click.Context(app)
    command = app.get_command(context, name) if name else app
    assert command is not None
    assert command.help
    assert command.epilog
    assert "Examples" in command.epilog
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            made = command.get_command(context, child)
            assert made is not None
            assert made.help
            assert name == "" or (made.epilog and "Examples" in made.epilog), f"{name} {child}"
