"""For every test: Ray clusters with a token, and torch on one thread, so that tests which run
beside each other do not fight.

Two OpenMP pools on the same cores wait for each other by spinning, which makes small steps ten
times slower and more.
"""

from __future__ import annotations

import os
import secrets
import signal

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ray.cluster_utils` starts clusters that ask for no token, unless the environment says so.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# What a shell starts in the background ignores these, and so would whatever a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("timeless", deadline=None)
hypothesis.settings.load_profile("timeless")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real clusters first: they are the longest, and nothing should wait for them alone
    at the end where two workers share the files."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
