"""``pichak export``: stored history as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pichak_coordinator.cli.common import EXIT_DONE, UserError, examples, json_option, print_json
from pichak_coordinator.cli.files import FileName, check_out
from pichak_coordinator.cli.options import open_store, store_option


@click.command(
    epilog=examples(
        "pichak export --all --out history.mpk",
        "pichak export 20261130T0912 --out friday.mpk",
        "pichak import history.mpk                on the other machine",
    )
)
@click.argument("runs", nargs=-1, metavar="[RUN...]")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every run, results of no run, and what a watch told and remembers.",
)
@click.option(
    "--out",
    "file",
    required=True,
    type=FileName(path_type=Path),
    metavar="FILE",
    help="Where to.",
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@store_option
@json_option
def export(
    runs: Sequence[str],
    everything: bool,
    file: Path,
    force: bool,
    store_path: Path | None,
    as_json: bool,
) -> int:
    """Write stored RUNs (ids, their beginnings, or names) to a FILE, for another machine's history.

    Nodes keep their identity and results the bytes that the nodes produced; importing the file
    twice, or files that overlap, changes nothing the second time. Of a watch, with --all, its
    events travel and what it remembers of each device; its schedule and what its webhook has not
    taken yet stay behind.
    """
    from pichak_coordinator.cli.run_choice import chosen_run
    from pichak_coordinator.framed_file import FramedFileError
    from pichak_coordinator.history_file import export_history

    if bool(runs) == everything:
        raise UserError("name the RUNs (`pichak fleet history` lists them), or say --all")
    check_out(file, force)
    with open_store(store_path, read_only=True) as store:
        if file.exists() and file.samefile(store.path):
            raise UserError(f"{file} is the history itself; name another file")
        known = store.runs()
        chosen = list(dict.fromkeys(chosen_run(known, name) for name in runs))
        try:
            rows = export_history(store, file, None if everything else chosen, replace=force)
        except FramedFileError as error:
            raise UserError(str(error)) from error
    if as_json:
        print_json({"schema": 1, "file": str(file), "bytes": file.stat().st_size, "rows": rows})
    else:
        click.echo(
            f"{rows['runs']} runs with {rows['outcomes']} results of {rows['nodes']} nodes written "
            f"to {file} ({file.stat().st_size:,} bytes)"
        )
        if rows["watch_events"] or rows["watch_devices"]:
            click.echo(
                f"with {rows['watch_events']:,} events of a watch and what it remembers of "
                f"{rows['watch_devices']:,} devices; its schedule stays: a watch elsewhere makes "
                "its own"
            )
    return EXIT_DONE
