"""Who belongs to a job: what is below its warden, in its control group, or carries its mark."""

from __future__ import annotations

from pichak_agent.environment import MARK
from pichak_core.devices.job_group import JobGroup
from pichak_core.devices.processes import descendants, marked, started_at


class Members:
    """The processes of one job, those remembered that have left its tree."""

    def __init__(self, mark: str, group: JobGroup | str) -> None:
        """`group` is the job's own control group, or why it has none."""
        self._mark, self._group = mark, group
        self._started: dict[int, str] = {}

    def below(self, warden_pid: int) -> list[int]:
        """Who there is now, each remembered by when it started; `OSError` where the system shows no
        processes."""
        found = list(dict.fromkeys([*descendants(warden_pid), *self._in_group()]))
        for pid in found:
            if pid not in self._started:
                self._started[pid] = started_at(pid) or ""
        return found

    def known(self) -> list[int]:
        """Who is left of all that were ever seen, without the warden that would know."""
        seen = [pid for pid, at in self._started.items() if at and started_at(pid) == at]
        return sorted({*seen, *self._in_group(), *marked(MARK, self._mark)})

    def _in_group(self) -> list[int]:
        return self._group.pids() if isinstance(self._group, JobGroup) else []
