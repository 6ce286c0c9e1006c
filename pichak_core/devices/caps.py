"""The memory caps that this process set for itself, by device.

The driver knows nothing of them: free memory is the card's, whatever a process forbids itself.
"""

from __future__ import annotations

_CAPS: dict[str, int] = {}


def remember_cap(device: str, cap_bytes: int | None) -> None:
    """Keep the cap of a resolved device ("cuda:0", "cpu"), or forget it with None.

    `ValueError` for a cap that leaves nothing.
    """
    if cap_bytes is None:
        _CAPS.pop(device, None)
        return
    if cap_bytes <= 0:
        raise ValueError(f"a cap of {cap_bytes} bytes on {device} leaves nothing to allocate")
    _CAPS[device] = cap_bytes


def cap_of(device: str) -> int | None:
    """The cap in bytes, None when there is none."""
    return _CAPS.get(device)
