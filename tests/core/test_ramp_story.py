"""Bytes as the story of a ramp writes them."""

from __future__ import annotations

import pytest

from pichak_core.tune.ramp_story import gib


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30 - 2**19, "1,023.5 MiB"),
        (2**30, "1.00 GiB"),
        (141 * 2**30, "141.00 GiB"),
    ],
)
def test_bytes_are_told_in_a_unit_that_shows_them(count: int, text: str) -> None:
    assert gib(count) == text
