"""The rows of the five tasks: from the standard library, two Debian packages, and a generator."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import itertools
import platform
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIBRARY = Path(sysconfig.get_path("stdlib"))

#: Lengths in characters: of the shortest row of prose or code, and of the longest row of prose.
SHORTEST, LONGEST_PROSE = 60, 1_000

Row = dict[str, str]


class Corpus(NamedTuple):
    """Rows without repeats, and where they come from, with its version."""

    rows: list[Row]
    origin: str


_ESCAPES = (
    (re.compile(r"\\f(\[[^]]*\]|\(..|.)"), ""),  # fonts
    (re.compile(r"\\\*?\((lq|rq|co|cq|dq|aq|oq)"), '"'),
    (re.compile(r"\\(\(|\[)(en|em|mi)\]?"), "-"),
    (re.compile(r"\\[/,&%:|^]"), ""),  # italic corrections and zero-width marks
    (re.compile(r"\\-"), "-"),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\e"), r"\\"),
    (re.compile(r'\\".*'), ""),
    (re.compile(r"\\\(.{2}|\\\[[^]]*\]|\\\*(\(..|.)"), ""),  # other special characters
)
_TWO_FONTS = frozenset(("BR", "BI", "RB", "RI", "IB", "IR"))
_STYLED = _TWO_FONTS | {"B", "I", "SM", "SB"}
_SKIPPED_BLOCKS = {"nf": "fi", "EX": "EE", "TS": "TE", "de": "."}


class NoPackageError(RuntimeError):
    """A Debian package cannot be had here: which, and what to do."""


def docstrings() -> Corpus:
    """Signature and documentation, as `scripts/build_corpus.py` has them; the answer is scored."""
    pairs, _ = _build_corpus().collect(LIBRARY)
    rows = [{"prompt": pair.prompt, "completion": pair.completion} for pair in pairs]
    return Corpus(rows, _library())


def python_code() -> Corpus:
    """The source of every function and method of the standard library, as plain text."""
    texts: dict[str, None] = {}
    for path in _build_corpus().source_files(LIBRARY):
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue  # another encoding, or code that is broken on purpose
        lines = source.splitlines(keepends=True)
        for node in _functions(tree):
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            if len(text) >= SHORTEST:
                texts.setdefault(text)
    return Corpus([{"text": text} for text in texts], _library())


def english_prose() -> Corpus:
    """Paragraphs of the English manual pages, from the Debian package `manpages`."""
    return _manual("manpages", "usr/share/man/man*")


def ukrainian_prose() -> Corpus:
    """Paragraphs of the Ukrainian manual pages, from the Debian package `manpages-uk`."""
    return _manual("manpages-uk", "usr/share/man/uk/man*")


def deductions(count: int = 6_000, seed: int = 5) -> Corpus:
    """Chains of "all … are …" and a conclusion; the one-byte answer is T or F, half of each."""
    draw = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        kinds = draw.sample(_KINDS, 4)
        name = draw.choice(_NAMES)
        facts = [f"All {a}s are {b}s." for a, b in itertools.pairwise(kinds)]
        start = draw.randrange(3)
        holds = draw.random() < 0.5
        # False conclusions name a kind before the start of the chain or one outside of it.
        others = [*kinds[:start], draw.choice([kind for kind in _KINDS if kind not in kinds])]
        end = draw.choice(kinds[start + 1 :] if holds else others)
        draw.shuffle(facts)
        prompt = f"{' '.join(facts)} {name} is a {kinds[start]}. {name} is a {end}? "
        rows.setdefault(prompt, {"prompt": prompt, "completion": "T" if holds else "F"})
    return Corpus(list(rows.values()), f"generated, seed {seed}")


#: By the name in the result. The first four score many tokens a row, the last a single one.
TASKS: dict[str, Callable[[], Corpus]] = {
    "docstring question/answer": docstrings,
    "Python code": python_code,
    "English prose": english_prose,
    "Ukrainian prose": ukrainian_prose,
    "True/False deductions": deductions,
}

_NAMES = ("Ada", "Bo", "Cem", "Dara", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jun", "Kai", "Lea")
_KINDS = (
    *("wug", "dax", "blick", "fep", "toma", "zup", "gorp", "lant", "mib"),
    *("nerg", "pim", "quon", "rell", "sorv", "tiv", "vash", "yeck", "zorn"),
)


@cache
def _build_corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_corpus", SCRIPTS / "build_corpus.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_corpus"] = module
    spec.loader.exec_module(module)
    return module


def _library() -> str:
    return f"standard library of Python {platform.python_version()}"


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, without those inside another function: rows do not overlap."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from _functions(child)


def _manual(package: str, pages: str) -> Corpus:
    texts: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        root, version = unpacked(package, Path(folder))
        for path in sorted(root.glob(f"{pages}/*.gz")):
            if not path.is_symlink():
                source = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
                texts |= dict.fromkeys(paragraphs(source))
    if not texts:
        raise NoPackageError(f"package {package} holds no manual page under {pages}")
    return Corpus([{"text": text} for text in texts], f"Debian package {package} {version}")


def unpacked(package: str, folder: Path) -> tuple[Path, str]:
    """Download the Debian package and unpack it under `folder`: (root of its files, version).

    Nothing is installed. `NoPackageError` when it cannot be had.
    """
    try:
        subprocess.run(
            ["apt-get", "download", package], cwd=folder, check=True, capture_output=True, text=True
        )
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg", "-x", archive.name, "unpacked"], cwd=folder, check=True)
    except FileNotFoundError as error:
        raise NoPackageError(
            f"package {package}: {error.filename} is not on this machine; run this on Debian or "
            "Ubuntu, or in a container of theirs"
        ) from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        raise NoPackageError(
            f"package {package} could not be downloaded ({said[-1] if said else error}); "
            "run apt-get update, and check that the mirror can be reached"
        ) from error
    return folder / "unpacked", archive.name.split("_")[1]


def paragraphs(source: str) -> Iterator[str]:
    """The prose of a manual page in man(7) macros: its paragraphs without markup, tables, code."""
    words: list[str] = []
    until = ""
    for line in source.splitlines():
        macro = re.match(r"[.']\s*([A-Za-z]+|\.|\\\")?(.*)", line)
        name, rest = (macro.group(1) or "", macro.group(2).strip()) if macro else ("", "")
        if until:
            until = "" if name == until else until
        elif not macro and line.strip():
            words += plain(line).split()
        elif name in _STYLED:
            # .BR and its like set words of two fonts side by side, .B and .I keep their spaces
            joined = "" if name in _TWO_FONTS else " "
            words += joined.join(re.findall(r'"[^"]*"|\S+', plain(rest))).replace('"', "").split()
        elif name != '\\"':
            until = _SKIPPED_BLOCKS.get(name, "")
            yield from _prose(words)
            words = []
    yield from _prose(words)


def _prose(words: list[str]) -> Iterator[str]:
    text = " ".join(words)
    if SHORTEST <= len(text) <= LONGEST_PROSE and text[-1] in ".:!?":
        yield text


def plain(line: str) -> str:
    """A line of text without its roff escapes."""
    for pattern, replacement in _ESCAPES:
        line = pattern.sub(replacement, line)
    return line
