"""One agent service a machine, whatever its home and its user.

The claim is a name in Linux's abstract space for sockets: it needs no folder that every user may
write, and it ends with its process, however that dies. Such names belong to a network namespace, so
a container with a network of its own is a machine of its own, and several on the host's are one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from pichak_core.devices.host import IS_LINUX
from pichak_core.devices.processes import user_name

NAME = "pichak-agent-service"
#: For the holder to answer, who looks up twice a second.
_ANSWER_SECONDS = 2.0
_MOST_BYTES = 8192
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Holder:
    """Who has the machine. `pid` is 0 where this process cannot see it, `home` "" where it did not
    say; what the kernel says of it is true, its home is its own word."""

    pid: int
    user: str
    home: str = ""

    @property
    def sentence(self) -> str:
        """For a person."""
        who = f"pid {self.pid}" if self.pid else "a process that is not seen from here"
        return f"{who}, user {self.user}" + (f", home {self.home}" if self.home else "")


class MachineClaim:
    """This process's claim, from `take` to `release`."""

    def __init__(self, home: Path, name: str = "") -> None:
        self._name, self._home = name or NAME, home
        self._socket: socket.socket | None = None

    def take(self) -> bool:
        """Whether nobody else has it. Where the system has no such names, nobody can have it."""
        if not IS_LINUX:
            return True
        made: socket.socket | None = None
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.bind(f"\0{self._name}")
            made.listen(16)
        except OSError as error:
            if made is not None:
                made.close()
            return error.errno != errno.EADDRINUSE
        made.setblocking(False)
        self._socket = made
        return True

    def answer(self) -> None:
        """Tell whoever asks where this agent keeps things; to be called now and then."""
        while self._socket is not None:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.setblocking(False)
                caller.send(json.dumps({"home": str(self._home)}).encode())

    def release(self) -> None:
        """Give it back; nothing where it is not held."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def stranger(home: Path, name: str = "") -> Holder | None:
    """Who has this machine, where that is an agent of another home than `home`: no lock keeps its
    jobs and those of `home` apart."""
    found = holder(name)
    return None if found is None or found.home == str(home.absolute()) else found


def holder(name: str = "") -> Holder | None:
    """Who has this machine; None where nobody does, or nobody can be asked."""
    if not IS_LINUX:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(_ANSWER_SECONDS)
            channel.connect(f"\0{name or NAME}")
            size = _CREDENTIALS.size
            said = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            pid, uid, _ = _CREDENTIALS.unpack(said)
            return Holder(pid, user_name(uid), _home(channel))
    except OSError:
        return None


def _home(channel: socket.socket) -> str:
    try:
        told = json.loads(channel.recv(_MOST_BYTES))
        home = told["home"]
    # A holder that is busy does not answer in time, and one that is no agent says anything.
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return home if isinstance(home, str) and Path(home).is_absolute() else ""
