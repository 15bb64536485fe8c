"""A learner cut over workers (`learn.parallel`) computes what one rank computes, and goes on when a rank is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import Disturb, assert_same, assert_same_learning, measured, recipe, train, worker
from tidemill.cluster.driver.driver import Driver
from tidemill.run import start as launch

pytest.importorskip("msgspec")

ALGORITHM = {"name": "grpo", "old_logprobs": "recompute", "kl": {"coef": 0.01}}
STEPS = {"steps": 3, "tokens_per_microbatch": 48}


def run(folder: Path, watch: Any = None, **over: Any) -> list[dict[str, Any]]:
    train(folder, watch, **{"algorithm": ALGORITHM, "train": STEPS, **over})
    return measured(folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("local"), cluster={"executor": "local"})


@pytest.mark.parametrize(("parallel", "schedule"), [({"fsdp": 2}, "sync"), ({"tp": 2}, "streamed")], ids=["fsdp", "tp"])
def test_two_ranks_with_two_rollout_workers_compute_the_steps_of_one_rank(
    tmp_path: Path, local: list[dict[str, Any]], parallel: dict[str, int], schedule: str
) -> None:
    found = run(tmp_path, learn={"parallel": parallel}, cluster={"rollouts": 2}, flow={"schedule": schedule})
    assert_same(found, local)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"fsdp": 2}, {"pp": 2}, {"cp": 2}], ids=["fsdp", "pp", "cp"])
def test_colocated_rollout_gets_whole_weights_from_all_ranks_and_takes_turns_with_them(
    tmp_path: Path, local: list[dict[str, Any]], parallel: dict[str, int]
) -> None:
    turns = {"flow": {"hand_over": "all"}, "cluster": {"placement": "colocated"}}
    assert_same(run(tmp_path, learn={"parallel": parallel}, **turns), local)
    assert {p.stem for p in (tmp_path / "small" / "logs").glob("*.log")} == {"all", "learner-0", "learner-1"}


@pytest.mark.slow
def test_ranks_of_two_teams_take_their_shares_and_learn_one_step(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    assert_same(run(tmp_path, learn={"parallel": {"fsdp": 2, "tp": 2}}, flow={"schedule": "streamed"}), local)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_brings_all_back_from_the_newest_checkpoint(
    tmp_path: Path, local: list[dict[str, Any]], rank: int
) -> None:
    watch = Disturb(worker(f"learner-{rank}"))
    found = run(tmp_path, watch, learn={"parallel": {"fsdp": 2}}, cluster={"rollouts": 2})
    assert watch.killed and any("newest checkpoint" in said for said in watch.said)
    assert isinstance(watch.workers, Driver)
    assert {m.restarts for m in watch.workers.pool.learners()} == {1}
    assert_same_learning(found, local)


@pytest.mark.slow
def test_rollout_runs_ahead_of_a_cut_learner_by_no_more_than_it_may(tmp_path: Path) -> None:
    watch = Disturb(worker("rollout-0"))
    over = {"flow": {"schedule": "async", "max_staleness": 2}, "reshard": {"verify": "all"}}
    sizes = {"train": {**STEPS, "steps": 6, "updates_per_step": 1}, "cluster": {"rollouts": 2}}
    found = run(tmp_path, watch, learn={"parallel": {"tp": 2}}, **over, **sizes)
    ages = [m["staleness_max"] for m in found if "staleness_max" in m]
    assert len(ages) == 6 and 0 < max(ages) <= 2
    assert watch.workers is not None and watch.workers.publisher.checked > 0


@pytest.mark.slow
def test_a_run_of_cut_workers_is_resumed_by_one_rank_and_the_other_way(
    tmp_path: Path, local: list[dict[str, Any]]
) -> None:
    ways = {"workers": {"executor": "processes"}, "one": {"executor": "local"}}
    for first, then in (("workers", "one"), ("one", "workers")):
        folder = tmp_path / first
        sizes = {"fsdp": 2 if first == "workers" else 1}
        over = {"algorithm": ALGORITHM, "learn": {"parallel": sizes}, "train": {**STEPS, "steps": 2}}
        launch.train(recipe(folder, cluster=ways[first], **over))
        config = folder / "small" / "config.yaml"
        text = config.read_text().replace("steps: 2", "steps: 3")
        text = text.replace(f"executor: {ways[first]['executor']}", f"executor: {ways[then]['executor']}")
        config.write_text(text.replace(f"fsdp: {sizes['fsdp']}", f"fsdp: {3 - sizes['fsdp']}"))
        (folder / "small" / "summary.json").unlink()
        launch.resume(folder / "small")
        assert_same([m for m in measured(folder) if m["step"] > 2], [m for m in local if m["step"] > 2])


CALM = {"eps": 1e-4}  # Adam makes whole steps of gradients that are the last bits of zero
PPO = {"name": "ppo", "critic": {"lr": 3e-3, "passes": 2}}


@pytest.mark.parametrize("schedule", [pytest.param("sync", marks=pytest.mark.slow), "streamed"])
def test_a_critic_is_cut_too_by_sizes_of_its_own(tmp_path: Path, schedule: str) -> None:
    one = run(tmp_path / "one", algorithm=PPO, cluster={"executor": "local"})
    sizes = {"critic": {**PPO["critic"], "parallel": {"tp": 2}}}
    over = {"algorithm": {**PPO, **sizes}, "learn": {"parallel": {"fsdp": 2}}, "flow": {"schedule": schedule}}
    found = run(tmp_path / "cut", **over)
    for line in (*one, *found):
        line.pop("critic/value_clip_share", None)  # counts values that differ from their clipped ones, be it by a bit
    assert_same(found, one)
    assert one[-2]["critic/loss"] != one[1]["critic/loss"]


@pytest.mark.slow
def test_a_killed_rank_brings_the_critic_back_with_the_policy(tmp_path: Path) -> None:
    warm = {**PPO, "critic": {"lr": 3e-3, "warmup_steps": 1}}
    one = run(tmp_path / "one", algorithm=warm, cluster={"executor": "local"})
    watch = Disturb(worker("learner-1"), at_step=2)
    assert_same_learning(run(tmp_path / "cut", watch, algorithm=warm, learn={"parallel": {"fsdp": 2}}), one)
    assert watch.killed


@pytest.mark.slow
@pytest.mark.parametrize("reference", [{"fsdp": 2}, {"tp": 2}], ids=["alike", "otherwise"])
def test_a_reference_on_ranks_follows_the_policy_and_is_saved_with_it(
    tmp_path: Path, reference: dict[str, int]
) -> None:
    kl = {"coef": 0.05, "reset_every": 2}
    over = {"train": {**STEPS, "steps": 5}, "algorithm": {"name": "grpo", "kl": kl}, "learn": CALM}
    one = run(tmp_path / "one", cluster={"executor": "local"}, **over)
    still = {"name": "grpo", "kl": {"coef": 0.05}}
    assert (
        run(tmp_path / "still", cluster={"executor": "local"}, **{**over, "algorithm": still})[5]["kl"] != one[5]["kl"]
    )
    watch = Disturb(worker("learner-1"), at_step=3)
    cut = {
        "algorithm": {"name": "grpo", "kl": {**kl, "parallel": reference}},
        "learn": {**CALM, "parallel": {"fsdp": 2}},
    }
    assert_same_learning(run(tmp_path / "cut", watch, **{**over, **cut}), one)
    assert watch.killed


def test_adapters_of_a_cut_learner_reach_the_rollout(tmp_path: Path) -> None:
    lora = {**CALM, "lora_rank": 4, "lora_alpha": 64.0}
    one = run(tmp_path / "one", learn=lora, cluster={"executor": "local"})
    assert_same(run(tmp_path / "cut", learn={**lora, "parallel": {"fsdp": 2}}), one)


@pytest.mark.slow
def test_a_steered_divergence_reaches_every_rank(tmp_path: Path) -> None:
    steered = {"name": "grpo", "kl": {"coef": 0.05, "target": 0.001, "horizon": 50}}
    one = run(tmp_path / "one", algorithm=steered, cluster={"executor": "local"})
    assert_same(run(tmp_path / "cut", algorithm=steered, learn={"parallel": {"fsdp": 2}}), one)
    assert one[-2]["kl_coef"] != one[1]["kl_coef"]


@pytest.mark.slow
def test_ranks_with_whole_critics_learn_the_step_of_one(tmp_path: Path) -> None:
    one = run(tmp_path / "one", algorithm=PPO, cluster={"executor": "local"})
    found = run(tmp_path / "two", algorithm=PPO, cluster={"learners": 2}, flow={"schedule": "streamed"})
    for line in (*one, *found):
        line.pop("critic/value_clip_share", None)
    assert_same(found, one)
