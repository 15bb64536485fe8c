"""Each algorithm through the whole flow, a few steps on a decoder of 0.1 M parameters."""

import json
import math
from pathlib import Path

import pytest

import tidemill
from tidemill.algorithms.shared.registry import every

SHAPE = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 40}
TINY = {**SHAPE, "alphabet": "0123456789+-= "}


def run(folder: Path, name: str, steps: int = 2, **more) -> list[dict]:
    """The metrics of every step."""
    recipe = {
        "folder": str(folder),
        "name": f"{name}-{len(list(folder.iterdir()))}",
        "threads": 1,
        "model": {"tiny": TINY},
        "data": {"source": "chain", "args": {"terms": 2, "max_value": 4, "pairs": True}, "max_prompt_tokens": 12},
        "rollout": {"max_new_tokens": 6},
        "rewards": "last_number",
        "train": {"steps": steps, "prompts_per_step": 6, "samples_per_prompt": 4, "tokens_per_microbatch": 100},
        "learn": {"lr": 1e-3},
        "eval": {"size": 4, "before": False, "after": False},
        "observe": {"tensorboard": False},
        "algorithm": {"name": name, **more.pop("algorithm", {})},
    }
    for key, value in more.items():
        before = recipe.get(key, {})
        recipe[key] = {**(before if isinstance(before, dict) else {}), **value}
    tidemill.train(recipe)
    lines = (folder / recipe["name"] / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    import torch

    from tidemill.models.load import load, save_folder
    from tidemill.recipe.config import ModelSettings

    loaded = load(ModelSettings(tiny=TINY), seed=7, device=torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, folder / "model")
    return str(folder / "model")


@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies])
def test_every_algorithm_makes_steps_with_finite_losses(name: str, tmp_path, teacher) -> None:
    algorithm = {"teacher": teacher} if name == "distill" else {}
    for metrics in run(tmp_path, name, algorithm=algorithm):
        assert math.isfinite(metrics["loss"]) and metrics["skipped_updates"] == 0


@pytest.mark.parametrize("name", ["dapo", "ppo", "reinforce_pp", "remax", "kto"])
def test_streaming_computes_the_same_step(name: str, tmp_path) -> None:
    """Also with stages that wait for the whole step, drop rows, or put new ones in."""
    runs = [run(tmp_path, name, flow={"schedule": s}) for s in ("sync", "streamed")]
    for sync, streamed in zip(*runs):
        for metric in ("loss", "grad_norm"):
            assert streamed[metric] == pytest.approx(sync[metric], rel=1e-4, abs=1e-6)


def test_dynamic_sampling_keeps_the_batch_full_and_counts_what_it_dropped(tmp_path) -> None:
    metrics = run(tmp_path, "dapo", algorithm={"dynamic_sampling_rounds": 400})
    for step in metrics:
        assert step["dropped_groups"] == step["refilled_groups"] > 0
        assert step["learned_samples"] == 6 * 4
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_the_critic_alone_learns_while_it_warms_up(tmp_path) -> None:
    metrics = run(tmp_path, "ppo", steps=3, algorithm={"critic": {"warmup_steps": 2}})
    assert ["grad_norm" in step for step in metrics] == [False, False, True]
    assert all("critic/explained_variance" in step for step in metrics)


def test_a_critic_may_learn_more_often_from_each_sample(tmp_path) -> None:
    settings = {"critic": {"passes": 3, "warmup_steps": 1, "value_clip": None}}
    metrics = run(tmp_path, "ppo", steps=2, algorithm=settings, learn={"schedule": "linear", "lr": 1e-2})
    assert ["grad_norm" in step for step in metrics] == [False, True]  # the warm-up is counted in steps, not passes
    assert metrics[-1]["critic/lr"] < 5e-3 < metrics[0]["critic/lr"]  # the schedule goes over all its updates


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "reinforce_pp"])
def test_a_learning_rate_of_zero_leaves_every_ratio_at_one(name: str, tmp_path) -> None:
    train = {"updates_per_step": 3, "passes_per_step": 2}
    for step in run(tmp_path, name, train=train, learn={"lr": 0.0, "weight_decay": 0.0}):
        for metric in ("ratio_mean", "ratio_max", "ratio_min"):
            assert step[metric] == pytest.approx(1.0, abs=1e-4)
        assert step["clip_share_low"] == step["clip_share_high"] == 0.0


