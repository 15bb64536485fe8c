"""The model in the box is a real one: it comes by pip, chats in English, and stops where its turn ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.models.gguf.sentences import SENTENCES
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.errors import MissingExtra, TidemillError
from tidemill.models.box import find
from tidemill.rollout.engine import Sampling
from tidemill.run.trained import Speaker, open_trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return find.get("smollm2-135m")
    except TidemillError as error:
        if isinstance(error, MissingExtra) or "cannot be fetched" in error.message:
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_its_special_tokens_and_template_are_those_of_the_instruct_model(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token is not None and len(tokenizer) == 49152
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_its_tokenizer_gives_every_text_back_and_cuts_digits_apart(tokenizer: Any) -> None:
    for text in SENTENCES:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("in 2025") == ["in", "Ġ", "2", "0", "2", "5"]


def test_its_folder_bears_no_mark_of_quantisation(folder: Path) -> None:
    assert "quantization" not in (folder / "config.json").read_text()
    with safe_open(folder / "model.safetensors", "np") as weights:
        values = weights.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert values.dtype == np.float32 and 0.01 < float(values.std()) < 1


def test_it_answers_a_question_and_stops_by_itself(folder: Path) -> None:
    torch.set_num_threads(1)
    speaker = Speaker(open_trained("smollm2-135m", "cpu"), Sampling(temperature=0.0, max_tokens=64))
    replies = list(speaker.chat(iter(["What is the capital of France?", "What is the capital of Italy?"])))
    assert "Paris" in replies[0] and "Rome" in replies[1]
    done = speaker.answer(speaker.encode([{"role": "user", "content": "What is the capital of France?"}]))[0]
    assert done.tokens[-1] == 2 and len(done.tokens) < 20


def test_it_is_listed_shown_and_asked_on_the_command_line(folder: Path) -> None:
    run = CliRunner().invoke
    assert "smollm2-135m" in run(app, ["models", "list"]).output
    assert "134,515,008 parameters" in run(app, ["models", "show", "smollm2-135m"]).output
    chat = run(app, ["generate", "smollm2-135m", "-i"], input="What is 2+2?\n\n")
    assert chat.exit_code == 0 and "4" in chat.output
