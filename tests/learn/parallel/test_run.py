"""A recipe starts its ranks by itself, computes the run of one rank, and is resumed on another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.cluster.start.ranked import check_here
from tidemill.errors import ConfigError
from tidemill.reward.verifiers.model import LoadedRewardModel
from tidemill.run.start import resume
from tidemill.run.trained import export, open_trained

pytestmark = pytest.mark.slow

RECIPE: dict[str, Any] = {
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64, "window": 32,
                       "alphabet": "01234567="}},
    "data": {"source": "reversal", "max_prompt_tokens": 8},
    "rollout": {"max_new_tokens": 8},
    "rewards": [{"function": "length", "args": {"target": 4, "unit": "characters"}}],
    "algorithm": {"name": "grpo", "kl": {"coef": 0.01}, "old_logprobs": "recompute"},
    "train": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4},
    "learn": {"lr": 1.0e-3},
    "eval": {"size": 0},
    "checkpoint": {"every": 1, "keep": 3},
    "observe": {"tensorboard": False, "progress": "off"},
    "device": "cpu",
    "threads": 1,
}  # fmt: skip


def train(folder: Path, name: str, *over: str) -> list[dict[str, Any]]:
    own = {**RECIPE, "folder": str(folder), "name": name}
    tidemill.train(own, list(over))
    return metrics(folder / name)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_ranks_makes_the_steps_of_one_rank_and_is_resumed_on_others(tmp_path: Path) -> None:
    one = train(tmp_path, "one")
    many = train(tmp_path, "many", "learn.parallel.fsdp=2", "algorithm.kl.parallel.tp=2", "flow.hand_over=all")
    assert len(one) == len(many) == 3
    for a, b in zip(one, many):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy"):
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
        assert b["slowest_rank"] in (0.0, 1.0)
    assert all(line["handed_over/state_bytes"] > 0 for line in many[1:])  # on both ranks, while rollout works
    assert open_trained(tmp_path / "many", "cpu").step == 3

    # Stopped after two steps, resumed on another layout: the third step is the one that was never interrupted.
    again = tmp_path / "again"
    train(again, "many", "learn.parallel.fsdp=2", "train.steps=2")
    run = again / "many"
    config = (run / "config.yaml").read_text().replace("fsdp: 2", "fsdp: 1").replace("tp: 1", "tp: 2")
    (run / "config.yaml").write_text(config.replace("steps: 2", "steps: 3", 1))
    (run / "summary.json").unlink()
    resume(run)
    assert metrics(run)[-1]["loss"] == pytest.approx(many[-1]["loss"], abs=1e-4)


def test_a_critic_on_ranks_makes_the_steps_of_one_rank_and_is_resumed_on_one(tmp_path: Path) -> None:
    ppo = ["algorithm.name=ppo", "algorithm.critic.lr=3.0e-3", "train.passes_per_step=2"]
    one = train(tmp_path, "one", *ppo)
    sizes = ["learn.parallel.fsdp=2", "algorithm.critic.parallel.tp=2"]
    many = train(tmp_path, "many", *ppo, *sizes)
    names = ("reward", "loss", "grad_norm", "critic/loss", "critic/grad_norm", "critic/explained_variance")
    for a, b in zip(one, many, strict=True):
        for name in names:
            assert b[name] == pytest.approx(a[name], abs=1e-4, rel=1e-4), name
    assert one[-1]["critic/loss"] != one[0]["critic/loss"]

    # What ranks saved, one process takes up, critic and all.
    again = tmp_path / "again"
    train(again, "many", *ppo, *sizes, "train.steps=2")
    run = again / "many"
    config = (run / "config.yaml").read_text().replace("fsdp: 2", "fsdp: 1").replace("tp: 2", "tp: 1")
    (run / "config.yaml").write_text(config.replace("steps: 2", "steps: 3", 1))
    (run / "summary.json").unlink()
    resume(run)
    for name in names:
        assert metrics(run)[-1][name] == pytest.approx(many[-1][name], abs=1e-4, rel=1e-4), name


def test_a_reward_model_on_ranks_is_one_ranks_and_can_be_exported(tmp_path: Path) -> None:
    over = ["algorithm={name: reward_model}", "data.args={pairs: true}", "train.samples_per_prompt=1",
            "eval={before: false, after: false}"]  # fmt: skip
    one = train(tmp_path, "one", *over)
    many = train(tmp_path, "many", *over, "learn.parallel.fsdp=2")
    for a, b in zip(one, many, strict=True):
        for name in ("loss", "grad_norm", "margin"):
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
    rows = [[3, 4, 5, 1], [6, 3, 1]]
    scores = []
    for name in ("one", "many"):
        export(tmp_path / name, tmp_path / f"{name}-exported")
        scores.append(LoadedRewardModel(str(tmp_path / f"{name}-exported")).rewards(rows, 100))
    assert scores[1] == pytest.approx(scores[0], abs=1e-5) and scores[0] != [0.0, 0.0]


def test_adapters_and_their_running_mean_on_ranks_make_the_steps_of_one_rank(tmp_path: Path) -> None:
    lora = ["learn.lora_rank=4", "learn.optimizer=muon", "learn.ema=0.5", "eval.size=8", "eval.every=2"]
    one = train(tmp_path, "one", *lora)
    many = train(tmp_path, "many", *lora, "learn.parallel.fsdp=2")
    assert sum("eval/pass@1" in line for line in one) > 1
    for a, b in zip(one, many, strict=True):
        for name in {"reward", "loss", "grad_norm", "kl", "eval/reward", "eval/pass@1"} & a.keys():
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
    done = [json.loads((tmp_path / name / "summary.json").read_text())["pass_at_after"] for name in ("one", "many")]
    assert done[1] == done[0]


def test_a_steered_divergence_and_a_rounded_reference_work_on_ranks(tmp_path: Path) -> None:
    kl = ["algorithm.kl={coef: 0.05, target: 0.001, horizon: 50, weights: int8}"]
    one = train(tmp_path, "one", *kl)
    many = train(tmp_path, "many", *kl, "learn.parallel.fsdp=2")
    assert one[-1]["kl_coef"] != one[0]["kl_coef"]
    for a, b in zip(one, many, strict=True):
        for name in ("loss", "grad_norm", "kl", "kl_coef"):
            assert b[name] == pytest.approx(a[name], abs=1e-4), name


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    check_here(8, "cpu")
    check_here(2, "cuda")
    with pytest.raises(ConfigError, match="4 ranks, but this machine has 2 devices"):
        check_here(4, "cuda")
