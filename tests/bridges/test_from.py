"""Recipes from TRL's and verl's settings: what is mapped, what is left out, and that the recipe passes the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidemill.bridges.recipes.convert import convert
from tidemill.bridges.recipes.given import of_shell, read
from tidemill.check.precheck import problems
from tidemill.cli import app
from tidemill.errors import ConfigError
from tidemill.recipe import load as recipes
from tidemill.recipe.schema import tree

FILES = sorted((Path(__file__).parent / "configs").glob("*.*"))
# What no recipe can pass on a machine without the model, the data, the devices and the disk for them.
ABSENT = (
    "model.path",
    "data.source",
    "data.eval_source",
    "device",
    "checkpoint",
    "disk",
    "reward model sfairXC",
)

# File → some settings that it must come to.
WANTED: dict[str, dict[str, Any]] = {
    "verl-grpo-3b": {
        "algorithm.name": "grpo", "algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "k3",
        "train.updates_per_step": 4, "train.samples_per_prompt": 5, "data.on_bad_row": "skip",
        "learn.parallel.fsdp": 8, "train.epochs": 15.0,
    },
    "verl-grpo-7b-megatron": {
        "learn.parallel.tp": 2, "learn.parallel.pp": 2, "learn.parallel.fsdp": 2, "rollout.tp": 2,
        "algorithm.name": "grpo",
    },
    "verl-grpo-671b": {
        "learn.parallel.pp": 16, "learn.parallel.ep": 16, "learn.parallel.fsdp": 16,
        "train.tokens_per_microbatch": 6144,
        "learn.optimizer_on_host": True, "checkpoint.every": 0, "eval.before": False, "rollout.top_k": 0,
    },
    "verl-ppo-7b-rm": {
        "algorithm.name": "ppo", "algorithm.critic.lr": 1e-5, "algorithm.kl.place": "reward",
        "algorithm.kl.estimator": "k1",
        "rewards.functions": [{"function": "model", "args": {"path": "sfairXC/FsfairX-Gemma2-RM-v0.1"}}],
    },
    "verl-ppo-7b-sequence": {"learn.parallel.cp": 2, "learn.parallel.fsdp": 4, "algorithm.critic.lam": 1.0},
    "verl-dapo-32b": {
        "algorithm.clip_high": 0.28, "algorithm.dual_clip": 10.0, "algorithm.aggregation": "token_mean",
        "algorithm.dynamic_sampling": True, "algorithm.overlong.buffer": 4096, "rollout.max_new_tokens": 20480,
        "train.updates_per_step": 16, "learn.parallel.cp": 8, "learn.parallel.fsdp": 16, "cluster.executor": "ray",
    },
    "verl-kl-cov-7b": {"algorithm.covariance.mode": "kl", "algorithm.covariance.share": 0.002, "train.steps": 400},
    "trl-gspo": {
        "algorithm.name": "gspo", "algorithm.clip_low": 3e-4, "learn.lora_modules": ["q_proj", "v_proj"],
        "train.prompts_per_step": 8, "train.updates_per_step": 4, "learn.lora_rank": 16, "model.dtype": "bfloat16",
    },
    "trl-grpo-tldr": {
        "model.path": "Qwen/Qwen3-14B", "data.source": "trl-lib/tldr", "learn.lora_rank": 8, "learn.recompute": "full",
        "train.prompts_per_step": 8, "train.samples_per_prompt": 2, "algorithm.kl.coef": 0.1,
    },
    "trl-dpo": {
        "algorithm.name": "dpo", "algorithm.preference.beta": 0.1, "train.prompts_per_step": 16, "train.steps": 1000,
    },
    "trl-sft": {"algorithm.name": "sft", "learn.clip_norm": 0.3, "rollout.max_new_tokens": 2048, "learn.lora_rank": 16},
    "trl-rloo": {
        "algorithm.name": "rloo", "train.passes_per_step": 2, "train.prompts_per_step": 8, "observe.loggers": ["wandb"],
    },
}  # fmt: skip


def framework(file: Path) -> str:
    return file.stem.partition("-")[0]


def test_every_kept_config_has_its_expectations() -> None:
    assert {file.stem for file in FILES} == set(WANTED) and len(FILES) == 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_becomes_a_recipe_that_passes_the_checks(file: Path, tmp_path: Path) -> None:
    made = convert(framework(file), file)
    (tmp_path / "made.yaml").write_text(made.text)
    config = recipes.load(tmp_path / "made.yaml").config
    assert config == made.recipe.config
    found = config.model_dump(mode="json")
    for key, wanted in WANTED[file.stem].items():
        value: Any = found
        for part in key.split("."):
            value = value[part]
        if key == "rewards.functions":
            value = [{"function": f["function"], "args": f["args"]} for f in value]
        assert value == wanted, key
    wrong = [p for p in problems(config, config.model) if not any(word in p for word in ABSENT)]
    assert not wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_given_is_lost_without_a_word(file: Path) -> None:
    """Every setting is in the recipe, or listed, or one whose reason is that it says nothing (a log, a default)."""
    given, made = read(file), convert(framework(file), file)
    listed = {key for key in given if f"#   {key} = " in made.text}
    assert set(made.dropped) == listed | (set(made.dropped) - set(given))
    assert all(why for why in made.dropped.values())


def test_an_unknown_setting_is_listed(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m trainer.novelty=3\n"
    )
    made = convert("verl", tmp_path / "run.sh")
    assert made.dropped["trainer.novelty"] == "no counterpart is known"
    assert "#   trainer.novelty = 3: no counterpart is known" in made.text


def test_every_key_that_is_written_exists() -> None:
    from tidemill.bridges.recipes import trl, verl

    for names in (trl.NAMES, verl.NAMES):
        ours = {value[0] if isinstance(value, tuple) else value for value in names.values()} - {""}
        assert ours <= set(tree())


def test_a_script_is_read_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('ran', 'w')\nGRPOConfig(learning_rate=1e-4)\n")
    assert convert("trl", tmp_path / "train.py").recipe.config.learn.lr == 1e-4
    assert not (tmp_path / "ran").exists()
    assert of_shell("A=$((2 * 3 + (1)))\nB=$((__import__))\nx a.b=$A c.d=$B e.f=$(date)") == {
        "a.b": 7, "c.d": "$((__import__))", "e.f": "$(date)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "- 1\n- 2", "holds no settings"), ("a.json", "{", "is not JSON"), ("a.py", "def (", "is not Python"),
        ("a.sh", "echo hello", "no settings that can be read"), ("a.yaml", ": : :\n\t", "is not YAML"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_a_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        convert("trl", tmp_path / name)


def test_the_command_prints_or_writes_and_never_overwrites(tmp_path: Path) -> None:
    file = FILES[0]
    printed = CliRunner().invoke(app, ["from", framework(file), str(file)])
    assert printed.exit_code == 0 and "algorithm:" in printed.output
    out = tmp_path / "mine.yaml"
    assert CliRunner().invoke(app, ["from", framework(file), str(file), "--to", str(out)]).exit_code == 0
    assert out.read_text() == printed.output
    again = CliRunner().invoke(app, ["from", framework(file), str(file), "--to", str(out)])
    assert isinstance(again.exception, ConfigError)
    wrong = CliRunner().invoke(app, ["from", "vrel", str(file)])
    assert isinstance(wrong.exception, ConfigError) and "did you mean verl" in str(wrong.exception)
