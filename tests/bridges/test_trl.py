"""The rollout engine inside TRL's trainers: tokens, log-probs, groups, masks, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from tests.rollout.test_generation import SMALL
from tidemill import imports
from tidemill.bridges.trl import give_back, rollout, take_over
from tidemill.environment.api import Turn
from tidemill.errors import ConfigError
from tidemill.models.tiny import make_tokenizer
from tidemill.recipe.config import TinyModel

ALPHABET = '0123456789+=<>abcdefghijklmnopqrstuvwxyz_/"{}:, '


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, head_dim=8), attn_implementation="sdpa")


def trainer_of(model: Any, **args: Any) -> Any:
    """What a rollout function reads of a trainer."""
    usual = {
        "max_completion_length": 6, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "generation_kwargs": None, "seed": 1,
    }  # fmt: skip
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda m: m),
        processing_class=make_tokenizer(TinyModel(alphabet=ALPHABET)),
        args=SimpleNamespace(**usual | args),
        state=SimpleNamespace(global_step=0),
        chat_template=None,
        chat_template_kwargs={},
        tools=None,
    )


def test_each_prompt_of_the_list_has_its_answer_and_repeated_ones_differ(model: Any) -> None:
    made = rollout()(["1+1="] * 3 + ["2+3="] * 3, trainer_of(model))
    assert [len(made[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [6, 6, 6]
    assert made["prompt_ids"][0] == made["prompt_ids"][2] != made["prompt_ids"][3]
    assert len({tuple(ids) for ids in made["completion_ids"][:3]}) > 1
    for prompt, answer, logprobs in zip(made["prompt_ids"], made["completion_ids"], made["logprobs"]):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / 0.7
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert torch.tensor(logprobs).sub(wanted).abs().max() < 1e-4


def test_the_trainers_weights_of_now_are_used_and_its_model_is_left_as_it_was(model: Any) -> None:
    made, trainer = rollout(), trainer_of(model, temperature=1e-4, max_completion_length=4)
    first = made(["1+1="], trainer)["completion_ids"]
    with torch.no_grad():
        model.lm_head.weight.neg_()
    trainer.state.global_step = 1
    second = made(["1+1="], trainer)["completion_ids"]
    assert first != second and model.config._attn_implementation == "sdpa" and model.training
    model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()


def test_tools_are_called_in_the_rollout_and_what_they_give_is_masked(model: Any) -> None:
    asked: list[str] = []

    def look(text: str) -> str:
        """Look something up."""
        asked.append(text)
        return "ok"

    class Calls:
        """Says something after each turn, and ends with a reward."""

        def __init__(self, task: Any) -> None:
            self.turns = 0

        def reset(self) -> str:
            return ""

        def step(self, text: str) -> Turn:
            self.turns += 1
            return Turn("go on" if self.turns < 3 else "", reward=1.0, is_done=self.turns == 3)

    imports.keep("python:Calls", Calls)
    trainer = trainer_of(model, max_completion_length=40)
    options = {"name": "python:Calls", "max_turn_tokens": 4}
    made = rollout(environment=options)(["3"] * 4, trainer)
    for mask, ids, logprobs in zip(made["env_mask"], made["completion_ids"], made["logprobs"]):
        assert len(mask) == len(ids) == len(logprobs)
        assert 0 in mask and 1 in mask and all(p == 0 for p, m in zip(logprobs, mask) if not m)
    assert made["env_reward"] == [3.0] * 4
    assert len(rollout(tools=[look])(["1"] * 2, trainer)["env_mask"]) == 2
    with pytest.raises(ConfigError, match="give one of them"):
        rollout(tools=[look], environment="nim")


def test_generate_gives_what_transformers_gives(model: Any) -> None:
    model.eval()
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 10, 11, 12, 13], [9, 10, 11, 12, 13]])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    how = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=[1, 7])
    wanted = model.generate(**given, generation_config=how)
    take_over(model)
    assert torch.equal(model.generate(**given, generation_config=how), wanted)
    sampled = GenerationConfig(max_new_tokens=9, do_sample=True, pad_token_id=0, num_return_sequences=2)
    found = model.generate(**given, generation_config=sampled)
    assert len(found) == 6 and torch.equal(found[:, :5], ids.repeat_interleave(2, 0))
    assert len({tuple(row) for row in found[2:].tolist()}) > 1
    with pytest.raises(ConfigError, match="num_beams=4"):
        model.generate(**given, generation_config=how, num_beams=4)
    give_back(model)
    assert torch.equal(model.generate(**given, generation_config=how), wanted)


def test_adapters_of_peft_are_part_of_the_model(model: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    trainer = trainer_of(adapted)
    made = rollout()(["1+1="] * 2, trainer)
    adapted.eval()
    for prompt, answer, logprobs in zip(made["prompt_ids"], made["completion_ids"], made["logprobs"]):
        logits = adapted(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / 0.7
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert torch.tensor(logprobs).sub(wanted).abs().max() < 1e-4


def test_a_model_in_pieces_is_refused(model: Any) -> None:
    model.lm_head.weight.ds_id = 3
    with pytest.raises(ConfigError, match="lies in pieces over the processes"):
        rollout()(["1+1="], trainer_of(model))


def test_grpo_trainer_itself_rolls_out_and_learns(model: Any, tmp_path: Any) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed: make peers")
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
        max_steps=2, report_to=[], use_cpu=True, learning_rate=1e-3, logging_steps=1,
    )  # fmt: skip
    before = model.lm_head.weight.detach().clone()
    trainer = trl.GRPOTrainer(
        model, reward_funcs=lambda completions, **_: [float(i % 2) for i, _ in enumerate(completions)],
        args=args, train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
        processing_class=make_tokenizer(TinyModel(alphabet=ALPHABET)), rollout_func=rollout(),
    )  # fmt: skip
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before) and trainer.state.global_step == 2
