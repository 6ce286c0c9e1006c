"""For every test: torch on one thread, so that tests which run beside each other do not fight.

Two OpenMP pools on the same cores wait for each other by spinning, which makes small steps ten
times slower and more.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
