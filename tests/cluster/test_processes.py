"""Roles as processes compute what one process computes, and go on when any of them is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import (
    Disturb,
    assert_same,
    assert_same_learning,
    ledger,
    measured,
    recipe,
    stopped_in_evaluation,
    stopped_while_feeding,
    train,
    warehouse,
    worker,
)
from tests.faults.test_resume import RECIPE, KillAfter, numbers
from tidemill.errors import TidemillError
from tidemill.run import start as launch
from tidemill.run import trained

pytest.importorskip("msgspec")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    train(folder, cluster={"executor": "local"})
    return measured(folder)


def test_one_of_each_computes_exactly_what_one_process_does(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    train(tmp_path)
    assert measured(tmp_path) == local


@pytest.mark.parametrize("schedule", ["sync", "streamed"])
def test_two_ranks_and_two_of_each_compute_the_same_step(
    tmp_path: Path, local: list[dict[str, Any]], schedule: str
) -> None:
    train(tmp_path, cluster={"learners": 2, "rollouts": 2, "rewards": 2}, flow={"schedule": schedule})
    assert_same(measured(tmp_path), local)


def test_async_without_staleness_computes_the_steps_of_sync(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    watch = Disturb(worker("rollout-0"), at_step=99)
    flow = {"schedule": "async", "max_staleness": 0}
    train(tmp_path, watch, flow=flow, cluster={"rollouts": 2}, reshard={"verify": "off"})
    found = measured(tmp_path)
    assert [m["staleness_max"] for m in found if "loss" in m] == [0, 0, 0, 0]
    assert_same([{k: m[k] for k in m if k in same} for m, same in zip(found, local)], local)
    assert watch.workers is not None and watch.workers.publisher.checked == 0


def test_colocated_roles_share_the_learners_processes(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    train(tmp_path, cluster={"learners": 2, "placement": "colocated"})
    assert_same(measured(tmp_path), local)
    assert {p.stem for p in (tmp_path / "small" / "logs").glob("*.log")} == {"all", "learner-0", "learner-1"}


def test_colocated_workers_hand_the_memory_over_and_compute_the_same(
    tmp_path: Path, local: list[dict[str, Any]]
) -> None:
    train(tmp_path, flow={"hand_over": "all"}, cluster={"learners": 2, "placement": "colocated"})
    assert_same(measured(tmp_path), local)
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert all(line["time/hand_over"] > 0 for line in steps)
    assert all(line["handed_over/state_bytes"] > 0 for line in steps[1:])  # before the first update there is none


@pytest.mark.slow
def test_a_rank_that_is_killed_while_memory_changes_hands_costs_the_steps_since_the_checkpoint(
    tmp_path: Path, local: list[dict[str, Any]]
) -> None:
    watch = Disturb(worker("learner-1"), at_step=2)
    train(tmp_path, watch, flow={"hand_over": "all"}, cluster={"learners": 2, "placement": "colocated"})
    assert watch.killed and any("newest checkpoint" in said for said in watch.said)
    assert_same_learning(measured(tmp_path), local)


@pytest.mark.slow
def test_a_trained_reward_model_judges_in_workers_of_its_own_also_when_one_is_killed(tmp_path: Path) -> None:
    pairs = {"source": "reversal", "args": {"pairs": True}, "max_prompt_tokens": 8}
    once = {"steps": 2, "prompts_per_step": 8, "samples_per_prompt": 1, "updates_per_step": 1}
    shared = {"data": pairs, "train": once, "eval": {"size": 0}, "cluster": {"executor": "local"}}
    launch.train(recipe(tmp_path / "judge", algorithm={"name": "reward_model"}, **shared))
    trained.export(tmp_path / "judge" / "small", tmp_path / "exported")
    judged = {"function": "model", "args": {"path": str(tmp_path / "exported")}}
    rewards = {"functions": [{"function": "last_number"}, judged]}
    train(tmp_path / "local", rewards=rewards, cluster={"executor": "local"})
    watch = Disturb(worker("reward_model-1"))
    train(tmp_path / "own", watch, rewards=rewards, cluster={"reward_models": 2})
    assert watch.killed
    assert_same_learning(measured(tmp_path / "own"), measured(tmp_path / "local"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    [worker("rollout-0"), worker("reward-0"), ledger, warehouse, worker("learner-1")],
    ids=["rollout", "reward", "ledger", "warehouse", "learner"],
)
def test_whoever_is_killed_the_run_ends_with_the_same_numbers(
    tmp_path: Path, local: list[dict[str, Any]], victim: Any
) -> None:
    watch = Disturb(victim)
    summary = train(tmp_path, watch, cluster={"learners": 2, "rollouts": 2})
    assert watch.killed and summary.steps == 4
    assert_same_learning(measured(tmp_path), local)


def test_a_worker_that_dies_at_every_start_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match="no licence was found") as raised:
        train(tmp_path, rewards={"functions": [{"function": "tests.cluster.unlicensed:reward"}]})
    assert "reward-0" in raised.value.message


def test_samples_are_written_by_who_has_them_and_none_passes_the_driver(tmp_path: Path) -> None:
    watch = Disturb(worker("rollout-0"), at_step=99)
    train(tmp_path, watch, cluster={"rewards": 2})
    lines = [json.loads(line) for line in (tmp_path / "small" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert len({line["id"] for line in lines}) == len(lines) == 4 * 8
    heard = [m["driver_bytes"] for m in numbers(tmp_path / "small") if "driver_bytes" in m]
    assert len(heard) == 4 and max(heard) < 20_000, heard  # counts and states, whatever the samples are


def test_what_the_driver_hears_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    heard = []
    for tokens in (4, 24):
        folder = tmp_path / str(tokens)
        train(folder, rollout={"max_new_tokens": tokens}, train={"steps": 2}, observe={"samples_per_step": 0})
        heard.append(min(m["driver_bytes"] for m in numbers(folder / "small") if "driver_bytes" in m))
    assert heard[1] < 1.3 * heard[0], heard


@pytest.mark.slow
def test_a_run_of_processes_is_resumed_in_one_process_and_the_other_way(
    tmp_path: Path, local: list[dict[str, Any]]
) -> None:
    for first, then in (("processes", "local"), ("local", "processes")):
        folder = tmp_path / first
        launch.train(recipe(folder, train={"steps": 2}, cluster={"executor": first}))
        config = folder / "small" / "config.yaml"
        config.write_text(
            config.read_text().replace("steps: 2", "steps: 4").replace(f"executor: {first}", f"executor: {then}")
        )
        (folder / "small" / "summary.json").unlink()
        launch.resume(folder / "small")
        assert_same([m for m in measured(folder) if m["step"] > 2], [m for m in local if m["step"] > 2])


@pytest.mark.slow
def test_interrupted_by_the_user_it_saves_and_can_be_resumed(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    summary = train(tmp_path, KillAfter(2, signal.SIGINT))
    assert summary.is_stopped and summary.steps == 2
    launch.resume(tmp_path / "small")
    assert_same(measured(tmp_path), local)


@pytest.mark.slow
def test_rollout_runs_ahead_by_no_more_than_it_may_also_when_a_worker_is_killed(tmp_path: Path) -> None:
    watch = Disturb(worker("rollout-0"))
    flow = {"schedule": "async", "max_staleness": 2}
    summary = train(tmp_path, watch, flow=flow, train={"steps": 6, "updates_per_step": 1}, cluster={"rollouts": 2})
    ages = [m["staleness_max"] for m in measured(tmp_path) if "staleness_max" in m]
    assert summary.steps == 6 and len(ages) == 6
    assert 0 < max(ages) <= 2


SETTINGS: dict[str, dict[str, Any]] = {
    "ema": {"learn": {"ema": 0.5}, "eval": {"size": 8, "every": 1}},
    "bias": {
        "model": {
            "tiny": {**RECIPE["model"]["tiny"], "architecture": "qwen3_moe", "experts": 4, "intermediate": 24},
        },
        "learn": {"moe": {"balance": "bias", "bias_rate": 0.3}},
        "cluster": {"learners": 2},
    },
    "narrow reference": {"algorithm": {"name": "grpo", "kl": {"coef": 0.01, "weights": "int8"}}},
    "shared trunk": {"algorithm": {"name": "ppo", "critic": {"trunk": "shared", "lr": 3e-3}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_the_same_on_workers(tmp_path: Path, name: str) -> None:
    over = {"train": {"steps": 3}, **SETTINGS[name]}
    train(tmp_path / "one", **{**over, "cluster": {"executor": "local"}})
    train(tmp_path / "many", **over)
    assert_same(measured(tmp_path / "many"), measured(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [{}, {"placement": "colocated"}], ids=["separated", "colocated"])
def test_a_learner_cut_over_workers_gives_rollout_the_bias_of_its_experts(
    tmp_path: Path, cluster: dict[str, Any]
) -> None:
    """It takes three updates until the bias is large enough to change a choice."""
    model, learn = SETTINGS["bias"]["model"], SETTINGS["bias"]["learn"]
    train(tmp_path / "one", train={"steps": 4}, model=model, learn=learn, cluster={"executor": "local"})
    cut = {**learn, "parallel": {"fsdp": 2}}
    train(tmp_path / "many", train={"steps": 4}, model=model, learn=cut, cluster=cluster)
    one, many = ([m for m in measured(tmp_path / name) if "loss" in m] for name in ("one", "many"))
    assert len({m["moe_busiest"] for m in one}) > 1
    for a, b in zip(one, many, strict=True):
        gaps = [key for key in a if key.startswith("mismatch/native/")]
        for key in ("reward", "loss", "grad_norm", "moe_busiest", *gaps):
            assert b[key] == pytest.approx(a[key], abs=1e-4), key


@pytest.mark.slow
def test_workers_can_be_asked_for_determinism(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    train(tmp_path, deterministic=True)
    assert measured(tmp_path) == local


@pytest.mark.slow
def test_whoever_makes_advantages_anew_knows_how_strongly_the_reference_holds(tmp_path: Path) -> None:
    """The weight is steered by the learner's process; it must survive the loss of the worker that uses it."""
    steered = {"name": "grpo", "kl": {"coef": 0.5, "target": 0.0001, "horizon": 20, "place": "reward"}}
    train(tmp_path / "one", algorithm=steered, cluster={"executor": "local"})
    one = measured(tmp_path / "one")
    watch = Disturb(worker("reward-0"), at_step=2, after_s=0.0)
    train(tmp_path / "many", watch, algorithm=steered)
    assert watch.killed and len({line["kl_coef"] for line in one if "kl_coef" in line}) > 2
    assert_same_learning(measured(tmp_path / "many"), one)


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_on_workers_and_the_watcher_hears_what_they_do(tmp_path: Path) -> None:
    watch = stopped_in_evaluation(tmp_path)
    assert {"loading the model", "rolling out", "learning", "scoring answers"} <= set(watch.seen)


@pytest.mark.slow
def test_ctrl_c_is_heard_while_a_worker_feeds(tmp_path: Path) -> None:
    stopped_while_feeding(tmp_path)
