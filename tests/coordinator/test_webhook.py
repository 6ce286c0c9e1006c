"""The webhook against a real HTTP server: signed by another program's measure, tried again, never
lost, and its secrets nowhere to be read."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pichak_coordinator import webhook as webhook_module
from pichak_coordinator.watch_store import WatchStore
from pichak_coordinator.webhook import Sender, Webhook, WebhookError, read_secret, retry_seconds

SECRET = b"correct horse"


@dataclass
class Receiver:
    """Answers with `codes` in turn, then 200; 0 hangs. `got`: (path, headers, body)."""

    port: int
    codes: list[int] = field(default_factory=list)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/T0KEN?key=K3Y"

    def ids(self) -> list[str]:
        return [json.loads(body)["id"] for _, _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append((self.path, dict(self.headers), body))
            code = made.codes.pop(0) if made.codes else 200
            if code == 0:
                made.release.wait(20)
                return
            self.send_response(code)
            if code in (301, 302, 307, 308):
                self.send_header("Location", f"http://127.0.0.1:{made.port}/elsewhere")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WatchStore]:
    with WatchStore.open(tmp_path / "fleet.db") as made:
        yield made


def tell(store: WatchStore, count: int) -> list[str]:
    events = [({"event": "confirmed", "text": f"fault {i} → told"}, True) for i in range(count)]
    return [record["id"] for record in store.tell(events)]


def sending(
    store: WatchStore, url: str, until: Callable[[], bool], seconds: float = 15
) -> list[str]:
    said: list[str] = []
    quick = Sender(Webhook(url, SECRET), store, said.append, time.time, wait=lambda _: 0.05)
    with quick:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, said
            time.sleep(0.01)
    return said


def test_the_signature_is_what_openssl_makes_of_the_secret(
    receiver: Receiver, store: WatchStore
) -> None:
    ids = tell(store, 1)
    sending(store, receiver.url, lambda: store.pending_deliveries() == 0)
    ((path, headers, body),) = receiver.got
    assert path == "/hook/T0KEN?key=K3Y"
    record = json.loads(body)
    assert record["id"] == ids[0] == headers["X-Pichak-Event"]
    assert (record["event"], record["text"]) == ("confirmed", "fault 0 → told")
    signed = headers["X-Pichak-Timestamp"].encode() + b"." + body
    made = subprocess.run(
        ["openssl", "dgst", "-sha256", "-hmac", SECRET.decode()],
        input=signed, capture_output=True, check=True,
    ).stdout.split()[-1].decode()  # fmt: skip
    assert headers["X-Pichak-Signature"] == f"sha256={made}"
    assert abs(int(headers["X-Pichak-Timestamp"]) - time.time()) < 60
    assert SECRET not in body


def test_a_server_that_fails_twice_gets_every_event_in_order_and_none_twice_knowingly(
    receiver: Receiver, store: WatchStore
) -> None:
    receiver.codes = [500, 503]
    ids = tell(store, 3)
    said = sending(store, receiver.url, lambda: store.pending_deliveries() == 0)
    assert receiver.ids() == [ids[0], ids[0], ids[0], ids[1], ids[2]]
    bodies = [body for _, _, body in receiver.got]
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(said) == 2  # once that it fails, once that it works again
    assert "answered 500" in said[0]
    assert "again" in said[1]
    assert {event["delivery"] for event in store.events()} == {"sent"}


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(code: int, receiver: Receiver, store: WatchStore) -> None:
    receiver.codes = [code]
    tell(store, 1)
    said = sending(store, receiver.url, lambda: store.pending_deliveries() == 0)
    assert {path for path, _, _ in receiver.got} == {"/hook/T0KEN?key=K3Y"}
    assert str(code) in said[0]


def test_a_server_that_hangs_is_left_and_asked_again(
    receiver: Receiver, store: WatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "TIMEOUT_SECONDS", 0.3)
    receiver.codes = [0]
    ids = tell(store, 1)
    said = sending(store, receiver.url, lambda: store.pending_deliveries() == 0)
    # On a busy machine the second answer may be late too.
    assert len(receiver.got) >= 2
    assert set(receiver.ids()) == {ids[0]}
    assert "did not answer within 0.3 s" in said[0]


def test_events_wait_in_the_store_until_somebody_listens(
    receiver: Receiver, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.db"
    with WatchStore.open(path) as store:
        ids = tell(store, 2)
        receiver.codes = [500] * 50
        said = sending(store, receiver.url, lambda: len(receiver.got) >= 2)
        assert said
        assert store.pending_deliveries() == 2
    # The process is gone; another one, with another watch, sends them.
    receiver.codes, receiver.got = [], []
    with WatchStore.open(path) as store:
        sending(store, receiver.url, lambda: store.pending_deliveries() == 0)
    assert receiver.ids() == ids


def test_a_url_that_nobody_answers_and_its_secrets_stay_out_of_every_message(
    tmp_path: Path, store: WatchStore
) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://user:p4ss@127.0.0.1:{port}/T0KEN?key=K3Y"
    tell(store, 1)
    said = sending(store, url, lambda: "pending" in {e["delivery"] for e in store.events()})
    hook = Webhook(url, SECRET)
    shown = [*said, repr(hook), str(hook), hook.shown, hook.send("e", b"{}", 0.0)]
    assert hook.shown == f"http://127.0.0.1:{port}/…"
    for text in shown:
        assert not any(word in text for word in ("p4ss", "T0KEN", "K3Y", "correct", "user")), text
    kept = (tmp_path / "fleet.db").read_bytes() + (tmp_path / "fleet.db-wal").read_bytes()
    assert not any(word in kept for word in (b"p4ss", b"T0KEN", b"K3Y", b"correct horse"))


def test_credentials_of_the_url_go_into_their_header(receiver: Receiver) -> None:
    url = f"http://me%40x:p%3Aw@127.0.0.1:{receiver.port}/a"
    assert Webhook(url).send("e1", b"{}", 5.0) == ""
    ((path, headers, _),) = receiver.got
    assert path == "/a"
    assert base64.b64decode(headers["Authorization"].split()[1]) == b"me@x:p:w"
    assert "@" not in headers["Host"]
    assert "X-Pichak-Signature" not in headers  # no secret was given


def test_an_event_is_given_up_after_a_week(store: WatchStore, receiver: Receiver) -> None:
    receiver.codes = [500] * 3
    (event,) = tell(store, 1)
    said: list[str] = []
    sender = Sender(
        Webhook(receiver.url, SECRET), store, said.append, lambda: time.time() + 8 * 86400
    )
    assert sender.try_one()
    assert [e["delivery"] for e in store.events()] == ["given up"]
    assert event in said[0]


def test_waits_grow_and_are_bounded() -> None:
    waits = [retry_seconds(n) for n in (1, 2, 3, 8, 1000)]
    assert waits == [5.0, 10.0, 20.0, 600.0, 600.0]


@pytest.mark.parametrize(
    "url",
    ["", "hooks.example.com", "ftp://x/", "http://", "https://x:y/", "http://x/a b", "http://ü/"],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(WebhookError, match="--webhook"):
        Webhook(url)


def test_a_secret_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"abc\n")
    (tmp_path / "empty").write_bytes(b"\n")
    assert read_secret(tmp_path / "key") == b"abc"
    for name, why in (("empty", "is empty"), ("none", "No such file")):
        with pytest.raises(WebhookError, match=why):
            read_secret(tmp_path / name)
