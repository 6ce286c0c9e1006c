"""Between a service and ``ray start``: ``python -m pichak_agent.ray_launcher PARENT ARG…``.

It has itself ended when the service `PARENT` dies, however that happens, and then becomes ``ray
start ARG…`` of this interpreter's own Ray.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from pichak_core.devices.processes import die_with_parent

#: Exit status when there is no such interpreter or no Ray in it.
NO_RAY = 127


def main(arguments: Sequence[str]) -> int:
    """Become ``ray start``."""
    die_with_parent(signal.SIGTERM, int(arguments[0]))
    argv = [*python(), "-m", "ray.scripts.scripts", "start", *arguments[1:]]
    try:
        os.execv(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error}\n")
    return NO_RAY


def python() -> list[str]:
    """This interpreter; from 3.11 on the current folder stays off its path."""
    return [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
