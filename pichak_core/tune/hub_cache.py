"""What the user's own Hugging Face cache holds. The network is never asked."""

from __future__ import annotations

from pathlib import Path


def cached_folder(name: str, *files: str) -> str | None:
    """The cache's folder for hub id `name`, found by the first of `files` that is in it; None when
    there is none.

    Loading goes by the folder, never by the id: with an id, `huggingface_hub` 2 asks the network
    also where it was told to use local files only. `ImportError` without `huggingface_hub`,
    `ValueError` when `name` cannot be an id.
    """
    import huggingface_hub

    for file in files:
        found = huggingface_hub.try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return str(Path(found).parent)
    return None
