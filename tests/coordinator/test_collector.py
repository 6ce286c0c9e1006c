"""The collector of cycles is paused, and comes back whatever happens."""

from __future__ import annotations

import gc

import pytest

from pichak_coordinator.collector import paused


def test_it_is_off_inside_and_on_again_after_the_outermost() -> None:
    assert gc.isenabled()
    with paused():
        assert not gc.isenabled()
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_after_an_error() -> None:
    @paused()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("x")

    for _ in range(2):
        with pytest.raises(ValueError, match="x"):
            fail()
        assert gc.isenabled()


def test_who_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
