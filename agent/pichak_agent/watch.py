"""Readings in, findings out: suspected at the first look, confirmed at a second one, resolved when
it ends. Pure: the readings' own times are the only clock.

A rule looks at the readings of the last minutes and yields a `Sign` for what it sees now. What a
sign has to be seen for, and how long it must be gone, is decided here for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pichak_agent.readings import Reading
from pichak_agent.watch_past import Past, Window
from pichak_core.plan import Scalar

Severity = Literal["info", "warn", "fail"]
State = Literal["suspected", "confirmed", "resolved"]
Key = tuple[str, str]

#: Between two looks.
LOOK_SECONDS = 10.0
#: The second look that confirms must be at least so long after the first.
CONFIRM_SECONDS = 30.0
#: Not seen for so long, it is over.
RESOLVE_SECONDS = 60.0
#: How long what is over stays listed; coming back within it is the same finding again.
REMEMBER_SECONDS = 3600.0
_MOST_FINDINGS = 200
_SEVERITIES: tuple[Severity, ...] = ("fail", "warn", "info")


@dataclass(frozen=True)
class Sign:
    """What one look at the readings sees. `subject` is the GPU's UUID, or what else it is about;
    `sure`: it was read, not inferred, so that one look confirms it."""

    code: str
    severity: Severity
    subject: str
    sentence: str
    evidence: Mapping[str, Scalar] = field(default_factory=dict)
    sure: bool = False

    @property
    def key(self) -> Key:
        return self.code, self.subject


@dataclass(frozen=True)
class WatchFinding:
    """A sign with its history: `sign` is what its last look saw, at `last_unix`; `first_unix` is
    the first look of this episode; `episodes` counts how often it came."""

    sign: Sign
    state: State
    first_unix: float
    last_unix: float
    episodes: int = 1

    @property
    def key(self) -> Key:
        return self.sign.key

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "code": self.sign.code,
            "severity": self.sign.severity,
            "subject": self.sign.subject,
            "sentence": self.sign.sentence,
            "evidence": dict(self.sign.evidence),
            "state": self.state,
            "first_unix": round(self.first_unix, 3),
            "last_unix": round(self.last_unix, 3),
            "episodes": self.episodes,
        }


#: What there is to look at, and the keys of what is there already: a rule asks less of such a sign
#: than of a new one, so that nothing comes and goes at its limit.
Rule = Callable[[Window, Container[Key]], Iterator[Sign]]


class Watch:
    """`gpus` are UUID and name of what the node had before, where that is known."""

    def __init__(self, rules: Sequence[Rule], gpus: Mapping[str, str] | None = None) -> None:
        self._rules = rules
        self._past = Past(dict(gpus or {}))
        self._findings: dict[Key, WatchFinding] = {}
        self._seen: dict[Key, tuple[float, float]] = {}  # steady times: first and last look
        self._looked = float("-inf")

    @property
    def had(self) -> Mapping[str, str]:
        """The GPUs that the node had when the watch began, UUID to name."""
        return self._past.had

    def take(self, reading: Reading) -> bool:
        """Add a reading; True when it was time to look at them."""
        self._past.take(reading)
        if reading.steady_seconds - self._looked < LOOK_SECONDS:
            return False
        self._looked = reading.steady_seconds
        self._look(reading)
        return True

    def findings(self) -> list[WatchFinding]:
        """What is there and what was lately, the worst first."""
        return sorted(
            self._findings.values(),
            key=lambda f: (
                f.state == "resolved",
                _SEVERITIES.index(f.sign.severity),
                f.state != "confirmed",
                f.key,
            ),
        )

    def _look(self, now: Reading) -> None:
        active = {key for key, found in self._findings.items() if found.state != "resolved"}
        signs: dict[Key, Sign] = {}
        window = self._past.window()
        for rule in self._rules:
            for sign in rule(window, active):
                signs.setdefault(sign.key, sign)
        for sign in signs.values():
            self._saw(sign, now)
        for key in [key for key in self._findings if key not in signs]:
            self._missed(key, now)
        if len(self._findings) > _MOST_FINDINGS:
            for found in self.findings()[_MOST_FINDINGS:]:
                del self._findings[found.key]

    def _saw(self, sign: Sign, now: Reading) -> None:
        old = self._findings.get(sign.key)
        steady = now.steady_seconds
        if old is None or old.state == "resolved":
            episodes = 1 if old is None else old.episodes + 1
            # What was confirmed within the hour and is back needs no second look again.
            state: State = "confirmed" if sign.sure or old is not None else "suspected"
            self._findings[sign.key] = WatchFinding(sign, state, now.at_unix, now.at_unix, episodes)
            self._seen[sign.key] = (steady, steady)
            return
        first, _ = self._seen[sign.key]
        sure = sign.sure or old.state == "confirmed" or steady - first >= CONFIRM_SECONDS
        self._findings[sign.key] = replace(
            old, sign=sign, state="confirmed" if sure else "suspected", last_unix=now.at_unix
        )
        self._seen[sign.key] = (first, steady)

    def _missed(self, key: Key, now: Reading) -> None:
        old = self._findings[key]
        gone = now.steady_seconds - self._seen[key][1]
        if old.state == "resolved":
            if gone >= REMEMBER_SECONDS:
                del self._findings[key], self._seen[key]
        elif old.state == "suspected":
            if gone >= CONFIRM_SECONDS:
                del self._findings[key], self._seen[key]
        elif gone >= RESOLVE_SECONDS:
            self._findings[key] = replace(old, state="resolved")
