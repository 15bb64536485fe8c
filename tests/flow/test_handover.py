"""Rollout and learning take turns with the memory: it is really handed over, and no number changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.test_resume import RECIPE, numbers

from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.start.choose import start
from tidemill.flow.handover import Handover
from tidemill.flow.tally import Tally
from tidemill.learn import checkpoint
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe import load as recipe
from tidemill.run import start as launch

PPO = {"name": "ppo", "old_logprobs": "recompute", "kl": {"coef": 0.1, "reset_every": 2}}


def run(folder: Path, hand_over: str, **over: Any) -> Path:
    made = {**RECIPE, "folder": str(folder), "flow": {"hand_over": hand_over}, "algorithm": PPO, **over}
    made["train"] = {**RECIPE["train"], "steps": 3}
    made["eval"] = {"size": 8, "every": 1}
    launch.train(made)
    return folder / "small"


def without_handing(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("handed_over/")} for line in numbers(run)]


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("never"), "never")


@pytest.mark.parametrize("what", ["cache", "all"])
def test_a_run_that_hands_memory_over_computes_the_same_numbers(tmp_path: Path, never: Path, what: str) -> None:
    found = run(tmp_path, what)
    assert without_handing(found) == without_handing(never) == numbers(never)
    kept, again = (checkpoint.latest(path / "checkpoints") for path in (never, found))
    assert kept is not None and again is not None
    ours, theirs = checkpoint.load(again.path)[0], checkpoint.load(kept.path)[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert all(line["time/hand_over"] > 0 for line in steps)
    assert all((line.get("handed_over/state_bytes", 0) > 0) == (what == "all") for line in steps)


KL = {"name": "grpo", "kl": {"coef": 0.1}}
KINDS: dict[str, dict[str, Any]] = {
    "refilled groups": {"algorithm": "dapo"},
    "adapters": {"algorithm": KL, "learn": {"lr": 1e-2, "lora_rank": 2}},  # the reference is the policy's own tensors
    "eight bits": {"algorithm": {"name": "grpo", "kl": {"coef": 0.1, "weights": "int8"}}, "learn": {"moments": "int8"}},
    "running mean": {"algorithm": "grpo", "learn": {"lr": 1e-2, "optimizer": "muon", "ema": 0.5}},
    "several turns": {
        "algorithm": KL, "environment": {"name": "nim", "max_turns": 3}, "rewards": "environment",
        "data": {"source": "nim", "max_prompt_tokens": 32}, "rollout": {"max_new_tokens": 24},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_learns_comes_back_as_it_went(tmp_path: Path, kind: str) -> None:
    plain, found = (run(tmp_path / what, what, **KINDS[kind]) for what in ("never", "all"))
    assert without_handing(found) == numbers(plain)


@pytest.fixture
def small(tmp_path: Path) -> Driver:
    made = {**RECIPE, "folder": str(tmp_path), "flow": {"hand_over": "all"}, "algorithm": PPO}
    config = recipe.load(made).config
    with RunFolder.create(config) as folder:
        driver = start(config, None, folder)
        yield driver  # type: ignore[misc]
        driver.close()


def test_each_has_the_memory_only_while_it_works(small: Driver) -> None:
    """Moments, critic and reference are gone while tokens are made; the cache's pages are while gradients are."""
    handle: Any = small.pool.members["learner-0"].handle
    state = handle.host.worker.state
    engine, learner = state.engine, state.learner
    seen: dict[str, list[int]] = {"moments at rollout": [], "critic at rollout": [], "cache at learning": []}
    step, accumulate = engine.step, learner.accumulate

    def rolls() -> Any:
        moments = [s["exp_avg"] for s in learner.optimizer.state.values()]
        seen["moments at rollout"].append(sum(m.untyped_storage().nbytes() for m in moments))
        seen["critic at rollout"].append(sum(p.untyped_storage().nbytes() for p in state.critic.model.parameters()))
        return step()

    def learns(batch: Any) -> None:
        seen["cache at learning"].append(engine.store.nbytes)
        assert all(s["exp_avg"].untyped_storage().nbytes() for s in learner.optimizer.state.values())
        accumulate(batch)

    engine.step, learner.accumulate = rolls, learns
    for number in (1, 2):
        assert list(small.stages(number, lambda: False))
        assert {k: set(v) for k, v in seen.items()} == {key: {0} for key in seen}
    assert len(learner.optimizer.state) > 0


class Engine:
    """Notes what it is told."""

    has_work = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")

    def wake(self) -> None:
        self.told.append("wake")

    def load(self, weights: Any, version: int) -> None:
        self.told.append(f"load {version}")


class State:
    def __init__(self) -> None:
        self.told: list[str] = []

    def out(self) -> int:
        self.told.append("out")
        return 8

    def back(self) -> None:
        self.told.append("back")


def turns(what: Any) -> tuple[Handover, Engine, State, Tally]:
    from tidemill import device

    engine, state, tally = Engine(), State(), Tally()
    return Handover(engine, tally, device.pick("cpu"), what, state), engine, state, tally  # type: ignore[arg-type]


def test_a_turn_is_taken_once_however_often_it_is_asked_for() -> None:
    taken, engine, state, tally = turns("all")
    for turn in (taken.rolling, taken.rolling, taken.learning, taken.learning, taken.rolling):
        turn()
    assert engine.told == ["sleep", "wake"]
    assert state.told == ["out", "back", "out"]
    assert tally.drain().sums["handed_over/state_bytes"] == 16


def test_a_sleeping_engine_hears_of_new_weights_when_it_wakes() -> None:
    taken, engine, _, _ = turns("cache")
    assert not taken.serve(1)  # awake: whoever publishes loads them
    taken.learning()
    assert taken.serve(2) and taken.serve(3)
    taken.rolling()
    taken.rolling()
    assert engine.told == ["sleep", "wake", "load 3"]


def test_where_nothing_is_handed_over_nobody_hears_of_turns() -> None:
    taken, engine, state, _ = turns("never")
    taken.rolling()
    taken.learning()
    assert not taken.serve(1)
    assert engine.told == state.told == []
