"""Each algorithm must learn: its recipe in recipes/cpu, from one warm start, on problems held out from training.

One seed each by default; `TIDEMILL_SEEDS=3` tries three.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tidemill
from tidemill.algorithms.shared.registry import every
from tidemill.recipe import load as recipe
from tidemill.run import trained

SEEDS = range(int(os.environ.get("TIDEMILL_SEEDS", "1")))
BELOW, ABOVE = 0.4, 0.75
TEACHER_STEPS = 80  # of GRPO, 128 samples each

pytestmark = [pytest.mark.slow, pytest.mark.learning]
OF_DECODERS = [a for a in every() if "decoder" in a.policies]


def export(run: Path, to: Path) -> str:
    trained.export(run, to)
    return str(to)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("learning")


def run(place: Path, name: str, seed: int, *overrides: str):
    """The summary and the metrics of every step."""
    chosen = f"{name}-{seed}-{len(list(place.iterdir()))}"
    always = [f"folder={place}", f"name={chosen}", f"seed={seed}", "threads=1", "observe.tensorboard=false"]
    summary = tidemill.train(f"cpu/{name}", [*always, *overrides])
    lines = (place / chosen / "metrics.jsonl").read_text().splitlines()
    return summary, [m for m in map(json.loads, lines) if "loss" in m], place / chosen


@pytest.fixture(scope="module")
def warm(place) -> str:
    summary, _, folder = run(place, "warm-start", 0)
    assert summary.accuracy_after < BELOW
    return f"model.path={export(folder, place / 'warm')}"


@pytest.fixture(scope="module")
def teacher(place, warm) -> tuple[str, float]:
    summary, _, folder = run(place, "grpo", 100, warm, f"train.steps={TEACHER_STEPS}")
    return export(folder, place / "teacher"), summary.accuracy_after


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [a.name for a in OF_DECODERS if a.input_kind == "prompts" and a.name != "distill"])
def test_an_online_algorithm_lifts_held_out_accuracy(name: str, seed: int, place, warm) -> None:
    summary, metrics, _ = run(place, name, seed, warm)
    assert summary.accuracy_before < BELOW
    assert summary.accuracy_after > ABOVE
    if name == "ppo":  # the first steps of the policy; once nearly all responses are right nothing is left to explain
        assert max(m["critic/explained_variance"] for m in metrics[:10]) > 0.3
    if name == "dapo":
        assert sum(m.get("refilled_groups", 0) for m in metrics) == sum(m.get("dropped_groups", 0) for m in metrics)


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_reaches_its_teacher_with_fewer_samples_than_grpo(seed: int, place, warm, teacher) -> None:
    folder, accuracy = teacher
    student, _, _ = run(place, "distill", seed, warm, f"algorithm.teacher={folder}")
    assert student.accuracy_after >= accuracy - 0.02
    config = recipe.load("cpu/distill").config.train
    assert config.steps * config.prompts_per_step * config.samples_per_prompt < TEACHER_STEPS * 16 * 8


@pytest.mark.parametrize("seed", SEEDS)
def test_a_learned_reward_lifts_accuracy_that_it_was_never_told(seed: int, place, warm) -> None:
    _, _, folder = run(place, "judge", seed, warm)
    judge = place / f"judge-{seed}"
    trained.export(folder, judge)
    functions = f"[{{function: exact, weight: 0.0}}, {{function: model, args: {{path: {judge}}}}}]"
    summary, _, _ = run(place, "grpo_reward_model", seed, warm, f"rewards.functions={functions}")
    assert summary.accuracy_before < BELOW
    assert summary.accuracy_after > ABOVE


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["game", "tools"])
def test_several_turns_are_learned(name: str, seed: int, place) -> None:
    """A game is won more often, and a tool asked where guessing fails."""
    summary, metrics, _ = run(place, name, seed)
    assert summary.accuracy_before < BELOW
    assert summary.accuracy_after > (ABOVE if name == "tools" else 0.6)  # one game in three still has a slip
    assert summary.accuracy_after > summary.accuracy_before + 0.25
    assert metrics[-1]["turns"] > 1.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [a.name for a in OF_DECODERS if a.input_kind != "prompts"])
def test_an_offline_algorithm_lowers_its_loss_and_lifts_its_own_measure(name: str, seed: int, place, warm) -> None:
    summary, metrics, _ = run(place, name, seed, warm)
    first, last = metrics[:5], metrics[-5:]

    def mean(of: list[dict], key: str) -> float:
        return sum(m[key] for m in of) / len(of)

    assert mean(last, "loss") < mean(first, "loss")
    if name not in ("sft", "kto"):  # every pair is new, so these are measured on pairs not trained on
        assert mean(last, "preference_accuracy") > 0.9
        assert mean(last, "margin") > mean(first, "margin")
    if name == "kto":
        assert mean(last, "chosen_reward") > mean(last, "rejected_reward") + 0.1
    if name in ("sft", "orpo", "kto"):  # these also raise the chosen responses' own probability
        assert summary.accuracy_after > ABOVE