def test_each_part_of_the_reward_is_logged_on_its_own(tmp_path) -> None:
    functions = ["last_number", {"function": "length", "weight": 0.1, "args": {"target": 3}, "label": "short"}]
    (step,) = run(tmp_path, "grpo", steps=1, rewards={"functions": functions})
    assert 0 < step["reward/short"] <= 1 and 0 <= step["reward/last_number"] <= 1
    assert step["reward"] == pytest.approx(step["reward/last_number"] + 0.1 * step["reward/short"])


def test_a_run_without_its_teacher_is_refused(tmp_path) -> None:
    with pytest.raises(tidemill.errors.ConfigError, match="needs a teacher"):
        run(tmp_path, "distill")


def test_covariance_modes_and_reference_terms_run(tmp_path) -> None:
    for mode in ("clip", "kl"):
        settings = {
            "covariance": {"mode": mode, "share": 0.1, "low": 0.0},
            "kl": {"coef": 0.01, "place": "reward"},
            "old_logprobs": "recompute",
            "rollout_correction": "token",
        }
        assert math.isfinite(run(tmp_path, "grpo", algorithm=settings)[-1]["loss"])


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_kl_coefficient_is_steered_towards_its_target(place: str, tmp_path) -> None:
    kl = {"coef": 0.1, "place": place, "target": 10.0, "horizon": 24}
    coefs = [step["kl_coef"] for step in run(tmp_path, "grpo", steps=3, algorithm={"kl": kl})]
    assert coefs == pytest.approx([0.08, 0.064, 0.0512])  # far below the target: a fifth less each step


def test_a_steered_coefficient_is_the_one_that_the_loss_has(tmp_path) -> None:
    kl = {"coef": 0.5, "place": "loss", "target": 10.0, "horizon": 24}
    steps = run(tmp_path, "grpo", steps=4, algorithm={"kl": kl, "aggregation": "token_mean"}, learn={"lr": 1e-2})
    for coef, step in zip([0.5, *(s["kl_coef"] for s in steps)], steps):
        assert step["loss"] == pytest.approx(step["policy_loss"] + coef * step["kl"], abs=1e-6)
    assert steps[-1]["kl"] > 1e-4  # else the coefficient would not show


def test_a_reset_reference_is_where_the_policy_is(tmp_path) -> None:
    held = run(tmp_path, "grpo", steps=4, algorithm={"kl": {"coef": 0.001}})
    reset = run(tmp_path, "grpo", steps=4, algorithm={"kl": {"coef": 0.001, "reset_every": 1}})
    assert all(abs(step["kl"]) < 1e-6 for step in reset)
    assert held[-1]["kl"] > 1e-6


def test_problems_grow_harder_once_they_are_solved(tmp_path) -> None:
    from tidemill.data.curriculum import open_curriculum
    from tidemill.recipe.config import CurriculumSettings as Settings

    source = open_curriculum("chain", {"max_value": 4}, Settings(setting="terms", values=(2, 3, 4), window=100), seed=0)
    terms = lambda: {source.example(i).meta["terms"] for i in range(20)}  # noqa: E731
    assert terms() == {2}
    assert not source.report(0.9, 60) and source.report(0.9, 60)
    assert terms() == {3}
    saved = source.state()
    assert source.report(0.0, 100) and terms() == {2}
    source.restore(saved)
    assert terms() == {3}
    curriculum = {"setting": "terms", "values": [2, 3], "rise_above": 0.0, "window": 1}
    data = {"args": {"max_value": 4}, "curriculum": curriculum, "max_prompt_tokens": 12}
    assert run(tmp_path, "grpo", data=data)
