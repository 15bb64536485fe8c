"""Games of packages, played through our adapters: GEM, SkyRL-gym, Gymnasium, TextArena."""

from __future__ import annotations

import logging
import random

import pytest

pytest.importorskip("gem")
from tidemill.environment import gem, gymnasium, skyrl, textarena
from tidemill.environment.api import Task
from tidemill.errors import ConfigError

GUESS = "game:GuessTheNumber-v0-easy"


def guess(game, low=1, high=10):
    """Play by halves to the end: rewards of all turns, and whether the last one says it was found."""
    gained = []
    while True:
        turn = game.step(f"\\boxed{{{(low + high) // 2}}}")
        gained.append(turn.reward)
        if turn.is_done:
            return gained, "Congratulations" in turn.text
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in turn.text else (low, middle - 1)


def test_a_game_of_gem_is_won_by_halves():
    for seed in range(8):
        game = gem.maker(GUESS)(Task(seed=seed))
        assert "between 1 and 10" in game.reset()
        gained, is_found = guess(game)
        assert is_found and gained[-1] == 1.0 and len(gained) <= 4


def test_a_wrong_form_ends_a_game_of_gem():
    game = gem.maker(GUESS)(Task(seed=1))
    game.reset()
    assert game.step("seven").is_done


def test_games_of_gem_do_not_disturb_each_other_or_the_common_generator():
    def openings(count):
        games = [gem.maker("game:Minesweeper-v0-easy")(Task(seed=seed)) for seed in range(count)]
        return [game.reset() for game in games], games

    random.seed(7)
    expected = random.random()
    random.seed(7)
    alone, [first, *_] = openings(1)
    moves = [f"\\boxed{{reveal {r} {c}}}" for r in range(3) for c in range(3)]
    told = [first.step(move).text for move in moves[:2]]
    together, games = openings(6)
    mixed = []
    for move in moves[:2]:
        mixed.append(games[0].step(move).text)
        for other in games[1:]:
            other.step(move)
    assert together[0] == alone[0] and mixed == told
    assert random.random() == expected


def test_importing_gem_leaves_logging_as_it_was():
    handlers = list(logging.getLogger().handlers)
    gem.package()
    assert logging.getLogger().handlers == handlers


def test_an_unknown_game_of_gem_is_refused():
    with pytest.raises(ConfigError, match="gem:game:Nothing"):
        gem.maker("game:Nothing-v0")(Task(seed=1))


def test_openings_of_gem_are_problems_that_their_seed_gives_again():
    problem = gem.generator(GUESS)(random.Random(3))
    assert gem.maker(GUESS)(Task(meta=problem.meta)).reset() == problem.prompt


def test_an_environment_of_skyrl_gym_gives_rewards_by_turn():
    task = Task("42", {"extra_info": {"max_turns": 3}}, prompt="6*7?")
    made = skyrl.maker("gsm8k_multi_turn")(task)
    assert made.reset() == "6*7?"
    first, last = made.step("I think #### 41"), made.step("#### 42")
    assert (first.is_done, last.is_done, last.reward) == (False, True, 1.0)
    assert first.reward == pytest.approx(0.2 / 3) and first.messages[0]["role"] == "user"
    assert last.parts == {"steps": 2.0}
    made.close()


def test_an_environment_of_ones_own_with_init_and_step_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "class Echo:\n"
        "    def __init__(self, env_config, extras): self.want, self.left = extras['word'], env_config.turns\n"
        "    def init(self, prompt): return prompt, {}\n"
        "    def step(self, action):\n"
        "        self.left -= 1\n"
        "        done = self.want in action or not self.left\n"
        "        seen = [] if done else [{'role': 'user', 'content': 'no'}]\n"
        "        told = {'observations': seen, 'reward': float(self.want in action), 'done': done}\n"
        "        return {**told, 'metadata': {'n': 1}}\n"
        "    def close(self): ...\n"
        "class Changes(Echo):\n"
        "    def init(self, prompt): return [{'role': 'user', 'content': 'other'}], {}\n"
    )
    made = skyrl.maker("own.py:Echo")(Task(meta={"word": "tide"}, prompt="say"), turns=3)
    made.reset()
    first, last = made.step("x"), made.step("the tide")
    assert (first.text, first.is_done) == ("no", False) and (last.reward, last.is_done, last.parts) == (
        1.0,
        True,
        {"n": 1.0},
    )
    with pytest.raises(ValueError, match=r"init\(\) changes the prompt"):
        skyrl.maker("own.py:Changes")(Task(meta={"word": "x"}, prompt="say"), turns=3).reset()


def test_an_unknown_environment_of_skyrl_gym_is_refused():
    with pytest.raises(ConfigError, match="skyrl:nothing"):
        skyrl.maker("nothing")


def test_a_game_of_gymnasium_is_played_by_its_text():
    moves = {"actions": ["left", "down", "right", "up"], "is_slippery": False}
    game = gymnasium.maker("FrozenLake-v1")(Task(seed=3), **moves)
    assert "[S]" in game.reset()
    for move in ("down", "down", "right", "right", "down"):
        assert not game.step(move).is_done
    last = game.step("right")
    assert last.is_done and last.reward == 1.0
    game.close()


def test_a_game_of_textarena_tells_only_what_is_new():
    game = textarena.maker("GuessTheNumber-v0")(Task(seed=3))
    opening = game.reset()
    turn = game.step("[7]")
    assert "guess" in opening.lower() and opening not in turn.text


def test_a_game_of_textarena_for_two_ends_zero_sum():
    game = textarena.several("TicTacToe-v0", 2)(Task(seed=3))
    round_, cells = game.reset(), iter("041526378")
    said = []
    while not round_.is_done:
        [seat] = round_.asks
        said.append(seat)
        round_ = game.step({seat: f"[{next(cells)}]"})
    assert said[:4] == [0, 1, 0, 1] and sum(round_.rewards.values()) == 0 and round_.solved[0] != round_.solved[1]
