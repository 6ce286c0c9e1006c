"""Two TAP devices joined with a delay in one direction: ``relay.py FROM TO MILLISECONDS``.

Frames travel with their virtio header, so that bundles of segments stay bundled and a gigabit is
little work. What comes from the first device is held back, what goes to it is not.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_CSUM, _TSO4 = 0x01, 0x02
_FRAME = 70_000
#: Frames that may wait; more are dropped, as a router would.
_WAITING = 20_000


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PI | _VNET_HDR))
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", 10))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _CSUM | _TSO4)
    return fd


def drain(fd: int) -> list[bytes]:
    frames = []
    while len(frames) < 64:
        try:
            frames.append(os.read(fd, _FRAME))
        except (BlockingIOError, OSError):
            break
    return frames


def write(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except (BlockingIOError, OSError):
        return


def main() -> None:
    near, far, delay = tap(sys.argv[1]), tap(sys.argv[2]), float(sys.argv[3]) / 1e3
    held: deque[tuple[float, bytes]] = deque()
    selector = selectors.DefaultSelector()
    selector.register(near, selectors.EVENT_READ)
    selector.register(far, selectors.EVENT_READ)
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else 1.0
        for key, _ in selector.select(wait):
            for frame in drain(key.fd):
                if key.fd == far:
                    write(near, frame)
                elif len(held) < _WAITING:
                    held.append((time.monotonic() + delay, frame))
        now = time.monotonic()
        while held and held[0][0] <= now:
            write(far, held.popleft()[1])


if __name__ == "__main__":
    main()
