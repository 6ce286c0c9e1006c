"""Services on hosts of network namespaces whose raylet, link and head go away: the experiment of
``validation/service_netns``, whose own rule is the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "validation" / "service_netns" / "run.py"
TOOLS = ("ip", "tc", "nft", "unshare")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.root
@pytest.mark.timeout(3600)
def test_every_node_comes_back_with_what_it_measured(tmp_path: Path) -> None:
    """field cases 86 to 89"""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3500,
    )
    assert out.exists(), done.stderr[-3000:]
    rule = json.loads(out.read_text())["rule"]
    assert not [part for part, met in rule.items() if not met], done.stderr[-3000:]
