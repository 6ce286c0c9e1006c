"""Swap in use, as the kernel tells it, and not 0 where it does not."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pichak_agent.host_sampler import swap_used_bytes


def test_what_is_used_is_what_is_not_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nSwapTotal:   2048 kB\nSwapFree:    1024 kB\n")
    assert swap_used_bytes(meminfo) == 1024 * 1024
    meminfo.write_text("SwapTotal: 0 kB\nSwapFree: 0 kB\n")  # a machine without swap
    assert swap_used_bytes(meminfo) == 0


@pytest.mark.parametrize("text", ["", "MemTotal: 100 kB\n", "SwapTotal: 2048 kB\n"])
def test_what_is_not_told_is_not_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / "meminfo").write_text(text)
    with pytest.raises(OSError, match="does not tell the swap"):
        swap_used_bytes(tmp_path / "meminfo")


def test_this_machine_and_others() -> None:
    assert swap_used_bytes() == pytest.approx(psutil.swap_memory().used, abs=64 * 2**20)
    assert swap_used_bytes(Path("/nowhere/meminfo")) == pytest.approx(
        psutil.swap_memory().used, abs=64 * 2**20
    )
