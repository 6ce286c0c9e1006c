"""Build a small real corpus from what every Python installation holds.

Each row is the signature of a documented function, method or class of the standard library
(prompt) and its docstring (completion). The sources are parsed, never imported, so that nothing
runs. The same Python version, seed and size give the same file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import platform
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DEFAULT_ROWS = 2000

#: Folders of the library that hold tests, other people's packages, or data that looks like code.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
)
_MIN_CHARACTERS = 20

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Pair(NamedTuple):
    """One row: a signature and the docstring that belongs to it."""

    prompt: str
    completion: str


def source_files(library: Path) -> list[Path]:
    """The library's modules in a fixed order, without tests and installed packages."""
    found = (
        path
        for path in library.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(library).parts)
    )
    return sorted(found, key=lambda path: path.relative_to(library).as_posix())


def documented(source: str, module: str) -> Iterator[Pair]:
    """A pair for each documented definition in `source`, in its order.

    Raises `SyntaxError` or `ValueError` when `source` is not Python of this version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        tree = ast.parse(source)
    yield from _walk(tree, module, "")


def _walk(node: ast.AST, module: str, outer: str) -> Iterator[Pair]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Documented):
            continue
        text = ast.get_docstring(child, clean=False)
        if text and len(text.strip()) >= _MIN_CHARACTERS:
            where = f"{module}.{outer}".rstrip(".")
            yield Pair(f"# {where}\n{_signature(child)}\n", inspect.cleandoc(text))
        yield from _walk(child, module, f"{outer}{child.name}.")


def _signature(node: Documented) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in (*node.bases, *node.keywords))
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"


def collect(library: Path) -> tuple[list[Pair], int]:
    """(every pair of the library without repeats, the number of modules read)."""
    pairs: dict[Pair, None] = {}
    modules = 0
    for path in source_files(library):
        parts = path.relative_to(library).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            pairs |= dict.fromkeys(documented(path.read_text(encoding="utf-8"), module))
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue  # another encoding, or code that is broken on purpose
        modules += 1
    return list(pairs), modules


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus and print one line about it; 2 when there is nothing to build it from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rows", type=int, default=DEFAULT_ROWS, help="rows to write (%(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON Lines file to write")
    parser.add_argument("--seed", type=int, default=0, help="which rows, in which order (0)")
    options = parser.parse_args(argv)
    if options.rows < 1:
        parser.error(f"--rows {options.rows}: give at least 1")
    library = Path(sysconfig.get_path("stdlib"))
    pairs, modules = collect(library)
    if not pairs:
        print(
            f"build_corpus: no documented sources under {library}: "
            "this Python comes without its .py files, use another one",
            file=sys.stderr,
        )
        return 2
    chosen = random.Random(options.seed).sample(pairs, min(options.rows, len(pairs)))
    lines = [json.dumps(pair._asdict(), ensure_ascii=False) + "\n" for pair in chosen]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(lines).encode("utf-8", "replace")
    options.out.write_bytes(data)
    print(
        f"{len(chosen):,} rows ({len(data) / 1e6:.1f} MB) of {len(pairs):,} documented definitions "
        f"in {modules:,} modules of Python {platform.python_version()}, seed {options.seed}: "
        f"{options.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
