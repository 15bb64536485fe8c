"""Your own model folder and your own JSONL: a running GRPO with one command, whatever chat template the model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.errors import ConfigError, DataError
from tidemill.models.tiny import make_tokenizer
from tidemill.recipe.config import TinyModel
from tidemill.run import start as launch

# As Qwen's and Llama's templates are: turns between markers, a default system message, the assistant's turn opened.
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin_of_text|>{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ALPHABET = "0123456789+-=<>|_#.,? \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
GSM = [
    {"question": f"What is {i} plus {i + 1}?", "answer": f"{i} and {i + 1} make it.\n#### {2 * i + 1}"}
    for i in range(30)
]


def model_folder(folder: Path, kind: str, template: str | None) -> Path:
    tokenizer = make_tokenizer(TinyModel(alphabet=ALPHABET))
    tokenizer.chat_template = template
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 256, "vocab_size": len(tokenizer), "head_dim": 8,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "template"), [("qwen2", QWEN), ("llama", LLAMA), ("llama", None)], ids=["qwen chat", "llama chat", "base"]
)
def test_one_command_trains_your_own_model_on_your_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, template: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", kind, template)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM))
    quick = ["train.steps=2", "train.samples_per_prompt=2", "observe.tensorboard=false", "rollout.max_new_tokens=16"]
    result = CliRunner().invoke(app, ["train", "own", "model.path=model", "data.source=mine.jsonl", *quick])
    assert result.exit_code == 0, result.output
    assert "2 steps" in result.output
    config = launch.RunFolder.open("runs/own", exclusive=False).config
    assert config.data.columns == {"prompt": "question"} and config.data.answer_pattern is not None
    assert [spec.function for spec in config.rewards.functions] == ["last_number"]
    assert (config.data.held_out, config.rollout.max_new_tokens) == (3, 16)
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens <= 256


def test_without_a_model_or_data_the_command_to_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for overrides, missing in ((["data.source=chain"], "model.path"), (["model.path=x"], "data.source")):
        with pytest.raises(ConfigError, match=f"{missing} is missing") as error:
            launch.train("own", overrides)
        assert error.value.remedy == "tidemill train own model.path=FOLDER data.source=FILE"
    assert not (tmp_path / "runs").exists()


def test_what_the_user_gives_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", "llama", None)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM))
    given = ["data.held_out=5", "eval.size=2", "rewards=exact", "data.max_prompt_tokens=40", "train.prompts_per_step=4"]
    launch.train(
        "own",
        ["model.path=model", "data.source=mine.jsonl", *given, "rollout.max_new_tokens=8", "train.steps=1",
         "train.samples_per_prompt=2", "observe.tensorboard=false"],
    )  # fmt: skip
    config = launch.RunFolder.open("runs/own", exclusive=False).config
    assert (config.data.held_out, config.eval.size, config.data.max_prompt_tokens) == (5, 2, 40)
    assert config.rewards.functions[0].function == "exact" and config.train.prompts_per_step == 4


def test_a_row_without_an_answer_does_not_change_which_reward_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", "llama", None)
    lines = [{k: v for k, v in row.items() if k != "answer" or i % 5} for i, row in enumerate(GSM)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    quick = ["train.steps=1", "train.samples_per_prompt=2", "observe.tensorboard=false", "rollout.max_new_tokens=8"]
    given = ["model.path=model", "data.source=mine.jsonl", "train.prompts_per_step=2", *quick]
    with pytest.raises(DataError, match=r"mine.jsonl:1: .*does not match|mine.jsonl:1: the reward 'last_number'"):
        launch.train("own", given)
    summary = launch.train("own", [*given, "data.on_bad_row=skip"])
    config = launch.RunFolder.open("runs/own", exclusive=False).config
    assert config.rewards.functions[0].function == "last_number" and config.data.answer_pattern is not None
    assert summary.bad_rows == 6
