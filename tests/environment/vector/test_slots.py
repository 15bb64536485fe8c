"""Environments that step together are in the states that their seeds and moves decide, wherever they are stepped."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.environment.vector.drift import Drift

from tidemill.environment.vector import processes
from tidemill.environment.vector.making import make_slots
from tidemill.environment.vector.processes import ProcessSlots, open_slots
from tidemill.environment.vector.slots import GOES_ON, TERMINAL, TRUNCATED, VectorSlots
from tidemill.environment.vector.spaces import codec_of
from tidemill.errors import ConfigError, PlayError
from tidemill.recipe.environment import EnvironmentSettings

DRIFT = "tests.environment.vector.drift:Drift"
SEEDS = np.arange(100, 106)


def settings(name: str = DRIFT, **args: Any) -> EnvironmentSettings:
    return EnvironmentSettings(name=name, args=args)


def played(slots: Any, ticks: int = 60, kills: tuple[int, ...] = (), some: bool = False) -> list[Any]:
    rng, own = np.random.default_rng(0), np.arange(slots.count)
    found = [slots.reset(own, SEEDS[: slots.count]).copy()]
    for tick in range(ticks):
        chosen = own[rng.random(slots.count) < 0.6] if some else own
        moves = rng.uniform(-1, 1, (slots.count, 2)).astype(np.float32)[chosen]
        if tick in kills:
            os.kill(slots.processes[0], signal.SIGKILL)
        stepped = slots.step(chosen, moves, SEEDS[chosen] + 7 * tick + 1)
        ended = stepped.ends != GOES_ON
        found += [
            stepped.observations.copy(),
            stepped.rewards.copy(),
            stepped.ends.copy(),
            stepped.finals[ended].copy(),
        ]
    slots.close()
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("some", [False, True])
def test_processes_do_what_one_process_does(some: bool) -> None:
    plain = played(make_slots(settings(), 6), some=some)
    assert same(plain, played(ProcessSlots(settings(), 6, 2), some=some))


@pytest.mark.parametrize("some", [False, True])
def test_a_killed_process_is_brought_back_and_nobody_notices(some: bool) -> None:
    plain = played(make_slots(settings(), 6), some=some)
    assert same(plain, played(ProcessSlots(settings(), 6, 1), kills=(0, 5, 41), some=some))


def test_what_was_played_is_kept_no_longer_than_episodes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KEPT_TICKS", 32)
    slots = ProcessSlots(settings(), 6, 1)
    plain = played(make_slots(settings(), 6), ticks=120)
    assert same(plain, played(slots, ticks=120, kills=(90, 119)))
    assert len(slots.past.kept) < 80


def test_an_environment_that_raises_in_a_process_says_what() -> None:
    slots = ProcessSlots(settings(fails_at=3), 2, 1)
    slots.own.envs[0].fails_at = 0
    with pytest.raises(PlayError, match=r"the floor gave way"):
        played(slots)
    slots.close()


def test_an_environment_that_hangs_in_a_process_ends_the_run() -> None:
    slots = ProcessSlots(settings(sleeps_at=3).model_copy(update={"timeout_s": 0.5}), 2, 1)
    slots.own.envs[0].sleeps_at = 0  # the one in this process goes on
    with pytest.raises(PlayError, match=r"within 0\.5 s\n.*raise environment\.timeout_s"):
        played(slots)
    slots.close()


def test_an_environment_that_cannot_begin_in_a_process_says_why(tmp_path: Any) -> None:
    file = tmp_path / "other.py"
    file.write_text(
        "import os\nfrom tests.environment.vector.drift import Drift\n"
        f"class Here(Drift):\n    def __init__(self):\n        super().__init__()\n"
        f"        assert os.getpid() == {os.getpid()}\n"
    )
    with pytest.raises(PlayError, match=r"could not begin in a process of its own: .*AssertionError"):
        ProcessSlots(settings(f"{file}:Here"), 4, 1)


def test_episodes_that_are_cut_off_are_told_from_those_that_end() -> None:
    slots = make_slots(settings(edge=1e9), 2)
    own = np.arange(2)
    slots.reset(own, SEEDS[:2])
    ends = [int(slots.step(own, np.zeros((2, 2), np.float32), SEEDS[:2]).ends[0]) for _ in range(46)]
    assert ends == ([GOES_ON] * 22 + [TRUNCATED]) * 2
    near = make_slots(settings(edge=1e-3), 1)
    near.reset(own[:1], SEEDS[:1])
    assert near.step(own[:1], np.zeros((1, 2), np.float32), SEEDS[:1]).ends[0] == TERMINAL


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_vector_environments_begin_again_in_all_of_gymnasiums_ways(mode: AutoresetMode) -> None:
    """Decisions, rewards, ends and last looks are the same; with NextStep each beginning takes a step of its own."""
    env = SyncVectorEnv([lambda: Drift(edge=1e9) for _ in range(2)], autoreset_mode=mode)
    slots = VectorSlots(env, codec_of(env.single_observation_space, env.single_action_space, "drift"))
    own = np.arange(2)
    seen = [slots.reset(own, SEEDS[:2]).copy()]
    told = []
    while len(told) < 50:
        stepped = slots.step(own, np.zeros((2, 2), np.float32), SEEDS[:2])
        if stepped.made[0]:
            told.append((float(stepped.rewards[0]), int(stepped.ends[0]), stepped.finals[0].copy()))
        seen.append(stepped.observations.copy())
    assert [end for _, end, _ in told] == (([GOES_ON] * 22 + [TRUNCATED]) * 3)[:50]
    assert told[22][2][2] == pytest.approx(1.0)  # the last look is at the limit, not at the new episode
    plain = Drift(edge=1e9)
    plain.reset(seed=int(SEEDS[0]))
    expected = [plain.step(np.zeros(2))[1] for _ in range(23)]
    assert np.allclose([reward for reward, _, _ in told[:23]], expected, atol=1e-6)


def test_spaces_of_all_kinds_become_rows_of_numbers() -> None:
    box, choice = gym.spaces.Box(-1, 1, (2, 3), np.float32), gym.spaces.Discrete(4, start=2)
    codec = codec_of(gym.spaces.Dict({"a": box, "b": choice, "c": gym.spaces.MultiBinary(2)}), choice, "x")
    row = np.zeros(codec.spaces.observation, np.float32)
    codec.write(row, {"a": np.arange(6).reshape(2, 3), "b": 3, "c": np.array([1, 0])})
    assert row.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 0, 0, 1, 0]
    assert codec.move(np.array([3])) == 5 and codec.spaces.choices == (4,)
    several = codec_of(box, gym.spaces.MultiDiscrete([3, 2]), "x")
    assert several.move(np.array([2, 1])).tolist() == [2, 1]
    pictures = codec_of(gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), gym.spaces.Box(-1, 1, (2,)), "x").spaces
    assert pictures.pixels and pictures.low == (-1.0, -1.0)
    masked = gym.spaces.Dict({"observation": box, "action_mask": gym.spaces.Box(0, 1, (4,), np.int8)})
    assert codec_of(masked, gym.spaces.Discrete(4), "x").spaces.masked


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (gym.spaces.Text(4), gym.spaces.Discrete(2), "observations that a network cannot read"),
        (gym.spaces.Discrete(2), gym.spaces.Text(3), "actions that a network cannot draw"),
    ],
)
def test_what_a_network_cannot_do_is_refused(observations: Any, actions: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_of(observations, actions, "odd")


def test_an_unknown_environment_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean connect_four"):
        make_slots(settings("connect_for"), 1)
    with pytest.raises(ConfigError, match="NoSuchGame"):
        make_slots(settings("gymnasium:NoSuchGame-v0"), 1)


def test_few_slots_need_no_processes() -> None:
    slots = open_slots(settings(), 1, 4)
    assert not isinstance(slots, ProcessSlots)
    slots.close()
