"""The user's own workload file: what is loaded, and what is said of one that does not work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from pichak_core.workload import Settings, Workload, WorkloadError, open_workload

WHOLE = """
import torch

class Task:
    def __init__(self, settings):
        self.seq_len = settings.seq_len or 16
        self.data = settings.data
        self.weight = torch.ones(3, 2, requires_grad=True)
        self.tokenizer = lambda text: {"input_ids": list(text.encode())}
        self.closed = False

    @property
    def optimizer(self):
        return torch.optim.SGD([self.weight], lr=0.1)

    def loss_of(self, b):
        return b * self.weight.sum()

    def grad_fn(self, i):
        if i == 2:
            raise StopIteration
        return [self.weight.detach() * i], 5

    def named_weights(self):
        return [("weight", self.weight)]

    def adapter_shapes(self):
        return [self.weight.shape]

    def close(self):
        LOG.append("closed")

LOG = []

def build(settings):
    return Task(settings)
"""

BARE = """
class Task:
    optimizer = object()
    def loss_of(self, b):
        return b

def build(settings):
    return Task()
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return path


def opened(path: object, factory: str = "build", **settings: object) -> Workload:
    return open_workload(Settings(model=f"{path}:{factory}", **settings))  # type: ignore[arg-type]


def failure(path: object, factory: str = "build") -> str:
    with pytest.raises(WorkloadError) as caught:
        opened(path, factory)
    return str(caught.value)


def test_a_whole_task_gives_every_part(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = write(tmp_path, WHOLE)
    workload = opened(path, seq_len=64, data="rows.jsonl")
    assert workload.missing == {}
    assert (workload.seq_len, workload.data) == (64, "rows.jsonl")
    assert workload.name == f"{path}:build"
    assert workload.tokenizer is not None
    assert workload.tokenizer("ab") == {"input_ids": [97, 98]}
    assert float(workload.loss_of(4).detach()) == 24
    assert isinstance(workload.optimizer, torch.optim.SGD)
    gradients, tokens = workload.grad_fn(1)
    assert float(gradients[0].sum()) == 6
    assert tokens == 5
    with pytest.raises(StopIteration):
        workload.grad_fn(2)
    assert [name for name, _ in workload.named_weights()] == ["weight"]
    assert workload.adapter_shapes() == [(3, 2)]
    log = sys.modules[type(workload._task).__module__].LOG  # type: ignore[attr-defined]
    workload.close()
    assert log == ["closed"]


def test_left_out_parts_are_named_with_what_they_cost(tmp_path: Path) -> None:
    workload = opened(write(tmp_path, BARE))
    assert workload.loss_of(3) == 3
    assert workload.missing.keys() == {
        "data",
        "tokenizer",
        "grad_fn",
        "named_weights",
        "adapter_shapes",
    }
    assert "no gradient noise scale" in workload.missing["grad_fn"]
    assert "train.py:build" in workload.missing["grad_fn"]
    assert (workload.tokenizer, workload.data, workload.seq_len) == (None, None, None)
    for method in (workload.named_weights, workload.adapter_shapes, lambda: workload.grad_fn(0)):
        with pytest.raises(WorkloadError, match="gives no"):
            method()
    workload.close()


def test_settings_stand_in_for_data_and_length(tmp_path: Path) -> None:
    workload = opened(write(tmp_path, BARE), data="rows.jsonl", seq_len=128)
    assert (workload.data, workload.seq_len) == ("rows.jsonl", 128)
    assert "data" not in workload.missing


def test_opening_builds_no_model(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class Task:
            @property
            def optimizer(self):
                raise RuntimeError("built")
            def loss_of(self, b):
                raise RuntimeError("built")

        def build(settings):
            return Task()
        """,
    )
    workload = opened(path)
    with pytest.raises(RuntimeError, match="built"):
        workload.loss_of(1)
    with pytest.raises(RuntimeError, match="built"):
        _ = workload.optimizer


def test_a_part_that_is_none_on_the_class_and_set_on_the_object_is_there(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class Task:
            grad_fn = None
            named_weights = None
            loss_of = None
            def optimizer(self):
                return "made"

        def build(settings):
            task = Task()
            task.loss_of = lambda b: b
            task.grad_fn = lambda i: ([i], 1)
            return task
        """,
    )
    workload = opened(path)
    assert workload.grad_fn(7) == ([7], 1)
    assert "grad_fn" not in workload.missing
    assert "named_weights" in workload.missing
    # A method without arguments may stand for the optimizer.
    assert workload.optimizer == "made"  # type: ignore[comparison-overlap]


def test_no_such_file_names_the_whole_path(tmp_path: Path) -> None:
    said = failure("nowhere/train.py")
    assert f"no file {tmp_path / 'nowhere' / 'train.py'}" in said
    assert "on every node" in said


def test_a_name_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "x = 1", "folder/task.txt")
    assert "must end in .py" in failure("folder/task.txt")


