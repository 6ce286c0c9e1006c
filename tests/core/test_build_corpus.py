"""The corpus script: what it takes from Python sources, and that a seed fixes the file."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pichak_core.tune.corpus import profile_corpus

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_corpus.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_corpus_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_signatures_and_docstrings(script):
    source = '''
raise SystemExit("importing this would end the program")

class A(B, metaclass=M):
    """A class with a docstring.

    Indented.
    """
    async def f(self, x: int = 3, *, y=None) -> str:
        """What f does, at length."""
        def inner(z):
            """What inner does, at length."""

def short():
    """Short."""

def none(): pass
'''
    assert list(script.documented(source, "m")) == [
        ("# m\nclass A(B, metaclass=M):\n", "A class with a docstring.\n\nIndented."),
        (
            "# m.A\nasync def f(self, x: int=3, *, y=None) -> str:\n",
            "What f does, at length.",
        ),
        ("# m.A.f\ndef inner(z):\n", "What inner does, at length."),
    ]


def test_tests_and_other_peoples_packages_are_left_out(script, tmp_path):
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "site-packages/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('def f():\n    """Long enough to be taken."""\n')
    files = [path.relative_to(tmp_path).as_posix() for path in script.source_files(tmp_path)]
    assert files == ["a/c.py", "b.py"]
    (tmp_path / "bad.py").write_bytes(b"def f(:\n")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""\n')
    pairs, modules = script.collect(tmp_path)
    assert (len(pairs), modules) == (2, 2)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The file and what was printed, from a process of its own."""
    out = tmp_path_factory.mktemp("corpus") / "new" / "train.jsonl"
    command = [sys.executable, "-I", str(SCRIPT), "--rows", "150", "--out", str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, check=True)


def test_another_process_collects_the_same_in_the_same_order():
    # The hashes of strings differ between the two, so an order that came from a set would too.
    library = Path(sysconfig.get_path("stdlib")) / "email"
    code = f"""if True:
        import runpy, json, pathlib
        pairs, _ = runpy.run_path({str(SCRIPT)!r})["collect"](pathlib.Path({str(library)!r}))
        print(json.dumps(pairs))"""
    one, two = (
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    )
    assert one == two
    assert len(json.loads(one)) > 100


def test_the_seed_decides_which_rows(script, tmp_path, monkeypatch):
    pairs = [script.Pair(f"# m\ndef f{i}():\n", f"Text {i}.") for i in range(100)]
    monkeypatch.setattr(script, "collect", lambda library: (pairs, 1))
    files = []
    for number, seed in enumerate((0, 0, 1)):
        out = tmp_path / str(number)
        script.main(["--rows", "20", "--seed", str(seed), "--out", str(out)])
        files.append(out.read_text().splitlines())
    assert files[0] == files[1] != files[2]
    assert [len(set(lines)) for lines in files] == [20, 20, 20]


def test_one_line_says_what_was_built(built):
    out, made = built
    assert made.stdout.startswith("150 rows (")
    assert made.stdout.count("\n") == 1
    assert str(out) in made.stdout
    assert made.stderr == ""


def test_rows_are_real(built):
    """Each row's docstring stands in the module that its prompt names."""
    library = Path(sysconfig.get_path("stdlib"))
    rows = [json.loads(line) for line in built[0].read_text("utf-8").splitlines()]
    assert len(rows) == len({tuple(row.values()) for row in rows}) == 150
    for row in rows[:10]:
        names = row["prompt"].split("\n")[0].removeprefix("# ").split(".")
        bases = [library.joinpath(*names[: i + 1]) for i in range(len(names))]
        options = [p for b in bases for p in (b.with_suffix(".py"), b / "__init__.py")]
        nodes = [
            node
            for path in options
            if path.is_file()
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        assert row["completion"] in {ast.get_docstring(node) for node in nodes}


def test_the_profile_reads_it(built):
    made = profile_corpus(built[0], "bytes")
    assert (made.rows_total, made.detected_format) == (150, "prompt_completion")
    assert made.defects == {}


def test_a_library_without_sources_is_a_sentence(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    assert script.main(["--out", str(tmp_path / "x.jsonl")]) == 2
    assert "no documented sources" in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def test_no_rows_is_refused(script, tmp_path):
    with pytest.raises(SystemExit):
        script.main(["--rows", "0", "--out", str(tmp_path / "x")])
