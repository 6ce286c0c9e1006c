"""``pichak import``: results and history that came as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pichak_coordinator.cli.common import (
    EXIT_DONE,
    EXIT_NOTHING,
    EXIT_USAGE,
    UserError,
    examples,
    json_option,
    out,
    print_json,
)
from pichak_coordinator.cli.options import open_store, store_option
from pichak_coordinator.text import printable

if TYPE_CHECKING:
    from pichak_coordinator.history_file import Added
    from pichak_coordinator.importing import Imported
    from pichak_coordinator.probe_file import Probe
    from pichak_coordinator.records import Row
    from pichak_coordinator.store import Store

_LONGEST_NAME = 64


@click.command(
    "import",
    epilog=examples(
        "pichak import gpu-a.mpk gpu-b.mpk        one run, one table",
        "pichak import *.mpk --run-name rented-friday",
        "pichak import --partial gpu-c.mpk.part   of a probe that was killed, or a copy that broke "
        "off",
        "pichak import history.mpk                what `pichak export` wrote elsewhere",
    ),
)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."
)
@click.option(
    "--run-name",
    default="",
    metavar="NAME",
    help="Name the run; files imported under the same name later join it.",
)
@click.option("--partial", is_flag=True, help="Take what is whole in a file that ends too early.")
@click.option("--sort", default="", help="Column to sort by [default: fastest first].")
@click.option("--plans", is_flag=True, help="Print each plan with its sources, too.")
@store_option
@json_option
def import_files(
    files: Sequence[Path],
    run_name: str,
    partial: bool,
    sort: str,
    plans: bool,
    store_path: Path | None,
    as_json: bool,
) -> int:
    """Put FILEs of `pichak agent probe` beside the others, and show the comparison.

    All files of one call become one run, so that their machines are compared and judged together;
    what was imported before is recognised and changes nothing. FILEs of `pichak export` bring their
    runs with them, and with --all what a watch told and remembers, but not over what the watch of
    this history remembers of a device. A file that cannot be believed is refused whole and the
    others are imported.
    """
    from pichak_coordinator.cli.run_view import comparison_of
    from pichak_coordinator.database import default_path

    comparison_of([], sort)
    if len(run_name) > _LONGEST_NAME or not run_name.isprintable():
        raise UserError(f"--run-name: at most {_LONGEST_NAME} printable characters")
    told: list[dict[str, Any]] = []
    probes, exports = _read(
        files, partial, told, thorough=not (store_path or default_path()).exists()
    )
    if not probes and not exports:  # a history that nothing goes into is not made
        if as_json:
            print_json({"schema": 1, "files": told})
        return EXIT_USAGE
    with open_store(store_path) as store:
        histories = _import_exports(store, exports, partial, told)
        imported = _import(store, probes, run_name, told)
        runs = {e.run for e in imported} | {run for h in histories for run in h.newest}
        rows, newest = _rows(store, runs)
        _present(store, told, rows, newest, sort, plans, as_json)
    if any(entry["error"] for entry in told):
        return EXIT_USAGE
    return EXIT_DONE if any(row.measured for row in rows) or not runs else EXIT_NOTHING


def _read(
    files: Sequence[Path], partial: bool, told: list[dict[str, Any]], *, thorough: bool
) -> tuple[list[tuple[Path, Probe]], list[Path]]:
    """The probes, and which files are histories; these are read to their end where it is
    `thorough`, for nothing but to see whether they can be."""
    from pichak_coordinator.framed_file import FramedFileError, read_frames
    from pichak_coordinator.history_file import is_history
    from pichak_coordinator.probe_file import read_probe

    probes: list[tuple[Path, Probe]] = []
    exports: list[Path] = []
    for file in files:
        try:
            if not is_history(file):
                probes.append((file, read_probe(file, partial=partial)))
                continue
            if thorough:
                for _ in read_frames(file, partial=partial):
                    pass
            exports.append(file)
        except FramedFileError as error:
            _refuse(file, error, told)
    return probes, exports


def _import_exports(
    store: Store, files: Sequence[Path], partial: bool, told: list[dict[str, Any]]
) -> list[Added]:
    """A history goes into the store at once."""
    from pichak_coordinator.framed_file import FramedFileError
    from pichak_coordinator.history_file import import_history

    made: list[Added] = []
    for file in files:
        try:
            added = import_history(store, file, partial=partial)
        except FramedFileError as error:
            _refuse(file, error, told)
            continue
        made.append(added)
        told.append({"file": str(file), **added.as_dict(), "error": None})
        _say(f"{file}: {added.sentence}")
    return made


def _refuse(file: Path, error: Exception, told: list[dict[str, Any]]) -> None:
    told.append({"file": str(file), "status": "refused", "error": str(error)})
    _say(f"pichak: {error}")


def _import(
    store: Store,
    probes: Sequence[tuple[Path, Probe]],
    run_name: str,
    told: list[dict[str, Any]],
) -> list[Imported]:
    from pichak_coordinator.importing import import_probes, summary

    made = import_probes(store, [probe for _, probe in probes], run_name)
    for (file, probe), entry in zip(probes, made, strict=True):
        told.append({"file": str(file), **summary(entry)})
        host = str(probe.hello.get("host") or entry.node)
        marks = [word for word in ("simulated", "interrupted") if getattr(probe, word)]
        marks += ["killed before it was done"] if probe.finished_unix is None else []
        name = f"{host} ({', '.join(marks)})" if marks else host
        count = f"{entry.new_outcomes} result{'' if entry.new_outcomes == 1 else 's'}"
        _say(
            {
                "new": f"{file}: {name}, {count}, in run {entry.run}",
                "extended": f"{file}: {name}, {count} more, in run {entry.run}",
                "known": f"{file}: {name}, imported before into run {entry.run}; nothing changed",
                "refused": f"pichak: {file}: {entry.error}; nothing of it was imported",
            }[entry.status]
        )
    return [entry for entry in made if entry.status != "refused"]


def _rows(store: Store, runs: set[str]) -> tuple[list[Row], str]:
    """The rows of these runs, each device as the newest of them has it; and the newest run."""
    from pichak_coordinator.assemble import told_apart

    ordered = [run.run for run in store.runs() if run.run in runs]
    rows: dict[tuple[str, str], Row] = {}
    for run in ordered:
        for row in store.rows_of(run):
            rows.setdefault(row.key, row)
    return told_apart(list(rows.values())), ordered[0] if ordered else ""


def _present(
    store: Store,
    told: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    newest: str,
    sort: str,
    plans: bool,
    as_json: bool,
) -> None:
    from pichak_coordinator.cli.run_view import print_run, run_as_dict

    if as_json:
        shown = run_as_dict(store, newest, rows, sort) if newest else {"schema": 1}
        print_json({**shown, "files": list(told)})
    elif newest:
        console = out()
        print_run(store, newest, rows, sort, console, plans=plans)
        console.print(f"kept as {newest} in {store.path}", soft_wrap=True, markup=False)


def _say(text: str) -> None:
    click.echo(printable(text), err=True)