def test_no_such_factory_lists_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path, "from os import getcwd\ndef make(s): ...\nclass Task: ...\nbuild = 3\n")
    said = failure(path, "create")
    assert "no 'create'" in said
    assert "Task, make" in said
    assert "getcwd" not in said
    assert "not a function but int" in failure(path)


def test_an_import_that_raises_is_told_at_the_users_own_line(tmp_path: Path) -> None:
    write(tmp_path, "def sizes():\n    return {}['width']\n", "helper_sizes.py")
    path = write(tmp_path, "import helper_sizes\n\n\nWIDTH = helper_sizes.sizes()\n")
    said = failure(path)
    assert f"{tmp_path / 'helper_sizes.py'} line 2" in said
    assert "KeyError: 'width'" in said
    assert "return {}['width']" in said


def test_an_error_inside_a_library_is_told_at_the_line_that_called_it(tmp_path: Path) -> None:
    path = write(tmp_path, "import json\n\ndef build(settings):\n    return json.loads('{')\n")
    said = failure(path)
    assert f"{path} line 4" in said
    assert "JSONDecodeError" in said


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("def build(settings):\n    return 1 +\n", 2, "SyntaxError"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("import no_such_package_here\n", 1, "ModuleNotFoundError"),
        ("def build(settings):\n    raise ValueError\n", 2, "ValueError"),
        ("def build(settings, extra):\n    pass\n", None, "extra"),
    ],
)
def test_whatever_goes_wrong_is_a_sentence(
    tmp_path: Path, text: str, line: int | None, what: str
) -> None:
    path = write(tmp_path, text)
    said = failure(path)
    assert what in said
    assert str(path) in said
    if line is not None:
        assert f"line {line}:" in said


@pytest.mark.parametrize(
    ("returned", "lacking"),
    [
        ("None", ["returned None", "loss_of(b)", "optimizer"]),
        ("42", ["of type int", "loss_of(b)", "optimizer"]),
        ("Half()", ["of type Half", "optimizer"]),
        ("Wrong()", ["loss_of", "cannot be called"]),
    ],
)
def test_what_a_result_lacks_is_named(tmp_path: Path, returned: str, lacking: list[str]) -> None:
    path = write(
        tmp_path,
        f"""
        class Half:
            def loss_of(self, b): ...
        class Wrong:
            loss_of = 0.5
            optimizer = object()
        def build(settings):
            return {returned}
        """,
    )
    said = failure(path)
    assert all(part in said for part in lacking), said
    if returned == "Half()":
        assert "loss_of(b)" not in said


def test_a_file_named_like_a_module_replaces_nothing(tmp_path: Path) -> None:
    import json

    for name in ("json.py", "agent.py", "pichak_core.py"):
        write(tmp_path, BARE, name)
        assert opened(tmp_path / name).loss_of(2) == 2
    assert sys.modules["json"] is json
    assert sys.path[0] != str(tmp_path)
    assert sys.path[-1] == str(tmp_path)


def test_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    first = write(tmp_path, BARE.replace("return b", "return 1"), "a/train.py")
    second = write(tmp_path, BARE.replace("return b", "return 2"), "b/train.py")
    one, two = opened(first), opened(second)
    assert (one.loss_of(9), two.loss_of(9)) == (1, 2)


def test_a_relative_path_with_a_colon_in_it_is_split_at_the_last(tmp_path: Path) -> None:
    write(tmp_path, BARE, "c:odd/train.py")
    assert opened("c:odd/train.py").loss_of(2) == 2


def test_a_module_of_the_working_folder(tmp_path: Path) -> None:
    write(tmp_path, "", "my_tasks_pkg/__init__.py")
    write(tmp_path, BARE, "my_tasks_pkg/small.py")
    write(tmp_path, "import nothing_like_this\n", "my_tasks_pkg/broken.py")
    assert opened("my_tasks_pkg.small").loss_of(5) == 5
    said = failure("my_tasks_pkg.large")
    assert "no module 'my_tasks_pkg.large'" in said
    assert str(tmp_path) in said
    assert "no module 'nowhere_pkg'" in failure("nowhere_pkg.tasks")
    broken = failure("my_tasks_pkg.broken")
    assert "No module named 'nothing_like_this'" in broken
    assert f"{tmp_path / 'my_tasks_pkg' / 'broken.py'} line 1" in broken


@pytest.mark.parametrize("length", ["abc", -5, 0, 2.5])
def test_a_row_length_that_is_none_is_said(tmp_path: Path, length: object) -> None:
    path = tmp_path / "task.py"
    path.write_text(
        "class T:\n"
        f"    seq_len = {length!r}\n"
        "    optimizer = object()\n"
        "    def loss_of(self, b): ...\n"
        "def make(settings): return T()\n"
    )
    with pytest.raises(WorkloadError, match=r"seq_len is .*not a number of tokens"):
        open_workload(Settings(model=f"{path}:make"))


def test_what_a_fleet_is_not_sent_is_said(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("import beside_that_is_nowhere\ndef make(settings): ...\n")
    with pytest.raises(WorkloadError, match=r"beside_that_is_nowhere.*sent this file alone"):
        open_workload(Settings(model=f"{path}:make"))
