"""A schedule changes a step's speed, not its numbers; the pieces of a run do what the loop counts on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.test_resume import RECIPE, numbers

from tidemill.flow.evaluate import pass_at_k, powers_up_to
from tidemill.flow.tally import Tally, together
from tidemill.run import start as launch


def run(folder: Path, **over: Any) -> Path:
    recipe = {**RECIPE, "folder": str(folder)}
    for section, values in over.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    launch.train(recipe)
    return folder / "small"


def assert_close(a: list[dict[str, Any]], b: list[dict[str, Any]], rel: float = 1e-4) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for key, value in x.items():
            assert y[key] == pytest.approx(value, rel=rel, abs=1e-5), (x["step"], key)


@pytest.mark.parametrize("updates", [1, 2])
def test_streamed_computes_the_steps_of_sync(tmp_path: Path, updates: int) -> None:
    small = {"steps": 3, "updates_per_step": updates, "tokens_per_microbatch": 24}
    sync = run(tmp_path / "sync", train=small)
    streamed = run(tmp_path / "streamed", train=small, flow={"schedule": "streamed"})
    assert_close(numbers(sync), numbers(streamed))


def test_the_first_ratio_of_every_step_is_one(tmp_path: Path) -> None:
    """Rollout and learner agree on log-probabilities: one update per step never sees another ratio."""
    for line in numbers(run(tmp_path, train={"updates_per_step": 1})):
        if "ratio_max" in line:
            assert line["ratio_max"] == pytest.approx(1, abs=1e-4)
            assert line["ratio_min"] == pytest.approx(1, abs=1e-4)
            assert line["clip_share_low"] == line["clip_share_high"] == 0


def test_a_step_of_several_passes_learns_from_each_sample_again(tmp_path: Path) -> None:
    lines = numbers(run(tmp_path, train={"steps": 1, "updates_per_step": 1, "passes_per_step": 3}))
    assert next(line["version"] for line in lines if line["step"] == 1 and "version" in line) == 3


def test_throughput_counts_every_real_token_once(tmp_path: Path) -> None:
    folder = run(tmp_path, train={"steps": 2, "updates_per_step": 1, "passes_per_step": 2})
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "tokens_per_s" in line:
            tokens = line["prompt_tokens"] + line["made_tokens"]
            assert line["tokens_per_s"] * line["time/step"] == pytest.approx(tokens)
            assert line["learned_tokens"] == 2 * tokens  # two passes


def test_recomputed_old_logprobs_and_a_reference_take_part(tmp_path: Path) -> None:
    lines = numbers(
        run(tmp_path, train={"steps": 2}, algorithm={"name": "grpo", "old_logprobs": "recompute", "kl": {"coef": 0.1}})
    )
    learned = [line for line in lines if "loss" in line]
    assert learned[0]["kl"] == pytest.approx(0, abs=0.2) and learned[1]["kl"] > 0


def test_a_run_explains_itself(tmp_path: Path) -> None:
    folder = run(tmp_path, train={"steps": 2})
    summary = json.loads((folder / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "steps", "seconds", "tokens_per_s"} <= summary.keys()
    assert summary["steps"] == 2
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "prompt", "response", "reward", "rewards", "versions"} <= sample.keys()
    assert "resume" in (folder / "README.md").read_text()


def test_pass_at_k_counts_subsets() -> None:
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 0, 4) == 0 and pass_at_k(4, 1, 4) == 1
    rng = np.random.default_rng(0)
    drawn = np.mean([rng.choice(8, 3, replace=False).min() < 2 for _ in range(4000)])
    assert pass_at_k(8, 2, 3) == pytest.approx(drawn, abs=0.03)


def test_powers_up_to_always_end_with_n() -> None:
    assert powers_up_to(1) == [1] and powers_up_to(6) == [1, 2, 4, 6] and powers_up_to(8) == [1, 2, 4, 8]


def test_a_tally_weighs_means_and_keeps_extremes() -> None:
    tally = Tally()
    for value in (1, 2, 6):
        tally.mean("reward", value)
        tally.add("tokens", value)
        tally.update({"ratio_max": value, "loss": value})
    taken = together([tally.drain()])
    assert (taken["reward"], taken["tokens"], taken["ratio_max"], taken["loss"]) == (3, 9, 6, 3)
    assert together([tally.drain()]) == {}
