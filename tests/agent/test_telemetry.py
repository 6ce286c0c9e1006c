"""The sampler with real files, processes and sockets; NVML is a recording, played in its child."""

from __future__ import annotations

import functools
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from pichak_agent.metrics_server import serve_metrics
from pichak_agent.metrics_text import escape, metrics_text
from pichak_agent.telemetry import Telemetry
from pichak_core.devices.nvml_session import NvmlSession

RECORDINGS = Path(__file__).parents[1] / "data" / "nvml"


def played(name: str) -> Callable[[], NvmlSession]:
    return functools.partial(NvmlSession, RECORDINGS / f"{name}.json")


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_it_samples_the_host_and_the_gpus(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, start_nvml=played("datacentre_h100"), interval_seconds=0.02)
    telemetry.start()
    try:
        until(lambda: any(r.gpus and not r.full for r in telemetry.ring()))
        gpus = next(r for r in telemetry.ring() if r.gpus and not r.full).gpus
        assert [gpu.live["power_watts"] for gpu in gpus] == [69.87, 69.87]
        assert [gpu.facts["power_limit_watts"] for gpu in gpus] == [700.0, 500.0]
        first, last = telemetry.ring()[0], telemetry.ring()[-1]
        assert first.host.cpu_total_seconds <= last.host.cpu_total_seconds  # type: ignore[operator]
        assert first.host.memory_available_bytes
        assert json.loads(json.dumps(telemetry.as_json()))["latest"]["gpus"] is not None
    finally:
        telemetry.stop()


def test_one_process_of_a_node_samples_and_the_others_read(tmp_path: Path) -> None:
    first = Telemetry(tmp_path, start_nvml=None)
    second = Telemetry(tmp_path, start_nvml=None)
    assert first.tick()
    assert not second.tick()
    assert second.as_json()["at_unix"] == first.as_json()["at_unix"]
    assert second.as_json()["source"] == first.as_json()["source"]
    first.stop()
    assert second.tick()
    second.stop()


def test_an_old_state_is_stale_and_accuses_nobody(tmp_path: Path) -> None:
    now = [1000.0]
    first = Telemetry(tmp_path, start_nvml=None, clock=lambda: now[0])
    first.tick()
    first.stop()
    second = Telemetry(tmp_path, start_nvml=None, clock=lambda: now[0])
    assert not second.as_json()["stale"]
    now[0] = 2000.0
    assert second.as_json()["stale"]
    assert second.findings() == []
    assert "pichak_up 0.0" in second.prometheus()
    assert "pichak_host" not in second.prometheus()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', "\udcff"])
def test_a_state_file_that_is_none_is_nobody(tmp_path: Path, content: str) -> None:
    telemetry = Telemetry(tmp_path, start_nvml=None)
    telemetry.folder.mkdir(parents=True)
    telemetry.state_file.write_text(content, encoding="utf-8", errors="surrogateescape")
    assert telemetry.as_json()["source"] == "nobody"


def test_a_state_that_cannot_be_written_is_told_when_it_lasts(tmp_path: Path) -> None:
    now = [1000.0]
    telemetry = Telemetry(tmp_path, start_nvml=None, steady=lambda: now[0])
    telemetry.tick()
    telemetry.state_file.unlink()
    telemetry.state_file.mkdir()  # no file replaces a folder

    def problems() -> list[str]:
        now[0] += 11.0
        telemetry.tick()
        return list(telemetry.as_json()["problems"])

    assert problems() == []  # once is a reader that had it open, on Windows
    (problem,) = problems()
    assert f"cannot be written to {telemetry.state_file}" in problem
    telemetry.stop()


def test_the_interval_grows_with_what_nvml_takes(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, start_nvml=played("datacentre_h100"))
    telemetry.tick()
    assert telemetry.interval_seconds == 1.0
    assert telemetry._keeper is not None
    telemetry._keeper.seconds = 1.5  # a card without persistence wakes for each answer
    telemetry.tick()
    assert telemetry.interval_seconds == pytest.approx(15.0)  # a tenth of the clock
    telemetry.stop()


def test_the_ring_is_bounded(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, start_nvml=None, ring_readings=3)
    for _ in range(5):
        telemetry.tick()
    assert len(telemetry.ring()) == 3
    assert telemetry.as_json()["readings"] == 5
    telemetry.stop()


def get(port: int, page: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


LINE = re.compile(r'^[a-zA-Z_:][\w:]*(\{([a-z_]+="([^"\\\n]|\\[\\n"])*",?)+\})? -?[0-9.e+-]+$')


def test_pages(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, start_nvml=played("datacentre_h100"), interval_seconds=0.02)
    server = serve_metrics(telemetry)
    try:
        assert get(server.port, "healthz")[0] == 503
        telemetry.start()
        until(lambda: any(r.gpus for r in telemetry.ring()))
        assert get(server.port, "healthz")[0] == 200
        status, kind, text = get(server.port, "metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        for line in text.splitlines():
            assert line.startswith("# ") or LINE.match(line), line
        assert 'pichak_gpu_power_limit_watts{gpu="1",' in text
        assert len(json.loads(get(server.port, "ring.json")[2])["ring"]) > 1
        assert json.loads(get(server.port, "findings.json")[2]) == telemetry.findings()
        assert get(server.port, "../etc/passwd")[0] == 404
    finally:
        server.close()
        telemetry.stop()


def test_a_family_is_told_once_and_what_was_not_read_is_absent() -> None:
    state = {
        "stale": False,
        "latest": {"host": {"swap_used_bytes": 0}},
        "gpus": [
            {"index": 0, "uuid": "a", "live": {"utilisation_percent": 0}, "facts": {}},
            {"index": 1, "uuid": "b", "live": {}, "facts": {}},  # field case 15: None is no zero
        ],
    }
    text = metrics_text(state)
    assert text.count("# TYPE pichak_gpu_utilisation_percent ") == 1
    assert 'pichak_gpu_utilisation_percent{gpu="0",uuid="a",name=""} 0' in text
    assert 'utilisation_percent{gpu="1"' not in text
    assert "pichak_host_swap_used_bytes 0" in text
    assert "memory_available" not in text


def test_text_from_a_node_stays_in_its_quotes() -> None:
    evil = 'a"} 1\nevil_metric{x="\\\x00'
    assert escape(evil) == 'a\\"} 1\\nevil_metric{x=\\"\\\\?'
    state = {"gpus": [{"index": 0, "uuid": evil, "live": {"power_watts": 1.0}, "facts": {}}]}
    assert not [n for n in metrics_text(state).splitlines() if n.startswith("evil")]
    assert len(escape("x" * 10_000)) == 200


def test_whoever_takes_over_knows_which_gpus_there_were(tmp_path: Path) -> None:
    first = Telemetry(tmp_path, start_nvml=played("datacentre_h100"), interval_seconds=0.02)
    first.start()
    try:
        until(lambda: first.as_json(ring=False)["had"])
        had = first.as_json(ring=False)["had"]
        first._written = float("-inf")  # its next reading writes the state
        until(lambda: first._written > 0)
    finally:
        first.stop()
    second = Telemetry(tmp_path, start_nvml=None)
    second.tick()
    assert len(had) == 2
    assert second.as_json(ring=False)["had"] == had
    second.stop()
