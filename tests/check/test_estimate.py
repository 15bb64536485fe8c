import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tidemill.errors import human
from tidemill.estimate import plan as plans
from tidemill.models.shape import SPECIAL_TOKENS, shape_of
from tidemill.models.tiny import make_config
from tidemill.recipe import load as recipe
from tidemill.recipe.config import ModelSettings, TinyModel

CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def make(tiny: TinyModel) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(
        CONFIGS[tiny.architecture](
            vocab_size=len(set(tiny.alphabet)) + SPECIAL_TOKENS,
            hidden_size=tiny.hidden,
            intermediate_size=tiny.intermediate,
            num_hidden_layers=tiny.layers,
            num_attention_heads=tiny.heads,
            num_key_value_heads=tiny.kv_heads,
            head_dim=tiny.hidden // tiny.heads,
            tie_word_embeddings=True,
        ),
        attn_implementation="sdpa",
    )


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_small_mixtures_parameters_are_counted_exactly(architecture):
    tiny = TinyModel(architecture=architecture, layers=2, experts=3)
    words = len(set(tiny.alphabet)) + SPECIAL_TOKENS
    made = AutoModelForCausalLM.from_config(make_config(tiny, words), attn_implementation="sdpa")
    assert shape_of(ModelSettings(tiny=tiny)).parameters == made.num_parameters()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_small_models_parameters_are_counted_exactly(architecture):
    tiny = TinyModel(architecture=architecture, layers=2)
    assert shape_of(ModelSettings(tiny=tiny)).parameters == make(tiny).num_parameters()


def test_a_folders_parameters_are_counted_from_headers(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}')
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert shape_of(ModelSettings(path=str(tmp_path))).parameters == 24


def test_a_broken_weight_file_gives_no_count_instead_of_failing(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}')
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert shape_of(ModelSettings(path=str(tmp_path))).parameters is None


def test_the_plan_says_what_the_batch_settings_come_to():
    overrides = ["train.prompts_per_step=8", "train.samples_per_prompt=4", "train.updates_per_step=2", "train.steps=10"]
    overrides += ["data.max_prompt_tokens=30", "rollout.max_new_tokens=20", "train.tokens_per_microbatch=400"]
    rows = {label: value for label, value, _ in plans.plan(recipe.load({}, overrides).config, parameters=1000)}
    assert rows["samples per step"] == "32"
    assert rows["updates per step"] == "2"
    assert rows["samples per update"] == "16"
    assert rows["micro-batches per update"] == "at most 2"
    assert rows["tokens per step"] == "at most 1,600"
    assert rows["parameters"] == "1,000"
    assert "memory, by estimate" in rows


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (34_000, "34 kB"), (2.5e9, "2.5 GB"), (9e12, "9.0 TB")],
)
def test_sizes_are_said_for_people(size, text):
    assert human(size) == text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"intermediate_size": [128, 96]}, {"intermediate": 128}),  # Gemma 3n: one for each layer
        ({"num_experts_per_tok": [2, 2], "num_experts": [4, 4], "moe_intermediate_size": [32, 32]}, {"experts": 4}),
        ({"num_key_value_heads": [2, 1], "head_dim": None}, {"kv_heads": 2, "head_dim": 16}),
        ({"max_position_embeddings": "long", "vocab_size": None}, {"window": None}),
    ],
)
def test_sizes_that_differ_between_layers_or_are_no_numbers_do_not_stop_the_estimate(tmp_path, changes, wanted):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**sizes, **changes}}), encoding="utf-8")
    shape = shape_of(ModelSettings(path=str(tmp_path)))
    assert {name: getattr(shape, name) for name in wanted} == wanted
