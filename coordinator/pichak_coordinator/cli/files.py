"""Files that commands are given, checked before anything is done with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pichak_coordinator.cli.common import UserError


class FileName(click.Path):
    """A file that a command writes. A name that ends as a folder's does is refused: `Path` would
    drop that end, and write a file in the folder's place."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = os.fspath(value)
        option = param.opts[0] if param is not None else "the file"
        if not text:
            raise UserError(f"{option} is empty; name a file")
        if not Path(text).name or text.replace(os.sep, "/").rpartition("/")[2] in ("", ".", ".."):
            raise UserError(f"{option} {text}: that is the name of a folder; name a file in it")
        return super().convert(value, param, ctx)


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
