"""A plan as the settings of a trainer, each with the measurement behind it.

A number that the plan does not hold is left out and said to be missing; what a trainer needs beside
the plan's numbers is a constant and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pichak_core.plan import Plan
from pichak_core.tune.trainers import Line, PlanNumbers
from pichak_core.tune.trainers.config_files import (
    axolotl_lines,
    deepspeed_lines,
    llama_factory_lines,
    torchtune_lines,
)
from pichak_core.tune.trainers.hugging_face import (
    accelerate_lines,
    peft_lines,
    transformers_lines,
    trl_lines,
)
from pichak_core.tune.trainers.text import as_dict, as_json, as_python, as_yaml


@dataclass(frozen=True)
class Trainer:
    """How one trainer is written: its lines, its file format, and how the file is used.

    `main` is the section whose keys go to one call, where the others are for another call.
    """

    lines: Callable[[PlanNumbers], list[Line]]
    render: Callable[[Sequence[str], Sequence[Line]], str]
    use: str
    main: str = ""


TRAINERS: dict[str, Trainer] = {
    "transformers": Trainer(
        transformers_lines,
        as_python,
        "transformers.TrainingArguments(output_dir=..., **training_arguments)",
        "training_arguments",
    ),
    "trl": Trainer(
        trl_lines, as_yaml, "trl sft --config THIS_FILE --model_name_or_path ... --dataset_name ..."
    ),
    "peft": Trainer(peft_lines, as_python, "peft.LoraConfig(**lora_config)", "lora_config"),
    "accelerate": Trainer(
        accelerate_lines,
        as_python,
        "accelerate.Accelerator(**accelerator), torch.utils.data.DataLoader(rows, **dataloader), "
        "torch.optim.AdamW(weights, **optimizer), tokenizer(text, truncation=True, **tokenizer)",
    ),
    "axolotl": Trainer(
        axolotl_lines, as_yaml, "add base_model and datasets, then: axolotl train THIS_FILE"
    ),
    "llama-factory": Trainer(
        llama_factory_lines,
        as_yaml,
        "add model_name_or_path, stage: sft, dataset, template and output_dir, then: "
        "llamafactory-cli train THIS_FILE",
    ),
    "torchtune": Trainer(
        torchtune_lines, as_yaml, "put these values into the recipe's own file (tune cp ...)"
    ),
    "deepspeed": Trainer(
        deepspeed_lines, as_json, "deepspeed train.py --deepspeed_config THIS_FILE"
    ),
}


def export_plan(plan: Plan, trainer: str) -> dict[str, Any]:
    """The plan as what `trainer` takes.

    Keyword arguments for ``transformers`` (`TrainingArguments`), ``trl`` (`SFTConfig`) and ``peft``
    (`LoraConfig`); the file's content for ``axolotl``, ``llama-factory``, ``torchtune`` and
    ``deepspeed``; for ``accelerate`` a dictionary for each object of a training loop.
    `ValueError` for an unknown trainer, or a number that no trainer can take.
    """
    found = _trainer(trainer)
    made = as_dict(found.lines(PlanNumbers(plan)))
    main: dict[str, Any] = made.get(found.main, {}) if found.main else made
    return main


def export_text(plan: Plan, trainer: str) -> str:
    """The plan as a file for `trainer`: YAML, Python or (deepspeed) JSON, which has no comments.

    Above each setting stands its source. `ValueError` as for `export_plan`.
    """
    found = _trainer(trainer)
    numbers = PlanNumbers(plan)
    return found.render(_header(plan, found, numbers), found.lines(numbers))


def _trainer(name: str) -> Trainer:
    if name not in TRAINERS:
        raise ValueError(f"unknown trainer {name!r}; there are: {', '.join(TRAINERS)}")
    return TRAINERS[name]


def _header(plan: Plan, trainer: Trainer, numbers: PlanNumbers) -> list[str]:
    about = (("Model", plan.model), ("Data", plan.data), ("Device", plan.device))
    return [
        f"Use: {trainer.use}",
        *(f"{label}: {text}" for label, text in about if text.strip()),
        *numbers.batch_remarks(),
    ]
