"""Seven hosts made of network namespaces, four of them ill: the experiment of
``validation/netns_fleet``, whose own rule is the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "validation" / "netns_fleet" / "run.py"
TOOLS = ("ip", "tc", "nft", "unshare")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.root
@pytest.mark.timeout(1200)
def test_each_ill_host_is_named_and_no_healthy_link_accused(tmp_path: Path) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not Path("/dev/net/tun").exists():
        pytest.skip(f"needs {', '.join(missing) or '/dev/net/tun'}")
    out = tmp_path / "result.json"
    before = _namespaces()
    done = subprocess.run(
        [sys.executable, str(RUN), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert out.exists(), done.stderr[-3000:]
    rule = json.loads(out.read_text())["rule"]
    # Who is blamed must hold on a busy machine too; the figures of part 3 may be late there.
    assert [part for part, met in rule.items() if not met and not part.startswith("3")] == []
    assert _namespaces() == before


def _namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
