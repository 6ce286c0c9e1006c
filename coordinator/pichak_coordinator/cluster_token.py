"""The token that Ray will show to a cluster from here, and whether it is the cluster's."""

from __future__ import annotations

import os
from pathlib import Path

from pichak_coordinator.open_cluster import ask
from pichak_core.small_file import read_small


def token_here() -> tuple[str, str]:
    """(the token, where it is), in the order in which Ray 2.60 looks; "" where there is none that
    can be read. It is for the cluster alone, and never shown."""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token.strip(), "RAY_AUTH_TOKEN"
    path, where = Path.home() / ".ray" / "auth_token", "~/.ray/auth_token"
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH", ""):
        path, where = Path(named), f"{named} (RAY_AUTH_TOKEN_PATH)"
    try:
        return read_small(path).decode("utf-8").strip(), where
    except (OSError, UnicodeDecodeError):
        return "", where


def why_refused(address: str, timeout_seconds: float) -> str:
    """What a cluster that wants a token has against the one that is here, "" for nothing. Ray
    itself would knock with it for 20 s and blame the network."""
    token, where = token_here()
    own = "(on the head: `ray get-auth-token`)"
    if not token:
        return (
            f"the cluster at {address} wants its token, and none can be read in {where}: put it "
            f"there {own}"
        )
    host, _, port = address.rpartition(":")
    if ask(host.strip("[]"), int(port), timeout_seconds, token).who != "asks for a token":
        return ""
    return (
        f"the cluster at {address} refuses the token in {where}: put the cluster's own there {own}"
    )
