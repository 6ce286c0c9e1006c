"""``ray start`` as a service runs it: its arguments, its variables, and what its words mean. Pure.

The token never stands in an argument, a variable or a line of output: Ray reads it from its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Marks every process of one service, so that all of them are found however they were started.
MARK = "PICHAK_SERVICE"
#: Results travel inline; a store of Ray's usual size would take the memory that is measured.
OBJECT_STORE_BYTES = 100 * 1024**2
#: Seconds that Ray may wait for the node to become idle when it is told to end.
DRAIN_SECONDS = 4
#: What the service itself decides.
OURS = ("--address", "--block", "--head", "--temp-dir", "--node-name")

_STARTED = "Ray runtime started."
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VERSIONS = re.compile(
    r"cluster was started with:\s*Ray: (\S+)\s*Python: (\S+).*?"
    r"was started with:\s*Ray: (\S+)\s*Python: (\S+)",
    re.S,
)
_USAGE = re.compile(r"^Error: (.+)$", re.M)
#: Of what ``ray start`` said, where its cause is looked for.
_LAST_LINES = 20
#: What Ray says in the words of its parts, and what it means.
_CAUSES = (
    (
        "MemTotal",
        "Ray cannot see how much memory this machine has: let this service read /proc/meminfo, "
        "which is masked or empty here",
    ),
    (
        "[Rr]eceived http2 header with status|connect an http1",
        "what answers at {address} is a web server and no Ray head: give --address the port of "
        "`ray start --head --port` (6379 without it; 8265 is the dashboard's)",
    ),
    (
        r"No space left on device|\[Errno 28\]",
        "a file system is full where Ray keeps this node's files: free some of it, or set TMPDIR "
        "to a folder that has room",
    ),
    (
        r"Read-only file system|\[Errno 30\]|PermissionError",
        "Ray may not write where it has to: let this service write its TMPDIR and /dev/shm",
    ),
    (
        r"Too many open files|\[Errno 24\]",
        "Ray has too few file descriptors: raise `ulimit -n` (LimitNOFILE= in a unit) to 65536",
    ),
    (
        r"Address already in use|\[Errno 98\]",
        "a port that Ray wants is taken on this machine: give it others after --, as in "
        "-- --min-worker-port 20000",
    ),
    (
        r"Cannot allocate memory|\[Errno 12\]",
        "this machine, or the limit of this service, has too little memory for Ray to start",
    ),
)


@dataclass(frozen=True)
class RayStart:
    """How this node joins. `labels`, `resources` and `more` are arguments as ``ray start`` takes
    them; counts that are None are left to Ray."""

    address: str
    token_file: Path | None = None
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: str = ""
    num_cpus: int | None = None
    num_gpus: int | None = None
    object_store_bytes: int = OBJECT_STORE_BYTES
    more: Sequence[str] = ()

    def arguments(self, folder: Path) -> list[str]:
        """Of ``ray start``; `folder` is where everything of this node is kept."""
        made = [f"--address={self.address}", "--block", f"--temp-dir={folder}"]
        made.append(f"--object-store-memory={self.object_store_bytes}")
        if self.name:
            made.append(f"--node-name={self.name}")
        if self.labels:
            made.append("--labels=" + ",".join(f"{k}={v}" for k, v in self.labels.items()))
        if self.resources:
            made.append(f"--resources={self.resources}")
        if self.num_cpus is not None:
            made.append(f"--num-cpus={self.num_cpus}")
        if self.num_gpus is not None:
            made.append(f"--num-gpus={self.num_gpus}")
        return [*made, *self.more]

    def variables(self, own: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
        """What ``ray start`` is started with, from this process's `own` variables and `more`."""
        made = {**own, **more}
        if self.token_file is not None:
            made.pop("RAY_AUTH_TOKEN", None)
            made |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file)}
        elif _has_token(made):
            # To an address that is named Ray shows a token only when it is told to.
            made.setdefault("RAY_AUTH_MODE", "token")
        # An address of the environment would speak for another cluster; the service manager is the
        # service's own business.
        for name in ("RAY_ADDRESS", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            made.pop(name, None)
        made |= {
            "PYTHONUNBUFFERED": "1",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
        }
        return made


def _has_token(own: Mapping[str, str]) -> bool:
    """Whether a token is where Ray looks, in the order in which it does."""
    if own.get("RAY_AUTH_TOKEN"):
        return True
    file = Path(own.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.stat().st_size > 0
    except OSError:
        return False


@dataclass(frozen=True)
class Refusal:
    """Why a cluster does not take this node: a sentence of ours, and `detail`, Ray's last words.
    `settled`: trying again changes nothing until a person has done something."""

    why: str
    settled: bool
    detail: str = ""

    @property
    def sentence(self) -> str:
        """Both."""
        return f"{self.why} (Ray's last words: {self.detail})" if self.detail else self.why


def joined(output: str) -> bool:
    """Whether ``ray start`` says that the node is in the cluster."""
    return _STARTED in output


def refused_token(output: str) -> bool:
    """Whether it says, again and again, that the token is not the cluster's."""
    return "InvalidAuthToken" in output


def head_went(output: str) -> bool:
    """Whether the node ended because its head went away, or came back without its memory (field
    case 88)."""
    return (
        "GCS returned an authentication error" in output or "Failed to connect to GCS" in output
    ) and joined(output)


def refusal(
    output: str,
    address: str,
    exit_code: int | None,
    *,
    token_file: Path | None = None,
    waited_seconds: float = 0.0,
) -> Refusal:
    """What ended ``ray start``. `token_file` is what it was given; `waited_seconds` for how long it
    was waited for, where it was ended because it did not join."""
    text = _COLOUR.sub("", output)
    if head_went(text):
        return Refusal(f"the head at {address} went away or was started anew", settled=False)
    no_token = "AuthenticationError" in text or ("oken" in text and "not found" in text)
    if refused_token(text) or no_token:
        return Refusal(_token(address, token_file), settled=True)
    if "No node info found for head node" in text:
        return Refusal(f"the head at {address} answers and is not ready yet", settled=False)
    if "timed out during startup" in text:
        return Refusal("Ray did not get ready here in the time that it gives itself", settled=False)
    versions = _VERSIONS.search(text)
    if versions:
        return Refusal(_mismatch(address, *versions.groups()), settled=True)
    if "No module named" in text and "ray" in text:
        return Refusal(
            "Ray is not installed in the Python that runs this service: pip install pichak-fleet",
            settled=True,
        )
    usage = _USAGE.search(text)
    if exit_code == 2 and usage:
        return Refusal(f"`ray start` refuses its arguments: {usage.group(1)}", settled=True)
    return _unsettled(text, address, exit_code, waited_seconds)


def _unsettled(text: str, address: str, exit_code: int | None, waited_seconds: float) -> Refusal:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ending = "\n".join(lines[-_LAST_LINES:])
    dead = re.search(r"^.*?(\w+) \[exit code=(-?\d+)\]", text, re.M)
    said = re.findall(r"\[\d{4}-[^\]]+ [EF] \d+ \d+\] (?:\(\w+\) )?\S+: (.+)", text)
    detail = _clip(said[-1] if said and dead else "" if dead or not lines else lines[-1])
    for pattern, sentence in _CAUSES:
        if re.search(pattern, ending):
            return Refusal(sentence.format(address=address), settled=False, detail=detail)
    if dead:
        why = f"Ray's {dead[1]} ended (exit code {dead[2]})"
    elif waited_seconds:
        why = (
            f"Ray did not join the cluster at {address} within {waited_seconds:g} s: see that "
            "every port of the head and of this node can be reached from the other"
        )
    else:
        how = "ended" if exit_code is None else f"ended with {exit_code}"
        why = f"Ray does not start here (`ray start` {how}): `pichak doctor` says what is missing"
    return Refusal(why, settled=False, detail=detail)


def _token(address: str, token_file: Path | None) -> str:
    if token_file is None:
        return (
            f"the cluster at {address} wants its token, and where Ray looks here there is none or "
            "another: name a file that holds it with --token-file (on the head: `ray "
            "get-auth-token`)"
        )
    return (
        f"the cluster at {address} refuses the token in {token_file}: put the cluster's own there "
        "(on the head: `ray get-auth-token`)"
    )


def _mismatch(address: str, ray: str, python: str, own_ray: str, own_python: str) -> str:
    """The matrix of a sentence (field case 82)."""
    rows = (("Ray", ray, own_ray), ("Python", python, own_python))
    differ = " and ".join(name for name, theirs, ours in rows if theirs != ours)
    matrix = "; ".join(f"{name} {theirs} there, {ours} here" for name, theirs, ours in rows)
    return (
        f"the cluster at {address} runs another {differ} ({matrix}): install the same on this "
        "node, down to the last number"
    )


def _clip(text: str, most: int = 300) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= most else f"{plain[:most]}…"
