"""Whether the head's door opens, asked without waiting for the answer."""

from __future__ import annotations

import socket
import threading

#: Seconds that a door may take to open.
CONNECT_SECONDS = 3.0


class Knock:
    """One knock at HOST:PORT, in a thread of its own: a name server that does not answer would hold
    up everything else, the end of the service too."""

    def __init__(self, address: str) -> None:
        self._answer: str | None = None
        thread = threading.Thread(target=self._run, args=(address,), name="knock", daemon=True)
        thread.start()

    @property
    def answer(self) -> str | None:
        """None as long as nothing is known, else what `knock` gives."""
        return self._answer

    def _run(self, address: str) -> None:
        self._answer = knock(address)


def knock(address: str) -> str:
    """ "" when something listens at HOST:PORT, else the sentence that says why not."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is no name"
        return f"the head's name {host} is not known here ({why})"
    except TimeoutError:
        return f"no answer from the head at {address} within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"the head at {address} does not answer ({error.strerror or error})"
    return ""
