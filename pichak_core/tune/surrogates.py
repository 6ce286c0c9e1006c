"""Halves of surrogate pairs, which JSON can spell and no encoder takes."""

from __future__ import annotations

from typing import Any


def spells_surrogates(json_text: str) -> bool:
    """Whether JSON text has escapes of surrogates in it, paired ones included."""
    return "\\ud" in json_text or "\\uD" in json_text


def without_surrogates(value: Any) -> tuple[Any, bool]:
    """(the value with lone surrogates replaced by U+FFFD, whether there were any)."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        return value, False
    if isinstance(value, list):
        cleaned = [without_surrogates(item) for item in value]
        return [item for item, _ in cleaned], any(bad for _, bad in cleaned)
    if isinstance(value, dict):
        made, replaced = {}, False
        for key, item in value.items():
            (made_key, bad_key), (made_item, bad_item) = map(without_surrogates, (key, item))
            made[made_key] = made_item
            replaced = replaced or bad_key or bad_item
        return made, replaced
    return value, False
