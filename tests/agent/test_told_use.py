"""The file in which a process tells its use: what comes back, and what tells nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.readings import TOLD, OwnUse, ProcessId
from pichak_agent.told_use import FRESH_SECONDS, read_use, remove_use, write_use
from pichak_core.devices import ProcessMemory
from pichak_core.testing import GIB

UUID = "GPU-5f2b3c4d-0000-1111-2222-333344445555"
MEMORY = ProcessMemory(5 * GIB, 0, 4 * GIB, 6 * GIB, 7)
FULL = OwnUse(UUID, "", 1, 5 * GIB, 4 * GIB, None, MEMORY, 4 * GIB, TOLD)
BARE = OwnUse("MIG-1", allocated_bytes=0)
NOTHING = (OwnUse(job="job"),)

GOOD: dict[str, Any] = {
    "steady_seconds": 100.0,
    "seconds_per_step": 0.5,
    "gpus": [{"uuid": UUID, "allocated_bytes": 3}],
}


def read(path: Path, at: float = 100.0) -> tuple[OwnUse, ...]:
    return read_use(path, "job", steady_seconds=at)


def test_what_is_told_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "told"
    assert read(path) == NOTHING
    write_use(path, [FULL, BARE], steady_seconds=99.0, seconds_per_step=0.25)
    told = read(path)
    assert told == tuple(replace(u, job="job", seconds_per_step=0.25) for u in (FULL, BARE))
    assert [(use.process, use.told_steady) for use in told] == [(None, 99.0)] * 2
    assert told[1].held_bytes is None
    assert told[1].memory is None
    write_use(path, [], steady_seconds=99.0, seconds_per_step=0.25)
    assert read(path) == (OwnUse(job="job", seconds_per_step=0.25),)
    assert [p.name for p in tmp_path.iterdir()] == ["told"]


def test_figures_that_are_old_say_nothing_about_now(tmp_path: Path) -> None:
    path = tmp_path / "told"
    write_use(path, [FULL], steady_seconds=100.0, seconds_per_step=0.25)
    assert read(path, 100 + FRESH_SECONDS)[0].held_bytes == 5 * GIB
    for at in (101 + FRESH_SECONDS, 98.0):  # the second is of another clock
        assert read(path, at) == (OwnUse(UUID, "job"),)
    write_use(path, [], steady_seconds=100.0, seconds_per_step=0.25)
    assert read(path, 200.0) == NOTHING


def test_who_tells_is_told_also_when_its_figures_are_old(tmp_path: Path) -> None:
    path, who = tmp_path / "told", ProcessId(77, "1700000000.5")
    write_use(path, [FULL], steady_seconds=100.0, process=who)
    assert [use.process for use in read(path)] == [who]
    (old,) = read(path, 200.0)
    assert (old.process, old.told_steady, old.memory) == (who, None, None)
    write_use(path, [], steady_seconds=100.0, seconds_per_step=1.0, process=who)
    assert [(use.process, use.uuid) for use in read(path)] == [(who, "")]


def test_the_good_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "told"
    path.write_text(json.dumps(GOOD))
    assert read(path) == (OwnUse(UUID, "job", allocated_bytes=3, seconds_per_step=0.5),)


def gpu(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "gpus": [{**GOOD["gpus"][0], **changes}]}


@pytest.mark.parametrize(
    "told",
    [
        [],
        7,
        None,
        {},
        {**GOOD, "more": 1},
        {**GOOD, "gpus": {}},
        {**GOOD, "gpus": [7]},
        {**GOOD, "gpus": GOOD["gpus"] * 2},
        {**GOOD, "gpus": [{"uuid": f"GPU-{i}"} for i in range(65)]},
        {**GOOD, "gpus": [{"allocated_bytes": 3}]},
        {**GOOD, "steady_seconds": "100"},
        {**GOOD, "steady_seconds": float("nan")},
        {**GOOD, "steady_seconds": True},
        {**GOOD, "seconds_per_step": 0},
        {**GOOD, "seconds_per_step": -1.0},
        {**GOOD, "seconds_per_step": float("inf")},
        {**GOOD, "seconds_per_step": "0.5"},
        {**GOOD, "process": 77},
        {**GOOD, "process": [77]},
        {**GOOD, "process": [-1, "x"]},
        {**GOOD, "process": [77, ""]},
        {**GOOD, "process": ["77", "x"]},
        {**GOOD, "process": [77, "x" * 65]},
        gpu(reserved_bytes=-1),
        gpu(uuid=7),
        gpu(uuid=""),
        gpu(uuid="GPU-x\n"),
        gpu(job="another"),
        gpu(allocated_bytes=-1),
        gpu(allocated_bytes=1.5),
        gpu(allocated_bytes=True),
        gpu(allocated_bytes=2**60),
        gpu(allocated_bytes=None),
        gpu(held_bytes="3"),
        gpu(processes=-1),
        gpu(processes=10**6),
        gpu(memory=[]),
        gpu(memory={"dedicated": 1, "shared": 1}),
        gpu(memory={"dedicated": 1, "shared": None, "reserved": 1}),
        gpu(memory={"dedicated": 1, "shared": 1, "reserved": 1, "more": 1}),
        gpu(memory={"dedicated": 1, "shared": 1, "reserved": 1, "card_shared": 0.5}),
    ],
    ids=repr,
)
def test_what_is_not_such_a_file_tells_nothing(tmp_path: Path, told: Any) -> None:
    path = tmp_path / "told"
    path.write_text(json.dumps(told))
    assert read(path) == NOTHING


def test_every_half_of_a_file_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "told"
    whole = json.dumps(GOOD).encode()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) == NOTHING


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe\0garbage", b"[" * 60_000, json.dumps(GOOD).encode() + b" " * 70_000],
    ids=["bytes", "deep", "long"],
)
def test_garbage_tells_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "told"
    path.write_bytes(data)
    assert read(path) == NOTHING


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path / "pipe") == NOTHING
    assert read(tmp_path) == NOTHING


def test_what_was_being_written_goes_too(tmp_path: Path) -> None:
    (tmp_path / "told").touch()
    (tmp_path / "told.part").touch()
    remove_use(tmp_path / "told")
    remove_use(tmp_path / "told")
    assert list(tmp_path.iterdir()) == []
