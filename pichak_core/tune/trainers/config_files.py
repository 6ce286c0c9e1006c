"""Trainers driven by a configuration file: axolotl, LLaMA-Factory, torchtune, DeepSpeed."""

from __future__ import annotations

from pichak_core.plan import CONSTANT
from pichak_core.tune.trainers import EVERY_LINEAR, NOT_PACKED, Line, PlanNumbers, Setting

HAS_RANK = "the plan has a LoRA rank"
ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
TRUNCATED = f"{CONSTANT}: the plan's rows are cut at that length; axolotl's default drops them"


def axolotl_lines(numbers: PlanNumbers) -> list[Line]:
    """Keys of axolotl's YAML."""
    length = numbers.setting("sequence_len", "seq_len")
    if isinstance(length[0], Setting):
        length.append(Setting("excess_length_strategy", "truncate", TRUNCATED))
    return [
        *length,
        Setting("sample_packing", False, NOT_PACKED),
        *numbers.loss_policy("train_on_inputs", completion_only=False, all_tokens=True),
        *numbers.setting("micro_batch_size", "micro_batch"),
        *numbers.setting("gradient_accumulation_steps", "grad_accum"),
        *numbers.setting("learning_rate", "learning_rate"),
        *numbers.lora(
            "lora_r",
            "lora_alpha",
            Setting("adapter", "lora", HAS_RANK),
            Setting("lora_target_linear", True, EVERY_LINEAR),
        ),
    ]


def llama_factory_lines(numbers: PlanNumbers) -> list[Line]:
    """Keys of LLaMA-Factory's YAML (stage sft)."""
    return [
        *numbers.setting("cutoff_len", "seq_len"),
        Setting("packing", False, NOT_PACKED),
        *numbers.loss_policy("train_on_prompt", completion_only=False, all_tokens=True),
        *numbers.setting("per_device_train_batch_size", "micro_batch"),
        *numbers.setting("gradient_accumulation_steps", "grad_accum"),
        *numbers.setting("learning_rate", "learning_rate"),
        *numbers.lora(
            "lora_rank",
            "lora_alpha",
            Setting("finetuning_type", "lora", HAS_RANK),
            Setting("lora_target", "all", EVERY_LINEAR),
        ),
    ]


def torchtune_lines(numbers: PlanNumbers) -> list[Line]:
    """Keys of a torchtune recipe's YAML, nested as the recipes nest them."""
    return [
        *numbers.setting("batch_size", "micro_batch"),
        *numbers.setting("gradient_accumulation_steps", "grad_accum"),
        *numbers.setting("lr", "learning_rate", section="optimizer"),
        *numbers.setting("max_seq_len", "seq_len", section="tokenizer"),
        Setting("packed", False, NOT_PACKED, "dataset"),
        *numbers.loss_policy(
            "train_on_input", completion_only=False, all_tokens=True, section="dataset"
        ),
        *numbers.lora(
            "lora_rank",
            "lora_alpha",
            Setting("lora_attn_modules", ATTENTION, EVERY_LINEAR, "model"),
            Setting("apply_lora_to_mlp", True, EVERY_LINEAR, "model"),
            section="model",
        ),
    ]


def deepspeed_lines(numbers: PlanNumbers) -> list[Line]:
    """Keys of DeepSpeed's JSON. `train_batch_size` is left to DeepSpeed: it has the world size."""
    return [
        *numbers.setting("train_micro_batch_size_per_gpu", "micro_batch"),
        *numbers.setting("gradient_accumulation_steps", "grad_accum"),
        *_optimizer(numbers),
    ]


def _optimizer(numbers: PlanNumbers) -> list[Line]:
    if "learning_rate" not in numbers.plan:
        return []
    return [
        Setting("type", "AdamW", "the optimizer that the plan was derived with", "optimizer"),
        *numbers.setting("lr", "learning_rate", section="optimizer.params"),
    ]
