"""Plans as trainers' settings: parsed back, and given to the trainers that are installed."""

from __future__ import annotations

import ast
import itertools
import json
from typing import Any

import pytest

from pichak_core.plan import CONSTANT, Plan
from pichak_core.tune.export import TRAINERS, export_plan, export_text

yaml = pytest.importorskip("yaml")

NASTY = (
    "p95 of 512 rows\nlearning_rate: 1\r\n# x\u2028y\x85z\x00\x1b[31m \ud800 \ufeff: "
    "{a} 'q' \"w\" é 数"
)
SOURCES = {
    "seq_len": NASTY,
    "loss_policy": "512 of 512 rows have a completion",
    "micro_batch": "6 ran and 7 was refused by the allocator",
    "grad_accum": "target / scored tokens of a row / micro-batch",
    "learning_rate": "rewrite 0.0121 of layer3.query / 320",
    "lora_rank": "the largest whose state fits 1.2 GiB",
    "target_tokens": "the gradient noise scale of 40 micro-batches",
    "effective_batch_tokens": "6 × 9 rows of 81.5 scored tokens",
    "supervised_per_row": "mean over 512 rows",
}


def plan(**changes: Any) -> Plan:
    values = {
        "seq_len": 512,
        "loss_policy": "completion_only",
        "micro_batch": 6,
        "grad_accum": 9,
        "learning_rate": 3.78e-05,
        "lora_rank": 16,
        "target_tokens": 4_400,
        "effective_batch_tokens": 4_401,
        "supervised_per_row": 81.5,
    }
    made = Plan(model="hf:some/model", data="a b\n- c: d.jsonl", device="cuda:0")
    for name, value in (values | changes).items():
        if value is not None:
            made.set(name, value, SOURCES[name])
    return made


def parsed(trainer: str, text: str) -> dict[str, Any]:
    """The text as the trainer's own format reads it: Python's variables, YAML, JSON."""
    if trainer == "deepspeed":
        return dict(json.loads(text))
    if trainer in ("transformers", "peft", "accelerate"):
        names = {}
        for node in ast.parse(text).body:
            assert isinstance(node, ast.Assign)
            assert isinstance(node.targets[0], ast.Name)
            names[node.targets[0].id] = ast.literal_eval(node.value)
        return names
    return dict(yaml.safe_load(text) or {})


