"""Events sent to a URL: signed, one after the other, tried again until they are taken.

At least once: an event is marked as sent after the answer has come, so that an end in between sends
it again, with the same ``id``. Redirects are not followed. Neither secret nor credentials nor the
path of the URL (which with many services *is* the secret) are ever in a message.

A receiver checks ``X-Pichak-Signature: sha256=HEX``: the HMAC-SHA256, keyed with the secret, of the
``X-Pichak-Timestamp`` header, a full stop, and the body as it came.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from pichak_coordinator.watch_store import WatchStore
from pichak_core.small_file import read_small

TIMEOUT_SECONDS = 10.0
FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 600.0
#: An event that nobody took for so long is given up, and that is said.
GIVE_UP_SECONDS = 7 * 86400.0
_LOOK_SECONDS = 1.0


class WebhookError(ValueError):
    """A webhook that cannot be used: what is wrong, without its secrets."""


@dataclass(frozen=True)
class Webhook:
    """Where events go. Shown (also by `repr`) it is scheme, host and port alone."""

    url: str = field(repr=False)
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise WebhookError("--webhook: the URL's port is not a number") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise WebhookError("--webhook: write a URL that begins with https:// or http://")
        if not self.url.isascii() or any(c.isspace() for c in self.url):
            raise WebhookError("--webhook: the URL holds characters that must be written as %XX")

    @property
    def shown(self) -> str:
        """What may be printed of the URL."""
        parts = urlsplit(self.url)
        path = "/…" if parts.path.strip("/") or parts.query else ""
        return f"{parts.scheme}://{_place(parts)}{path}"

    def signature(self, timestamp: str, body: bytes) -> str:
        """The value of ``X-Pichak-Signature``."""
        digest = hmac.new(self.secret, timestamp.encode() + b"." + body, hashlib.sha256)
        return f"sha256={digest.hexdigest()}"

    def send(self, event: str, body: bytes, now: float) -> str:
        """POST it once; "" when it was taken (2xx), else why not, in a sentence."""
        parts = urlsplit(self.url)
        stamp = str(int(now))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "pichak-fleet",
            "X-Pichak-Event": event,
            "X-Pichak-Timestamp": stamp,
        }
        if self.secret:
            headers["X-Pichak-Signature"] = self.signature(stamp, body)
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        target = urlunsplit((parts.scheme, _place(parts), parts.path or "/", parts.query, ""))
        request = urllib.request.Request(target, body, headers, method="POST")  # noqa: S310
        opener = urllib.request.build_opener(_NoRedirects)
        try:
            opener.open(request, timeout=TIMEOUT_SECONDS).close()
            return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"{self.shown} answered {error.code}"
        except TimeoutError:
            return f"{self.shown} did not answer within {TIMEOUT_SECONDS:g} s"
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                return f"{self.shown} did not answer within {TIMEOUT_SECONDS:g} s"
            return f"{self.shown} could not be reached ({_kind(error.reason)})"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{self.shown} gave no sound answer ({_kind(error)})"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A body that was signed for one place is not carried to another."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _place(parts: SplitResult) -> str:
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port}" if parts.port else host


def _kind(error: object) -> str:
    """An error without its text, which may repeat the URL."""
    if (
        isinstance(error, OSError)
        and error.strerror
        and not isinstance(error, urllib.error.URLError)
    ):
        return error.strerror
    return type(error).__name__


def read_secret(path: Path) -> bytes:
    """The secret in a file, without the space around it; `WebhookError` when there is none."""
    try:
        secret = read_small(path).strip()
    except OSError as error:
        raise WebhookError(f"--webhook-secret-file {path}: {error.strerror}") from error
    if not secret:
        raise WebhookError(f"--webhook-secret-file {path}: the file is empty")
    return secret


def retry_seconds(attempts: int) -> float:
    """The wait after the `attempts`-th failure in a row (1, 2, …): 5 s, doubled up to 10 min."""
    return min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(attempts - 1, 30))


class Sender:
    """A thread that sends a store's pending events in their order, while used as a context manager.

    `say` is told when the webhook stops taking events and when it takes them again.
    """

    def __init__(
        self,
        webhook: Webhook,
        store: WatchStore,
        say: Callable[[str], None],
        clock: Callable[[], float],
        *,
        wait: Callable[[int], float] = retry_seconds,
    ) -> None:
        self._webhook, self._store, self._say, self._clock = webhook, store, say, clock
        self._wait = wait
        self._end = threading.Event()
        self._wake = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """One last try for each event that waits, then what is left stays for the next watch."""
        self._end.set()
        self._wake.set()
        self._thread.join(TIMEOUT_SECONDS + 5)

    def wake(self) -> None:
        """There is something new to send."""
        self._wake.set()

    def _run(self) -> None:
        while not self._end.is_set():
            while not self._end.is_set() and self.try_one():
                pass
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
        while self.try_one(failed_ends=True):
            pass

    def try_one(self, *, failed_ends: bool = False) -> bool:
        """Send the event that is due; whether there was one (with `failed_ends`: and it went)."""
        now = self._clock()
        due = self._store.next_delivery(now)
        if due is None:
            return False
        why = self._webhook.send(due.event, due.body.encode(), now)
        if not why:
            self._store.note_delivery(due.event, "sent")
            if self._failing:
                self._say(f"webhook: {self._webhook.shown} takes events again")
            self._failing = False
            return True
        if now - due.created_unix > GIVE_UP_SECONDS:
            self._store.note_delivery(due.event, "given up", error=why)
            self._say(f"webhook: event {due.event} is given up after a week: {why}")
            return True
        next_try = now + self._wait(due.attempts + 1)
        self._store.note_delivery(due.event, "pending", next_try=next_try, error=why)
        if not self._failing:
            self._say(f"webhook: {why}; events wait in the history and are sent again")
        self._failing = True
        return not failed_ends
