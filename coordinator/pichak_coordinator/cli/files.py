"""Files that commands are given, checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pichak_coordinator.cli.common import UserError


def check_out(file: Path, force: bool) -> None:
    """``--out``: `UserError` where the file cannot be made, before the work that would fill it."""
    from pichak_coordinator.framed_file import FramedFileError, check_place

    try:
        check_place(file, replace=force)
    except FramedFileError as error:
        raise UserError(str(error)) from error


@contextmanager
def told_of_host(file: Path) -> Iterator[None]:
    """``--simulate``: what is wrong with the file of a host, as `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--simulate {file}: it cannot be read ({error.strerror or error}); name the TOML file "
            "of a simulated host"
        ) from error
    except ValueError as error:
        raise UserError(f"--simulate {error}") from error