EXPECTED: dict[str, dict[str, Any]] = {
    "transformers": {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 9,
        "learning_rate": 3.78e-05,
    },
    "trl": {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 9,
        "learning_rate": 3.78e-05,
        "max_length": 512,
        "completion_only_loss": True,
        "packing": False,
    },
    "peft": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"},
    "accelerate": {
        "accelerator": {"gradient_accumulation_steps": 9},
        "dataloader": {"batch_size": 6},
        "optimizer": {"lr": 3.78e-05},
        "tokenizer": {"max_length": 512},
        "lora_config": {
            "r": 16,
            "lora_alpha": 16,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
        },
    },
    "axolotl": {
        "sequence_len": 512,
        "excess_length_strategy": "truncate",
        "sample_packing": False,
        "train_on_inputs": False,
        "micro_batch_size": 6,
        "gradient_accumulation_steps": 9,
        "learning_rate": 3.78e-05,
        "adapter": "lora",
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_target_linear": True,
    },
    "llama-factory": {
        "cutoff_len": 512,
        "packing": False,
        "train_on_prompt": False,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 9,
        "learning_rate": 3.78e-05,
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_alpha": 16,
        "lora_target": "all",
    },
    "torchtune": {
        "batch_size": 6,
        "gradient_accumulation_steps": 9,
        "optimizer": {"lr": 3.78e-05},
        "tokenizer": {"max_seq_len": 512},
        "dataset": {"packed": False, "train_on_input": False},
        "model": {
            "lora_rank": 16,
            "lora_alpha": 16,
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
        },
    },
    "deepspeed": {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3.78e-05}},
    },
}
COMMENTED = [trainer for trainer in TRAINERS if trainer != "deepspeed"]
#: What the text holds beside the dictionary: settings of another call.
TEXT_ONLY: dict[str, dict[str, Any]] = {
    "transformers": {"lora_config": EXPECTED["peft"]},
    "trl": {
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_target_modules": "all-linear",
    },
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_dictionary_has_each_number_under_the_trainers_name(trainer: str) -> None:
    assert export_plan(plan(), trainer) == EXPECTED[trainer]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_text_parses_to_the_dictionary(trainer: str) -> None:
    content = EXPECTED[trainer]
    if trainer in ("transformers", "peft"):
        content = {"training_arguments" if trainer == "transformers" else "lora_config": content}
    read = parsed(trainer, export_text(plan(), trainer))
    assert read == content | TEXT_ONLY.get(trainer, {})


@pytest.mark.parametrize("trainer", COMMENTED)
def test_above_each_setting_stands_its_source(trainer: str) -> None:
    lines = export_text(plan(), trainer).splitlines()
    keys = {"6": "micro_batch", "9": "grad_accum", "3.78e-05": "learning_rate"}
    found = set()
    for above, line in itertools.pairwise(lines):
        if line.lstrip().startswith("#") or ":" not in line or line.rstrip().endswith((":", "{")):
            continue
        assert above.lstrip().startswith("# "), line
        name = keys.get(line.partition(":")[2].strip(" ,"))
        if name:
            assert above.strip() == f"# {SOURCES[name]}"
            found.add(name)
    assert found == (set() if trainer == "peft" else set(keys.values()))


@pytest.mark.parametrize("trainer", COMMENTED)
def test_a_source_cannot_leave_its_comment(trainer: str) -> None:
    sources = dict.fromkeys(SOURCES, NASTY)
    made = plan()
    for name in list(made):
        made.set(name, made[name].value, sources[name])
    made.model = made.data = made.device = NASTY
    clean, hostile = export_text(plan(), trainer), export_text(made, trainer)
    assert parsed(trainer, hostile) == parsed(trainer, clean)
    hostile.encode("utf-8")
    assert all(c == "\n" or c.isprintable() for c in hostile)
    assert "é 数" in hostile


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_missing_number_is_left_out_and_said(trainer: str) -> None:
    empty = Plan()
    made = export_plan(empty, trainer)
    flat = json.dumps(made)
    assert not any(character.isdigit() for character in flat), made
    if trainer != "deepspeed":
        text = export_text(empty, trainer)
        parsed(trainer, text)
        assert text.count("not derived") == (1 if trainer == "peft" else 6)
    for name in ("micro_batch", "learning_rate", "lora_rank"):
        one_missing = json.dumps(export_plan(plan(**{name: None}), trainer))
        value = {"micro_batch": "6", "learning_rate": "3.78e-05", "lora_rank": "16"}[name]
        assert f" {value}" not in one_missing


def test_what_no_measurement_gave_says_so() -> None:
    for trainer in ("trl", "axolotl", "llama-factory", "torchtune"):
        text = export_text(plan(), trainer)
        assert text.count(CONSTANT) >= 3


@pytest.mark.parametrize("trainer", COMMENTED)
def test_the_header_says_what_a_step_holds(trainer: str) -> None:
    text = " ".join(export_text(plan(), trainer).replace("#", "").split())
    assert "6 rows × 9 accumulated = 54 rows" in text
    assert "4,401" in text
    assert "Model: hf:some/model" in text
    assert "Data: a b - c: d.jsonl" in text


def test_all_tokens_scores_the_prompt_too() -> None:
    made = plan(loss_policy="all_tokens")
    assert export_plan(made, "trl")["completion_only_loss"] is False
    assert export_plan(made, "axolotl")["train_on_inputs"] is True
    assert export_plan(made, "llama-factory")["train_on_prompt"] is True
    assert export_plan(made, "torchtune")["dataset"]["train_on_input"] is True
    assert "assistant_only_loss" not in export_text(made, "trl")
    assert "assistant_only_loss" in export_text(plan(), "trl")


@pytest.mark.parametrize("rate", [5e-05, 1e-4, 1e-10, 0.001, 2.0, 1.25e-17])
@pytest.mark.parametrize("trainer", ["trl", "axolotl"])
def test_yaml_reads_a_rate_as_a_number(trainer: str, rate: float) -> None:
    read = parsed(trainer, export_text(plan(learning_rate=rate), trainer))["learning_rate"]
    assert isinstance(read, float)
    assert read == rate


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_batch", 0),
        ("micro_batch", True),
        ("micro_batch", "4; rm"),
        ("grad_accum", 2.5),
        ("seq_len", -1),
        ("lora_rank", "16"),
        ("learning_rate", 0.0),
        ("learning_rate", -1e-4),
        ("learning_rate", "fast"),
        ("loss_policy", "some: yaml"),
    ],
)
def test_what_no_trainer_can_take_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"the plan's {name} is"):
        export_plan(plan(**{name: value}), "axolotl")


def test_an_unknown_trainer_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown trainer 'keras'; there are: transformers, trl"):
        export_plan(plan(), "keras")
    with pytest.raises(ValueError, match="unknown trainer"):
        export_text(plan(), "")


def test_training_arguments_take_it(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], **export_plan(plan(), "transformers")
    )
    assert arguments.learning_rate == 3.78e-05
    rows = arguments.train_batch_size * arguments.gradient_accumulation_steps
    assert f"= {rows} rows" in export_text(plan(), "transformers")


def test_sft_config_takes_it(tmp_path: Any) -> None:
    trl = pytest.importorskip("trl")
    config = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, **export_plan(plan(), "trl")
    )
    assert (config.max_length, config.completion_only_loss, config.packing) == (512, True, False)
    rows = config.train_batch_size * config.gradient_accumulation_steps
    assert f"= {rows} rows" in export_text(plan(), "trl")


def test_the_trl_command_reads_the_text(tmp_path: Any) -> None:
    trl = pytest.importorskip("trl")
    path = tmp_path / "config.yaml"
    path.write_text(export_text(plan(), "trl"), encoding="utf-8")
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    given = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "True"]
    given += ["--bf16", "False", "--model_name_or_path", "m", "--dataset_name", "d"]
    _, training, model = parser.parse_args_and_config(given)
    assert training.learning_rate == 3.78e-05
    lora = trl.get_peft_config(model)
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (16, 16, "all-linear")


def test_lora_config_and_accelerator_take_it() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**export_plan(plan(), "peft"))
    assert (config.r, config.lora_alpha, config.target_modules) == (16, 16, "all-linear")
    accelerate = pytest.importorskip("accelerate")
    parts = export_plan(plan(), "accelerate")
    accelerator = accelerate.Accelerator(cpu=True, **parts["accelerator"])
    assert accelerator.gradient_accumulation_steps == 9
    assert peft.LoraConfig(**parts["lora_config"]).r == 16
