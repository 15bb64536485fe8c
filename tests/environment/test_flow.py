"""Conversations through the whole flow: engine, dock, reward, learner."""

import json

import pytest

import tidemill

SHAPE = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 64}
TINY = {**SHAPE, "alphabet": "0123456789/: "}


def run(folder, **more) -> tuple[list[dict], list[dict]]:
    recipe = {
        "folder": str(folder),
        "name": "run",
        "threads": 1,
        "model": {"tiny": TINY},
        "data": {"source": "nim", "max_prompt_tokens": 8},
        "environment": {"name": "nim", "max_turn_tokens": 1},
        "rewards": "environment",
        "rollout": {"max_new_tokens": 40},
        "train": {"steps": 3, "prompts_per_step": 16, "samples_per_prompt": 4, "tokens_per_microbatch": 400},
        "learn": {"lr": 1e-3},
        "eval": {"size": 4, "before": False},
        "observe": {"tensorboard": False, "samples_per_step": 64},
        **more,
    }
    tidemill.train(recipe)
    read = lambda name: [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]  # noqa: E731
    return [m for m in read("metrics.jsonl") if "loss" in m], read("samples.jsonl")


@pytest.mark.parametrize("schedule", ["sync", "streamed", "async"])
def test_games_are_played_judged_and_learned_from(schedule: str, tmp_path) -> None:
    metrics, samples = run(tmp_path, flow={"schedule": schedule})
    assert any(" " in s["response"] for s in samples)  # some games went on after a first legal move
    # A step of `async` may learn from games that all ended in the step before: no game was counted in it.
    assert schedule == "async" or all("turns" in step for step in metrics)
    played = [step for step in metrics if "turns" in step]
    assert played and all(step["turns"] >= 1.0 and step["environment/broken_rules"] == 1.0 for step in played)
    for step in metrics:
        # Rollout and learner see the same tokens: before an update every ratio is 1, behind answers too.
        if schedule != "async":
            assert step["ratio_max"] == pytest.approx(1.0, abs=1e-4)
            assert step["ratio_min"] == pytest.approx(1.0, abs=1e-4)


def test_only_what_the_model_said_is_counted_as_made(tmp_path) -> None:
    metrics, samples = run(tmp_path)
    said = sum(s["step"] == 1 for s in samples)
    assert metrics[0]["made_tokens"] == metrics[0]["turns"] * said  # one token a turn
    assert metrics[0]["response_tokens"] >= metrics[0]["turns"]


def test_ppo_carries_values_over_answers(tmp_path) -> None:
    metrics, _ = run(tmp_path, algorithm={"name": "ppo"})
    assert all("critic/explained_variance" in step for step in metrics)
