"""Tokenizers by name or path, all called as ``tok(text) -> {"input_ids": [...]}``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pichak_core.tune.hub_cache import cached_folder
from pichak_core.tune.row_stream import CorpusError


class BytesTokenizer:
    """One token a byte of UTF-8, no special tokens. Needs nothing, and every text has tokens.

    Called with a string it gives ``{"input_ids": [0..255, ...]}``, with a list of strings a list
    of such lists. A lone surrogate becomes "?".
    """

    name = "bytes"
    vocab_size = 256

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> dict[str, list[Any]]:
        del add_special_tokens  # there are none
        if isinstance(text, str):
            return {"input_ids": list(text.encode("utf-8", "replace"))}
        return {"input_ids": [list(item.encode("utf-8", "replace")) for item in text]}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is not UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")


class JsonTokenizer:
    """A ``tokenizer.json`` (the `tokenizers` package), without the truncation and padding that
    the file may prescribe: a length that was cut is not the row's length."""

    def __init__(self, backend: Any, name: str = "tokenizer.json") -> None:
        self.backend, self.name = backend, name
        backend.no_truncation()
        backend.no_padding()

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token(self) -> str | None:
        """The text of the token put before every text, None where there is none."""
        framed = self.backend.encode("").ids
        token = self.backend.id_to_token(framed[0]) if framed else None
        return str(token) if token is not None else None

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> dict[str, list[Any]]:
        if isinstance(text, str):
            one = self.backend.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": one.ids}
        return {"input_ids": self.encode_batch(text, add_special_tokens)}

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of many texts on every core; without offsets where the package can leave them out."""
        encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)
        made = encode(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in made]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self.backend.decode(list(ids)))


def load_tokenizer(spec: Any) -> Any:
    """The tokenizer that `spec` names; an object that is one already is given back.

    `spec`: "bytes"; a ``tokenizer.json``; a folder saved by Hugging Face `transformers`; an id in
    the user's Hugging Face cache; a `tokenizers.Tokenizer`; or anything callable. Nothing is
    downloaded. Raises `CorpusError` with what to do when there is no such tokenizer.
    """
    if spec is None:
        raise CorpusError("a corpus is measured in tokens: name a tokenizer, or use 'bytes'")
    if not isinstance(spec, (str, os.PathLike)):
        if not callable(spec) and hasattr(spec, "encode_batch"):
            return JsonTokenizer(spec)
        if not callable(spec):
            raise CorpusError(
                f"a {type(spec).__name__} is not a tokenizer: it has to be called as "
                "tok(text) -> {'input_ids': [...]}"
            )
        return spec
    if spec == "bytes":
        return BytesTokenizer()
    path = Path(spec)
    if path.is_file():
        return _from_json(path)
    if path.is_dir():
        return _from_folder(path)
    return _from_cache(str(spec))


#: Text that a tokenizer's backend and its own call have to agree on before the backend is used.
_PROBE = (
    "",
    "a",
    " Two words\n\n  and 12,345.",
    "<s></s> <|endoftext|> é ß 漢字 🙂\ufffd",
    "b c " * 2000,
)


def batch_call(tokenizer: Any) -> Callable[[Sequence[str]], list[Any]] | None:
    """A call that encodes many texts at once without special tokens; None for a slow tokenizer.

    A fast Hugging Face tokenizer is a wrapper around a Rust one, which is called directly (its
    attention masks and offsets cost a third of the time) where both give the same ids.
    """
    if isinstance(tokenizer, JsonTokenizer):
        return partial(tokenizer.encode_batch, add_special_tokens=False)
    if not getattr(tokenizer, "is_fast", False):
        return None

    def own_call(texts: Sequence[str]) -> list[Any]:
        # What is not asked for need not be built, and a warning a long row is noise here.
        made = tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(made["input_ids"])

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch"):
        return own_call
    wanted = own_call(_PROBE)
    direct = partial(JsonTokenizer(backend).encode_batch, add_special_tokens=False)
    return direct if direct(_PROBE) == wanted else own_call


def input_ids(result: Any) -> list[int]:
    """The ids of one text from what a tokenizer returned; `CorpusError` when it is no such thing.

    Lists, numpy arrays and tensors are taken, also with a leading batch dimension of one.
    """
    try:
        ids = result["input_ids"]
    except (TypeError, KeyError, IndexError) as error:
        raise CorpusError(
            f"the tokenizer returned a {type(result).__name__} without 'input_ids': it has to be "
            "called as tok(text) -> {'input_ids': [...]}"
        ) from error
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(listed) == 1 and isinstance(listed[0], (list, tuple)):
        listed = list(listed[0])
    return listed


def tokenizer_name(tokenizer: Any) -> str:
    """A short name for a report."""
    for attribute in ("name_or_path", "name"):
        name = getattr(tokenizer, attribute, None)
        if isinstance(name, str) and name:
            return name
    return type(tokenizer).__name__


def _from_json(path: Path) -> JsonTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise CorpusError(
            f"{path} needs the package tokenizers: pip install 'pichak-fleet[hf]'"
        ) from error
    try:
        return JsonTokenizer(tokenizers.Tokenizer.from_file(str(path)), str(path))
    except Exception as error:  # the package raises plain Exception
        raise CorpusError(
            f"{path} is not a tokenizer.json ({error}); give one, a folder that holds one, "
            "or 'bytes'"
        ) from error


def _from_folder(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise CorpusError(
            f"{path} is a folder, which transformers reads (with its chat template): "
            "pip install 'pichak-fleet[hf]', or name the tokenizer.json in it"
        ) from error
    return _pretrained(transformers, str(path), "is the folder one that save_pretrained() wrote?")


def _from_cache(name: str) -> Any:
    if Path(name).suffix or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CorpusError(f"no tokenizer at {name}: give a tokenizer.json, its folder, or 'bytes'")
    try:
        import transformers

        folder = cached_folder(name, "tokenizer_config.json", "tokenizer.json", "config.json")
    except ImportError:
        raise CorpusError(
            f"no tokenizer {name!r}: it is no file or folder here, and the Hugging Face cache "
            "needs transformers: pip install 'pichak-fleet[hf]', or use 'bytes'"
        ) from None
    except ValueError as error:
        raise CorpusError(
            f"no tokenizer {name!r}: no file or folder here, and no hub id ({error})"
        ) from error
    if folder is None:
        raise CorpusError(
            f"no tokenizer {name!r}: no file or folder here, and not in the Hugging Face cache; "
            f"fetch it once with `hf download {name}`, or use 'bytes'"
        )
    return _pretrained(transformers, folder, f"`hf download {name}` fetches it again")


def _pretrained(transformers: Any, name: str, hint: str) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise CorpusError(f"no tokenizer could be read from {name} ({first[0]}); {hint}") from error
