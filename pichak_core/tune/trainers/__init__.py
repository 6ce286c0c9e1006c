"""What a plan becomes in a trainer's own words: one file per trainer, each a list of lines.

A trainer's function takes `PlanNumbers` and returns the settings in the order of the text, with a
remark wherever the plan holds no number or the trainer no setting for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pichak_core.plan import CONSTANT, Plan, Scalar, format_number
from pichak_core.tune.ramp_story import rows_text

COMPLETION_ONLY = "completion_only"
LOSS_POLICIES = (COMPLETION_ONLY, "all_tokens")

NOT_PACKED = (
    f"{CONSTANT}: the plan counts padded rows; packing puts another number of tokens into each"
)
ALPHA_IS_RANK = f"{CONSTANT}: alpha/rank = 1, so that the learning rate alone scales a step"
EVERY_LINEAR = f"{CONSTANT}: the rank was derived for every linear but the output layer"


@dataclass(frozen=True)
class Setting:
    """One setting and where its value comes from.

    `section` is the object or nested table that takes it. `text_only` keeps it out of the
    dictionary, whose every key goes to one call.
    """

    key: str
    value: Scalar | tuple[str, ...]
    source: str
    section: str = ""
    text_only: bool = False


@dataclass(frozen=True)
class Remark:
    """A comment in the text; the dictionary has nothing for it."""

    text: str
    section: str = ""


Line = Setting | Remark


@dataclass
class PlanNumbers:
    """The plan's numbers, checked before they are written into a configuration."""

    plan: Plan

    def setting(
        self, key: str, name: str, *, section: str = "", text_only: bool = False
    ) -> list[Line]:
        """`key` with the plan's number `name`, or the remark that it was not derived."""
        if name not in self.plan:
            return [Remark(f"{key}: not derived (the plan has no {name})", section)]
        return [Setting(key, self.number(name), self.plan.why(name), section, text_only)]

    def number(self, name: str) -> Scalar:
        """A count of at least 1, or a positive rate. `ValueError` names what is neither."""
        value = self.plan[name].value
        if name == "learning_rate":
            good = isinstance(value, float) and math.isfinite(value) and value > 0
        else:
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not good:
            raise ValueError(f"the plan's {name} is {value!r}, which no trainer can take")
        return value

    def loss_policy(
        self, key: str, *, completion_only: Scalar, all_tokens: Scalar, section: str = ""
    ) -> list[Line]:
        """`key` with the value that stands for the plan's loss policy."""
        if "loss_policy" not in self.plan:
            return [Remark(f"{key}: not derived (the plan has no loss_policy)", section)]
        only = self._policy() == COMPLETION_ONLY
        source = f"loss_policy {self._policy()}: {self.plan.why('loss_policy')}"
        return [Setting(key, completion_only if only else all_tokens, source, section)]

    def policy_remark(self, how: str) -> list[Line]:
        """For a trainer whose data pipeline decides what is scored, and no setting."""
        if "loss_policy" not in self.plan:
            return [Remark("loss_policy: not derived")]
        return [Remark(f"loss_policy {self._policy()} ({how}): {self.plan.why('loss_policy')}")]

    def length_remark(self, how: str) -> list[Line]:
        """For a trainer whose tokenizing code cuts the rows, and no setting."""
        if "seq_len" not in self.plan:
            return [Remark("seq_len: not derived")]
        return [Remark(f"seq_len {self.number('seq_len')} ({how}): {self.plan.why('seq_len')}")]

    def lora(self, rank: str, alpha: str, *rest: Setting, section: str = "") -> list[Line]:
        """The adapter's settings, or the remark that no rank was derived.

        alpha is the rank: a trainer's own default would scale the adapter's steps by alpha/rank.
        """
        if "lora_rank" not in self.plan:
            return [Remark(f"{rank}: not derived (the plan has no lora_rank)", section)]
        number, why = self.number("lora_rank"), self.plan.why("lora_rank")
        text_only = any(setting.text_only for setting in rest)
        return [
            Setting(rank, number, why, section, text_only),
            Setting(alpha, number, ALPHA_IS_RANK, section, text_only),
            *rest,
        ]

    def batch_remarks(self) -> list[str]:
        """What one optimizer step of the written configuration holds."""
        told = []
        if "micro_batch" in self.plan and "grad_accum" in self.plan:
            micro, accum = int(self.number("micro_batch")), int(self.number("grad_accum"))
            told.append(
                f"One optimizer step on one GPU: {rows_text(micro)} × {accum} accumulated = "
                f"{rows_text(micro * accum)}. With N GPUs it holds N times as many; divide the "
                "accumulation by N to keep it."
            )
        for name, label in (
            ("effective_batch_tokens", "Scored tokens of that step"),
            ("target_tokens", "Scored tokens aimed at"),
            ("supervised_per_row", "Scored tokens of a row"),
        ):
            if name in self.plan:
                value = format_number(self.plan[name].value)
                told.append(f"{label}: {value} ({self.plan.why(name)})")
        return told

    def _policy(self) -> str:
        policy = self.plan["loss_policy"].value
        if policy not in LOSS_POLICIES:
            raise ValueError(
                f"the plan's loss_policy is {policy!r}; it can be {' or '.join(LOSS_POLICIES)}"
            )
        return str(policy)
