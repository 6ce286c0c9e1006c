"""``FILE.py:factory`` and ``package.module:factory``: the user's own training task.

``factory(settings)`` returns any object with a `loss_of(b)` method and an `optimizer`; the other
parts of a `Workload` may be left out, each at the price of the numbers that need it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pichak_core.workload import Settings, WorkloadError

if TYPE_CHECKING:
    import torch

REQUIRED = {
    "loss_of": "loss_of(b): the loss of b rows of the run's longest length",
    "optimizer": "optimizer: a fresh torch optimizer over the trained tensors",
}
#: What a missing part costs.
OPTIONAL = {
    "data": "no corpus is profiled, so no row length, loss policy or accumulation",
    "tokenizer": "no corpus is profiled, so no row length, loss policy or accumulation",
    "grad_fn": "no gradient noise scale, so the tokens per step are a constant",
    "named_weights": "no learning rate",
    "adapter_shapes": "no LoRA rank",
}
_METHODS = ("loss_of", "grad_fn", "named_weights", "adapter_shapes")


class UserWorkload:
    """A `Workload` over what a user's factory returned."""

    def __init__(self, name: str, settings: Settings, task: Any) -> None:
        self.name = name
        self._task = task
        _check_parts(name, task)
        self.data: str | None = _optional(task, "data") or settings.data
        self.seq_len: int | None = _row_length(name, task) or settings.seq_len
        present = {"data": self.data is not None}
        self.missing = {
            part: f"{name} gives no {part}: {cost}"
            for part, cost in OPTIONAL.items()
            if not present.get(part, _has(task, part))
        }

    @property
    def tokenizer(self) -> Callable[[str], Any] | None:
        tokenizer: Callable[[str], Any] | None = _optional(self._task, "tokenizer")
        return tokenizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer; a method without arguments is called for it."""
        made: torch.optim.Optimizer = self._task.optimizer
        return made() if callable(made) else made

    def loss_of(self, b: int) -> torch.Tensor:
        loss: torch.Tensor = self._task.loss_of(b)
        return loss

    def grad_fn(self, i: int) -> tuple[Sequence[torch.Tensor], int]:
        gradients, tokens = self._method("grad_fn")(i)
        return gradients, tokens

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights: Iterable[tuple[str, torch.Tensor]] = self._method("named_weights")()
        return weights

    def adapter_shapes(self) -> list[tuple[int, int]]:
        return [(int(out), int(into)) for out, into in self._method("adapter_shapes")()]

    def close(self) -> None:
        """The user's own `close()`, where there is one; then the task is let go."""
        close = _optional(self._task, "close")
        self._task = None
        if close is not None:
            close()

    def _method(self, part: str) -> Callable[..., Any]:
        if part in self.missing:
            raise WorkloadError(self.missing[part])
        method: Callable[..., Any] = getattr(self._task, part)
        return method


def open_python(target: str, factory: str, settings: Settings) -> UserWorkload:
    """Load `target` (a path that ends in .py, or a module's dotted name), call its `factory`.

    `WorkloadError` for no such file, module or factory, for an exception at import or in the
    factory (with the line of the user's own that raised it), and for a result that lacks a part.
    """
    name = f"{target}:{factory}"
    module = _load_file(target) if _is_path(target) else _load_module(target)
    root = Path(module.__file__).parent if module.__file__ else None
    make = getattr(module, factory, None)
    if make is None:
        there = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        )
        raise WorkloadError(
            f"{target} has no {factory!r}; it defines: {', '.join(there) or '(no functions)'}"
        )
    if not callable(make):
        raise WorkloadError(f"{name} is not a function but {type(make).__name__}")
    try:
        task = make(settings)
    except (Exception, SystemExit) as error:
        raise _raised(f"{name}(settings)", root, error) from error
    return UserWorkload(name, settings, task)


def _is_path(target: str) -> bool:
    return target.endswith(".py") or "/" in target or "\\" in target


def _load_file(target: str) -> ModuleType:
    path = Path(target).expanduser().resolve()
    if not path.is_file():
        raise WorkloadError(
            f"there is no file {path} on this machine; a workload file must lie at the same path "
            "on every node"
        )
    # A name of its own, so that train.py or agent.py cannot stand in for an installed module.
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    name = f"pichak_workload_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    _append_to_path(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise WorkloadError(
            f"{_raised(f'importing {path}', path.parent, error)}; a fleet is sent this file alone: "
            "install what it imports on every node, or put the file there at the same path"
        ) from error
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(f"importing {path}", path.parent, error) from error
    return module


def _load_module(target: str) -> ModuleType:
    _append_to_path(Path.cwd())
    try:
        return importlib.import_module(target)
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{target}.".startswith(f"{error.name}.")
        ):
            raise WorkloadError(
                f"there is no module {error.name!r} on this machine (looked in the installed "
                f"packages and in {Path.cwd()}); for a file write PATH/FILE.py:factory"
            ) from error
        raise _raised(f"importing {target}", _home_of(target), error) from error


def _home_of(target: str) -> Path | None:
    """The folder of the top-level package or module that `target` lies in."""
    spec = importlib.util.find_spec(target.partition(".")[0])
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _append_to_path(folder: Path) -> None:
    # At the end: the user's files may import each other, and shadow nothing that is installed.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _raised(doing: str, root: Path | None, error: BaseException) -> WorkloadError:
    """What the user's code raised, and the innermost line of a file under `root` on the way."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return WorkloadError(f"{doing} failed at {error.filename} line {error.lineno}: {what}")
    own = [f for f in traceback.extract_tb(error.__traceback__) if _lies_in(f.filename, root)]
    if not own:
        return WorkloadError(f"{doing} failed: {what}")
    line = own[-1]
    return WorkloadError(
        f"{doing} failed at {line.filename} line {line.lineno}: {what} (in: {line.line})"
    )


def _lies_in(filename: str, root: Path | None) -> bool:
    if root is None or filename.startswith("<"):
        return False
    path = Path(filename)
    return path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts


def _check_parts(name: str, task: Any) -> None:
    lacking = [text for part, text in REQUIRED.items() if not _has(task, part)]
    if lacking:
        raise WorkloadError(f"{name} returned {_kind(task)}, which lacks {' and '.join(lacking)}")
    wrong = [p for p in _METHODS if not callable(_optional(task, p) or callable)]
    if wrong:
        raise WorkloadError(
            f"{name} returned {_kind(task)}, whose {', '.join(wrong)} cannot be called"
        )


def _row_length(name: str, task: Any) -> int | None:
    given = _optional(task, "seq_len")
    if given is None:
        return None
    try:
        length = operator.index(given)
    except TypeError:
        length = 0
    if length < 1:
        raise WorkloadError(f"{name}: seq_len is {given!r}, not a number of tokens (1 or more)")
    return length


def _kind(task: Any) -> str:
    return "None" if task is None else f"an object of type {type(task).__name__}"


def _has(task: Any, part: str) -> bool:
    """Whether the part is there, without running a property that would build the model."""
    declared = inspect.getattr_static(type(task), part, None)
    if isinstance(declared, (property, functools.cached_property)):
        return True
    return _optional(task, part) is not None


def _optional(task: Any, part: str) -> Any:
    return getattr(task, part, None)
