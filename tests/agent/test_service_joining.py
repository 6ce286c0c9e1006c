"""What a service says while Ray does not start or join. `ray` is a program here that does so."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_tools import place_in

from pichak_agent import service_membership
from pichak_agent.service import RayStart, Service
from pichak_agent.service_backoff import Backoff
from pichak_agent.service_files import ServiceFiles, ServiceState
from pichak_agent.service_voice import AGAIN_SECONDS, News, Voice

MASKED = "raise KeyError(b'MemTotal:')"
HANGS = "import time; print('Local node IP: 10.0.0.9', flush=True); time.sleep(600)"


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that gets a line at each start of the program."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    (tmp_path / "lib" / "ray" / "scripts").mkdir(parents=True)
    for folder in ("ray", "ray/scripts"):
        (tmp_path / "lib" / folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.setenv("PICHAK_HOME", str(tmp_path / "home"))
    yield tmp_path / "tried"
    for number, handler in before.items():
        signal.signal(number, handler)


def run_until(tried: Path, program: str, times: int) -> list[str]:
    """All that the service says until the program was started so often."""
    text = f"open({str(tried)!r}, 'a').write('x\\n')\n{program}\n"
    (tried.parent / "lib" / "ray" / "scripts" / "scripts.py").write_text(text)
    said: list[str] = []
    # This machine may have an agent, and other tests run theirs.
    said_of_others = "another agent service runs on this machine"
    with socket.create_server(("127.0.0.1", 0)) as door:
        how = RayStart(f"127.0.0.1:{door.getsockname()[1]}")
        made = Service(
            *(how, "a", said.append),
            home=tried.parent / "home",
            even_if_another=True,
            backoff=Backoff(0.1, 0.2),
        )

        def watch() -> None:
            until = time.monotonic() + 60
            while time.monotonic() < until and not made._stop.is_set():
                if tried.exists() and len(tried.read_text().split()) >= times:
                    break
                time.sleep(0.05)
            made.stop()

        thread = threading.Thread(target=watch)
        thread.start()
        made.run()
        thread.join()
    assert len(tried.read_text().split()) >= times
    assert not (tried.parent / "home").exists()
    return [text for text in said if said_of_others not in text]


def test_why_ray_does_not_start_is_one_sentence_of_ours_said_once(tried: Path) -> None:
    said = run_until(tried, MASKED, times=4)
    assert [text for text in said if "MemTotal" in text] == [
        "Ray cannot see how much memory this machine has: let this service read /proc/meminfo, "
        "which is masked or empty here (Ray's last words: KeyError: b'MemTotal:'); trying again"
    ]
    assert len(said) == 3  # and the first, and that it stopped


def test_a_join_that_takes_long_is_told_with_its_limit_once(
    tried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_membership, "SLOW_JOIN_SECONDS", 0.3)
    monkeypatch.setattr(service_membership, "JOIN_SECONDS", 1.5)
    said = run_until(tried, HANGS, times=3)
    assert sum("still joining" in text for text in said) == 1
    assert sum("did not join the cluster" in text for text in said) == 1
    (still,) = (text for text in said if "still joining" in text)
    assert "which may take 1.5 s" in still


def test_news_is_what_differs_in_more_than_numbers() -> None:
    now = [0.0]
    news = News(lambda: now[0])
    assert news.is_news("raylet 4711 ended in /tmp/pichak-ray-abc12_x (at 0x7f12ab)")
    assert not news.is_news("raylet 4712 ended in /tmp/pichak-ray-zz9 (at 0x9000)")
    assert news.is_news("the disk is full")
    assert not news.is_news("raylet 1 ended in /tmp/pichak-ray-1 (at 0x1)")
    now[0] = AGAIN_SECONDS
    assert news.is_news("the disk is full")
    assert not news.is_news("the disk is full")
    news.forget()
    assert news.is_news("the disk is full")


def test_a_problem_is_said_when_it_arises_and_when_it_is_back(tmp_path: Path) -> None:
    said: list[str] = []
    voice = Voice(ServiceState("n", "h:1", 1, 0.0), ServiceFiles("n", tmp_path), said.append)
    for told in (["a", "b"], ["b", "a"], ["a"], ["a", "b"]):
        voice.mention(told)
    assert said == ["problem: a", "problem: b", "problem: b"]


def test_readings_that_cannot_be_kept_are_told_as_everything_else(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "telemetry").write_text("in the way")
        running = place.service()
        place.wait_for("cannot be kept in")
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        lines = place.said("service.log").splitlines()
        assert all(line.startswith("pichak: ") for line in lines)
        (told,) = (line for line in lines if "cannot be kept in" in line)
        assert "so none are taken: let this user write there, or set PICHAK_HOME" in told
