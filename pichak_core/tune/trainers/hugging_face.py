"""transformers, trl, peft and accelerate."""

from __future__ import annotations

from pichak_core.plan import CONSTANT
from pichak_core.tune.trainers import EVERY_LINEAR, NOT_PACKED, Line, PlanNumbers, Remark, Setting


def transformers_lines(numbers: PlanNumbers) -> list[Line]:
    """`transformers.TrainingArguments(output_dir=…, **settings)`."""
    arguments = "training_arguments"
    return [
        *_training_arguments(numbers, arguments),
        *numbers.length_remark("where the rows are tokenized: truncation=True, max_length"),
        *numbers.policy_remark("where the labels are made: -100 for what is not scored"),
        *peft_lines(numbers),
    ]


def trl_lines(numbers: PlanNumbers) -> list[Line]:
    """`trl.SFTConfig(**settings)`; the text also has `trl sft`'s LoRA settings."""
    policy = numbers.loss_policy("completion_only_loss", completion_only=True, all_tokens=False)
    if isinstance(policy[0], Setting) and policy[0].value:
        policy.append(Remark("For rows of `messages` write assistant_only_loss: true instead."))
    return [
        *_training_arguments(numbers, ""),
        *numbers.setting("max_length", "seq_len"),
        *policy,
        Setting("packing", False, NOT_PACKED),
        *numbers.lora(
            "lora_r",
            "lora_alpha",
            Setting("use_peft", True, "the plan has a LoRA rank", text_only=True),
            Setting("lora_target_modules", "all-linear", EVERY_LINEAR, text_only=True),
        ),
    ]


def peft_lines(numbers: PlanNumbers) -> list[Line]:
    """`peft.LoraConfig(**settings)`."""
    section = "lora_config"
    return numbers.lora(
        "r",
        "lora_alpha",
        Setting("target_modules", "all-linear", EVERY_LINEAR, section),
        Setting("task_type", "CAUSAL_LM", f"{CONSTANT}: what the measured model computes", section),
        section=section,
    )


def accelerate_lines(numbers: PlanNumbers) -> list[Line]:
    """A loop of one's own: a dictionary for each object that takes settings."""
    return [
        *numbers.setting("gradient_accumulation_steps", "grad_accum", section="accelerator"),
        *numbers.setting("batch_size", "micro_batch", section="dataloader"),
        *numbers.setting("lr", "learning_rate", section="optimizer"),
        *numbers.setting("max_length", "seq_len", section="tokenizer"),
        *numbers.policy_remark("where the labels are made: -100 for what is not scored"),
        *peft_lines(numbers),
    ]


def _training_arguments(numbers: PlanNumbers, section: str) -> list[Line]:
    return [
        *numbers.setting("per_device_train_batch_size", "micro_batch", section=section),
        *numbers.setting("gradient_accumulation_steps", "grad_accum", section=section),
        *numbers.setting("learning_rate", "learning_rate", section=section),
    ]
