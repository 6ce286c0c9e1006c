"""What a user asked to be profiled, and the jobs that this means for one node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pichak_agent.messages import Job
from pichak_core.plan import Plan

#: Measurements on one machine disturb each other, also on two of its GPUs: one at a time.
MACHINE_LOCK = "machine"

#: Seconds after which a job is ended by its agent, by kind and depth. A fingerprint of one device
#: is promised within 20 s (quick) and 2 min (full); the rest is starting and a slow disk.
_FINGERPRINT_SECONDS = {"quick": 90.0, "full": 300.0}
_TASK_SECONDS = {"quick": 180.0, "full": 600.0}
_RAMP_SECONDS = {"quick": 240.0, "full": 900.0}

#: A size whose step may take longer is not tried: on a slow device the largest batch that fits
#: would take minutes a step and win nothing.
_STEP_SECONDS = {"quick": 3.0, "full": 20.0}

#: Seconds that collecting gradients for the noise scale may take inside the task job.
_NOISE_SECONDS = {"quick": 30.0, "full": 180.0}


_WHOLE, _MAYBE, _REAL = (int,), (int, type(None)), (int, float)
#: What a setting is that is no text.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("seq_len", "limit", "memory_cap_bytes", "sample", "target_tokens"), _MAYBE),
    **dict.fromkeys(("seed", "lora_rank"), _WHOLE),
    **dict.fromkeys(("seq_quantile", "headroom"), _REAL),
    "only": (list, tuple),
    "gradient_checkpointing": (bool,),
}


@dataclass(frozen=True)
class ProfileRequest:
    """The settings of one ``fleet profile``; defaults are those of the command."""

    model: str = "builtin:gpt-1m"
    data: Path | None = None
    method: str = "full"
    lora_rank: int = 8
    device: str = "auto"
    depth: str = "quick"
    directory: str = ""
    only: tuple[str, ...] = ()
    seq_len: int | None = None
    seq_quantile: float = 0.95
    sample: int | None = 512
    headroom: float = 0.12
    limit: int | None = None
    memory_cap_bytes: int | None = None
    target_tokens: int | None = None
    seed: int = 0
    dtype: str = "auto"
    gradient_checkpointing: bool = False
    even_if_busy: bool = False
    wait_seconds: float = 0.0
    deadline_seconds: Mapping[str, float] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """What is kept with the run, so that a later one can be compared with it."""
        return {
            "model": self.model,
            "data": str(self.data) if self.data else "",
            "method": self.method,
            "device": self.device,
            "depth": self.depth,
            "seq_len": self.seq_len,
            "limit": self.limit,
            "memory_cap_bytes": self.memory_cap_bytes,
            "seed": self.seed,
            "lora_rank": self.lora_rank,
            "directory": self.directory,
            "only": list(self.only),
            "seq_quantile": self.seq_quantile,
            "sample": self.sample,
            "headroom": self.headroom,
            "target_tokens": self.target_tokens,
            "dtype": self.dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    def with_settings(self, settings: Mapping[str, Any]) -> ProfileRequest:
        """This request with what a stored run was asked, as far as its `settings` say it.

        `ValueError` for settings that no request has: they may have come in a file.
        """
        kept = {name: settings[name] for name in self.settings() if name in settings}
        for name, value in kept.items():
            allowed = _TYPES.get(name, (str,))
            if type(value) not in allowed:
                raise ValueError(f"its {name} is {str(value)[:40]!r}, which cannot be")
        if "data" in kept:
            kept["data"] = Path(kept["data"]) if kept["data"] else None
        if "only" in kept:
            kept["only"] = tuple(map(str, kept["only"]))
        return replace(self, **kept)

    def _job(self, job_id: str, attempt: int, kind: str, params: dict[str, Any]) -> Job:
        # Its own time begins when the GPU is free; waiting for that comes on top.
        seconds = self.deadline(kind) + self.wait_seconds
        if self.even_if_busy:
            params["even_if_busy"] = True
        if self.wait_seconds:
            params["wait_seconds"] = self.wait_seconds
        return Job(job_id, attempt, kind, params, seconds, lock=MACHINE_LOCK)

    def deadline(self, kind: str) -> float:
        """Seconds after which a job of this kind is ended: fingerprint, task or ramp."""
        table = {
            "fingerprint": _FINGERPRINT_SECONDS,
            "task": _TASK_SECONDS,
            "ramp": _RAMP_SECONDS,
        }[kind]
        return float(self.deadline_seconds.get(kind, table[self.depth]))

    def fingerprint_job(self, job_id: str, attempt: int, device: str) -> Job:
        """The job that fingerprints `device`."""
        params: dict[str, Any] = {
            "device": device,
            "depth": self.depth,
            "directory": self.directory,
            "only": list(self.only) or None,
        }
        return self._job(job_id, attempt, "fingerprint", params)

    def task_job(self, job_id: str, attempt: int, device: str, files: Mapping[str, Any]) -> Job:
        """The job that measures what is the same on every node: corpus, noise scale, weights."""
        params = self._workload_params(device, files) | {
            "noise_seconds": _NOISE_SECONDS[self.depth],
            "seq_quantile": self.seq_quantile,
            "sample": self.sample,
        }
        return self._job(job_id, attempt, "task", params)

    def ramp_job(
        self,
        job_id: str,
        attempt: int,
        device: str,
        files: Mapping[str, Any],
        task: Plan | None,
        first_guess: Mapping[str, Any] | None = None,
    ) -> Job:
        """The job that ramps the micro-batch on `device`, given the task's numbers, and what the
        ramp of an identical device foretells."""
        params = self._workload_params(device, files) | {
            "headroom": self.headroom,
            "limit": self.limit,
            "memory_cap_bytes": self.memory_cap_bytes,
            "step_seconds": _STEP_SECONDS[self.depth],
            "task": task.to_dict() if task else None,
            "first_guess": dict(first_guess) if first_guess else None,
        }
        return self._job(job_id, attempt, "ramp", params)

    def _workload_params(self, device: str, files: Mapping[str, Any]) -> dict[str, Any]:
        """`files` replaces the paths of this machine by references that every node can resolve."""
        return {
            "model": self.model,
            "data": str(self.data) if self.data else None,
            "method": self.method,
            "lora_rank": self.lora_rank,
            "device": device,
            "seq_len": self.seq_len,
            "target_tokens": self.target_tokens,
            "seed": self.seed,
            "dtype": self.dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            **files,
        }


def python_workload(model: str) -> tuple[str, str] | None:
    """``FILE.py:factory`` split into its two parts; None for every other kind of model."""
    path, separator, factory = model.rpartition(":")
    if separator and path.endswith(".py"):
        return path, factory
    return None
