"""The rollout engine inside TRL's trainers: tokens, log-probs, groups, masks, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from tests.rollout.test_generation import SMALL
from tidemill import imports
from tidemill.bridges.trl import give_back, pack, rollout, take_over, unpack
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
    before = model.lm_head.weight.detach().clone()
    trainer = trl_trainer("GRPO", model, tmp_path, rollout_func=rollout())
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before) and trainer.state.global_step == 2


def trl_trainer(kind: str, model: Any, folder: Any, **more: Any) -> Any:
    trl = pytest.importorskip("trl", reason="trl is not installed: make peers")
    from datasets import Dataset

    model.save_pretrained(folder / "reference")
    model.config._name_or_path = str(folder / "reference")  # where the trainer finds its reference policy
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=6, max_steps=2,
        report_to=[], use_cpu=True, learning_rate=1e-3, logging_steps=1, temperature=0.7, bf16=False,
        **more.pop("args", {}),
    )  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model, reward_funcs=lambda completions, **_: [float(len(c) % 3) for c in completions], args=args,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}, {"prompt": "20+30="}] * 8),
        processing_class=make_tokenizer(TinyModel(alphabet=ALPHABET)), **more,
    )  # fmt: skip


def padded_rows() -> dict[str, Any]:
    """What TRL's loss is given: two groups of two samples, padded, the last without a completion."""
    torch.manual_seed(5)
    prompt = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9], [7, 8, 9]])
    completion = torch.tensor([[3, 4, 5, 0], [6, 0, 0, 0], [9, 8, 7, 6], [0, 0, 0, 0]])
    lengths = torch.tensor([3, 1, 4, 0])
    return {
        "prompt_ids": prompt, "prompt_mask": (prompt > 0).long(), "completion_ids": completion,
        "completion_mask": (torch.arange(4) < lengths[:, None]).long(), "num_items_in_batch": torch.tensor(8),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]), "old_per_token_logps": -torch.rand(4, 4),
        "ref_per_token_logps": -torch.rand(4, 4), "old_logps": -torch.rand(4),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_have_the_loss_and_gradient_of_padded_ones(
    kind: str, checkpointing: bool, model: Any, tmp_path: Any
) -> None:
    take_over(model)
    options = {"beta": 0.1, "gradient_checkpointing": checkpointing}
    trainer = trl_trainer(kind, model, tmp_path, args=options)
    trainer.current_gradient_accumulation_steps = 1
    found = []
    for change in (lambda _: None, pack, unpack):
        change(trainer)
        model.zero_grad()
        loss = trainer._compute_loss(model.train(), padded_rows())
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    for loss, gradients in found[1:]:
        assert torch.allclose(loss, found[0][0], atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, found[0][1]))


def test_packing_refuses_what_it_cannot_do(model: Any, tmp_path: Any) -> None:
    trainer = trl_trainer("GRPO", model, tmp_path)
    with pytest.raises(ConfigError, match="attention that transformers' generate cannot use"):
        pack(trainer)
    with pytest.raises(ConfigError, match="nothing to pack"):
        pack(SimpleNamespace())
    trainer = trl_trainer("GRPO", model, tmp_path, rollout_func=rollout())
    pack(trainer)
    with pytest.raises(ConfigError, match=r"images \(pixel_values\)"):
        trainer._get_per_token_logps_and_entropies(
            model, torch.ones(1, 2), torch.ones(1, 2), 1, pixel_values=torch.ones(1)
        )


def test_grpo_trainer_learns_from_packed_rows_with_adapters(model: Any, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = trl_trainer("GRPO", model, tmp_path, rollout_func=rollout(), peft_config=lora, args={"beta": 0.1})
    pack(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    after = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    assert trainer.state.global_step == 2 and any(not torch.equal(a, b) for a, b in zip(before, after))


def test_rloo_trainer_generates_with_the_engine_and_learns_from_packed_rows(model: Any, tmp_path: Any) -> None:
    trainer = trl_trainer("RLOO", model, tmp_path)
    engine = take_over(trainer.model)
    pack(trainer)
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before) and trainer.state.global_step == 2
    assert engine._native.version == 2  # each of its two batches was rolled out by the engine


def test_online_dpo_trainer_generates_with_the_engine(model: Any, tmp_path: Any) -> None:
    pytest.importorskip("trl", reason="trl is not installed: make peers")
    from datasets import Dataset
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_new_tokens=6, max_steps=2, report_to=[],
        use_cpu=True, bf16=False, learning_rate=1e-3, logging_steps=1,
    )  # fmt: skip
    trainer = OnlineDPOTrainer(
        model, args=args, train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        processing_class=make_tokenizer(TinyModel(alphabet=ALPHABET)),
    )  # fmt: skip
    engine = take_over(trainer.model)
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before) and trainer.state.global_step == 2
    assert engine._native.version == 2
