"""For every test: Ray clusters with a token, and torch on one thread, so that tests which run
beside each other do not fight.

Two OpenMP pools on the same cores wait for each other by spinning, which makes small steps ten
times slower and more.
"""

from __future__ import annotations

import os
import secrets

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ray.cluster_utils` starts clusters that ask for no token, unless the environment says so.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real clusters first: they are the longest, and nothing should wait for them alone
    at the end where two workers share the files."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
