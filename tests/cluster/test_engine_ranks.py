"""A rollout engine over several ranks (`rollout.tp`) makes what one rank makes, and comes back when one is killed."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.runs import Disturb, assert_same, assert_same_learning, measured, train, worker
from tests.faults.test_resume import RECIPE
from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.worker.engine_ranks import Follower, LeadEngine, Notes, Order
from tidemill.cluster.worker.learners import World
from tidemill.cluster.worker.store import StoreServer
from tidemill.errors import CollectiveError
from tidemill.models.load import make_tiny, save_folder
from tidemill.run.trained import open_trained
from tidemill.run.watcher import Watcher

pytest.importorskip("msgspec")

OF_RANKS = ("slowest_rank", "slowest_over_median")  # what only several ranks of a learner can tell
STEPS = {"steps": 3}


def run(folder: Path, watch: Any = None, **over: Any) -> list[dict[str, Any]]:
    train(folder, watch, **{"train": STEPS, **over})
    return [{k: v for k, v in line.items() if k not in OF_RANKS} for line in measured(folder)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("local"), cluster={"executor": "local"})


def ordered(wait_s: float) -> Follower:
    """A rank whose first rank has come to an order."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said.put([Order()])
    notes: Any = SimpleNamespace(read=said.get, wait_s=wait_s)
    return Follower(None, notes, None, None, torch.device("cpu"))


def test_a_rank_that_hears_nothing_of_an_order_does_not_stand_still_without_end() -> None:
    follower = ordered(wait_s=0.05)
    follower._thread.join(10)
    with pytest.raises(CollectiveError, match=r"never arrived here \(0.05 s\)"), follower.at_order(10):
        pass


def test_an_order_may_take_longer_than_it_was_waited_for() -> None:
    follower = ordered(wait_s=0.5)
    with follower.at_order(10):
        time.sleep(1.0)
        assert follower._is_ordered
    assert follower.error is None and not follower._is_ordered


def test_an_engine_sleeps_when_all_its_ranks_do() -> None:
    store = StoreServer("127.0.0.1")
    asleep: list[int] = []

    def notes(wait_s: float = 10.0) -> Notes:
        return Notes(store.address, 0, 2, wait_s)

    def engine(rank: int) -> Any:
        return SimpleNamespace(sleep=lambda: (time.sleep(0.1 * rank), asleep.append(rank)), wake=lambda: None)

    for rank in (1, 2):
        Follower(engine(rank), notes(), None, None, torch.device("cpu"))
    lead = LeadEngine(World())
    lead.join(engine(0), notes())
    for _ in range(2):
        lead.sleep()
        assert sorted(asleep) == [0, 1, 2]
        asleep.clear()
        lead.wake()
    alone = Notes(store.address, 1, 2, 0.05)
    with pytest.raises(CollectiveError, match="did not sleep"):
        alone.await_all()


def test_two_ranks_of_an_engine_make_the_steps_of_one_process(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    assert_same(run(tmp_path, rollout={"tp": 2}), local)
    logs = {p.stem for p in (tmp_path / "small" / "logs").glob("*.log")}
    assert logs == {"all", "learner-0", "rollout-0", "rollout-1", "reward-0"}


@pytest.mark.slow
def test_two_ranks_of_an_engine_share_the_experts_of_a_mixture(tmp_path: Path) -> None:
    """Each has some of them, and new weights of them every step."""
    tiny = {**RECIPE["model"]["tiny"], "architecture": "qwen3_moe", "experts": 4}
    over: dict[str, Any] = {"model": {"tiny": tiny}, "algorithm": {"old_logprobs": "recompute"}}
    alone = run(tmp_path / "alone", **over, cluster={"executor": "local"})
    assert_same(run(tmp_path / "shared", **over, rollout={"tp": 2}), alone)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_brings_its_engine_back(tmp_path: Path, local: list[dict[str, Any]], rank: int) -> None:
    watch = Disturb(worker(f"rollout-{rank}"), after_s=0.0)
    found = run(tmp_path, watch, rollout={"tp": 2})
    assert watch.killed and isinstance(watch.workers, Driver)
    assert {m.restarts for m in watch.workers.pool.of("rollout", ready=False)} == {1}
    assert watch.workers.pool.lost_total == 1  # an engine's loss counts once
    assert_same_learning(found, local)


@pytest.mark.slow
def test_a_learner_that_is_cut_serves_engines_that_are_cut_otherwise(
    tmp_path: Path, local: list[dict[str, Any]]
) -> None:
    over = {"cluster": {"rollouts": 2}, "flow": {"schedule": "streamed"}, "reshard": {"verify": "all"}}
    assert_same(run(tmp_path, rollout={"tp": 2}, learn={"parallel": {"fsdp": 2}}, **over), local)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "streamed"])
def test_ranks_that_learn_share_engines_too(tmp_path: Path, local: list[dict[str, Any]], schedule: str) -> None:
    turns = {"hand_over": "cache"} if schedule == "sync" else {}
    over = {"cluster": {"placement": "colocated"}, "flow": {"schedule": schedule, **turns}}
    assert_same(run(tmp_path, rollout={"tp": 2}, learn={"parallel": {"fsdp": 2, "tp": 2}}, **over), local)


@pytest.mark.slow
def test_an_engine_of_two_ranks_runs_ahead_and_changes_weights_between_tokens(tmp_path: Path) -> None:
    flow = {"schedule": "async", "max_staleness": 2}
    watch = Disturb(worker("rollout-1"), at_step=2)
    sizes = {"train": {"steps": 6}, "eval": {"size": 8, "every": 1}}
    found = run(tmp_path, watch, rollout={"tp": 2}, flow=flow, **sizes)
    ages = [m["staleness_max"] for m in found if "staleness_max" in m]
    assert len(ages) == 6 and 0 < max(ages) <= 2


class KeepModel(Watcher):
    """Has the model written by whoever serves it, after the last step."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder, self.last = folder, last

    def started(self, workers: Any, first_step: int) -> None:
        self.workers = workers

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.last:
            self.workers.save_model(self.folder)


@pytest.mark.slow
def test_a_model_from_a_folder_is_never_whole_anywhere_and_is_written_whole(tmp_path: Path) -> None:
    from tests.faults.test_resume import RECIPE
    from tidemill.recipe.config import TinyModel

    shape = TinyModel(**RECIPE["model"]["tiny"], architecture="qwen2")
    loaded = make_tiny(shape, torch.float32, 3, torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, tmp_path / "given")
    model = {"path": str(tmp_path / "given"), "tiny": None}
    alone = run(tmp_path / "alone", model=model, cluster={"executor": "local"})
    watch = KeepModel(tmp_path / "made", 3)
    over = {"model": model, "learn": {"parallel": {"tp": 2}}, "rollout": {"tp": 2}}
    assert_same(run(tmp_path / "cut", watch, **over), alone)
    made = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "made").named_parameters())
    kept = dict(open_trained(tmp_path / "cut" / "small", "cpu").loaded.model.named_parameters())
    assert made.keys() == kept.keys()
    assert all(torch.equal(made[name], kept[name]) for name in kept)
