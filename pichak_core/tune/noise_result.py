"""What a noise-scale measurement says: `NoiseScale`, its kinds and its sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from pichak_core.plan import Value, format_number

Kind = Literal["value", "coarse", "lower_bound", "upper_bound"]

#: A measurement with T below this many B_noise is only `coarse`.
MIN_RATIO = 2.0

_BOUNDS = ("low", "high")
_ROUNDING = 1e-9


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale B_noise = S/|G|², in scored tokens, and how far to trust it.

    kind: "value"; "coarse" (T < 2·B_noise, or only 2 micro-batches); "lower_bound" (|G|² not above
    zero: `b_noise_tokens` is T and B_noise is at least about that); "upper_bound" (S not above
    zero: `b_noise_tokens` is the mean t, and B_noise is at most that). `b_noise_tokens` is never
    negative and always finite.
    `low` and `high` are the interval at `confidence`; `high` is `math.inf` when it is unbounded,
    both are None when nothing was known of the spread.

    `g2` (|gradient|²) and `trace_sigma` (S, |gradient|² × tokens) are the unbiased estimates, so
    `g2` may be negative. `s_token` is S as if all tokens were independent and `design_effect` is
    `trace_sigma / s_token`. `k` micro-batches were used, of `micro_tokens` scored tokens on average
    and `tokens` together (T).
    """

    b_noise_tokens: float
    g2: float
    trace_sigma: float
    micro_tokens: float
    k: int
    kind: Kind
    source: str
    low: float | None = None
    high: float | None = None
    design_effect: float | None = None
    tokens: float = 0.0
    s_token: float | None = None
    confidence: float = 0.9
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def resolved(self) -> bool:
        """Whether `b_noise_tokens` is a value: not a bound, and not coarse."""
        return self.kind == "value"

    def as_value(self) -> Value:
        """The number for a plan, with its sentence, unit, interval and cost."""
        low, high, cost = self.low, self.high, self.seconds
        return Value(self.b_noise_tokens, self.source, cost, "scored tokens", low, high)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form; an unbounded `high` becomes the string ``"inf"``."""
        record = asdict(self)
        record["notes"] = list(self.notes)
        for name in _BOUNDS:
            if record[name] is not None and math.isinf(record[name]):
                record[name] = str(record[name])
        return {**record, "resolved": self.resolved}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> NoiseScale:
        """The inverse of `as_dict`; `ValueError` names the field that is missing or malformed."""
        given = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        try:
            for name in (*_BOUNDS, "design_effect", "s_token"):
                given[name] = None if given.get(name) is None else float(given[name])
            for name in ("b_noise_tokens", "g2", "trace_sigma", "micro_tokens"):
                given[name] = float(given[name])
            given["k"] = int(given["k"])
            given["notes"] = tuple(str(note) for note in given.get("notes", ()))
            made = cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a noise scale: {type(error).__name__} {error}") from error
        if made.kind not in get_args(Kind):
            raise ValueError(f"not a noise scale: kind {made.kind!r}")
        return made


def classify(s: float, g2: float, *, tokens: float, micro_tokens: float) -> tuple[float, Kind]:
    """(b_noise_tokens, kind) from S, |G|², T and the mean t.

    Zero counts as "not above zero", and so does a |G|² that is only the rounding of its terms.
    """
    if s <= 0.0:
        return micro_tokens, "upper_bound"
    if g2 <= _ROUNDING * s / tokens:
        return tokens, "lower_bound"
    ratio = s / g2
    return ratio, "value" if tokens >= MIN_RATIO * ratio else "coarse"


def sentence(made: NoiseScale, freedom: float | None) -> str:
    """The source of a noise scale: what was run and what came of it, with the numbers.

    `freedom` is the interval's degrees of freedom, None where there is no interval.
    """
    n = format_number
    seen = (
        f"the gradients of {made.k} micro-batches of {n(made.micro_tokens)} scored tokens on "
        f"average (T = {n(made.tokens)})"
    )
    moments = f"S = tr(Σ) = {n(made.trace_sigma)} and |G|² = {n(made.g2)} from {seen}"
    if made.kind == "lower_bound":
        text = f"at least about T: no signal above the noise yet; {moments}"
    elif made.kind == "upper_bound":
        text = f"at most the mean micro-batch: no noise between micro-batches; {moments}"
    else:
        text = f"B_noise = S/|G|², {moments}"
    if freedom is not None and made.low is not None and made.high is not None:
        reach = "or more" if math.isinf(made.high) else f"to {n(made.high)}"
        text += (
            f"; {100 * made.confidence:g} % interval {n(made.low)} {reach} (delete-one jackknife, "
            f"Fieller, {freedom:.3g} degrees of freedom)"
        )
    if made.kind == "coarse" and made.k < 3:
        text += f"; coarse: {made.k} micro-batches say nothing of their own spread"
    elif made.kind == "coarse":
        text += f"; coarse: T is {made.tokens / made.b_noise_tokens:.2g} × B_noise, not 2 ×"
    if made.design_effect is not None:
        text += f"; design effect {n(made.design_effect)}"
        if made.design_effect == 1.0:
            text += " (every micro-batch scored equally many tokens, so it could not differ)"
    return text


def noise_scale_from_norms(g_small_sq: float, g_big_sq: float, b: float, k: int) -> NoiseScale:
    """B_noise from two squared norms, for k micro-batches of exactly b scored tokens each.

    `g_small_sq` is the mean of |g_i|² over the k micro-batches, `g_big_sq` is |Ĝ|² of all k·b
    tokens:

        S = (g_small_sq − g_big_sq) / (1/b − 1/(kb)),   |G|² = (k·g_big_sq − g_small_sq) / (k − 1)

    (McCandlish et al. 2018, appendix A.1). To use several steps, average both norms first: a ratio
    averaged over steps is biased. There is no interval: two means say nothing of their spread.
    `ValueError` for k < 2, b ≤ 0, or a norm that is negative or not finite.
    """
    if k < 2 or not b > 0 or not math.isfinite(b):
        raise ValueError(f"two batch sizes are needed: k ≥ 2 and b > 0, not k = {k}, b = {b}")
    for name, value in (("g_small_sq", g_small_sq), ("g_big_sq", g_big_sq)):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is a squared norm, not {value}")
    if g_small_sq == 0.0 and g_big_sq == 0.0:
        raise ValueError("both norms are zero: no gradient reached the trained tensors")
    tokens = b * k
    s = (g_small_sq - g_big_sq) / (1.0 / b - 1.0 / tokens)
    g2 = (k * g_big_sq - g_small_sq) / (k - 1)
    number, kind = classify(s, g2, tokens=tokens, micro_tokens=b)
    made = NoiseScale(
        number, g2, s, b, k, kind, "unset", tokens=tokens, s_token=s, notes=(_NO_INTERVAL,)
    )
    return NoiseScale(**{**made.__dict__, "source": sentence(made, None)})


_NO_INTERVAL = "the noise scale has no interval: it was computed from two mean norms"
