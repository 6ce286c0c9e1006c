"""Versions of what a result depends on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import pichak_core

_PACKAGES = ("torch", "ray")


@functools.cache
def own_versions() -> Mapping[str, str]:
    """``pichak``, ``python``, and ``torch`` and ``ray`` where they are installed; none of them is
    imported for it."""
    found = {"pichak": pichak_core.__version__, "python": python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except (PackageNotFoundError, OSError):
            continue
    return found
