"""Games of several players: each seat is a sample of its own, with its own tokens and its own reward."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.serve.made import model_folder

from tidemill.batch import GROUP, ID
from tidemill.data.tictactoe import careless, placed, value
from tidemill.environment.api import Round, Task
from tidemill.environment.duels import NimDuel, TicTacToe
from tidemill.environment.league import POLICY, League
from tidemill.errors import ConfigError
from tidemill.flow.stages.rolling import rollout_columns
from tidemill.learn.engine import score
from tidemill.models.load import open_folder
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Request, Sampling
from tidemill.serve.make import make_engine


class SameWord:
    """Two speak at once, for three rounds, and win together; seat 1 is told what seat 0 said."""

    seats = 2

    def __init__(self, task: Task, rounds: int = 3) -> None:
        self.left = rounds

    def reset(self) -> Round:
        return Round({0: "say:", 1: "say too:"})

    def step(self, said) -> Round:
        self.left -= 1
        gained = {0: 0.25, 1: 0.5 if said[0] == said[1] else 0.25}
        if self.left == 0:
            return Round(is_done=True, rewards=gained, solved={0: True, 1: True}, parts={"rounds": 1.0})
        return Round({0: " more:", 1: f" {said[0][:2]}:"}, rewards=gained, parts={"rounds": 1.0})


class Raises(SameWord):
    def step(self, said) -> Round:
        raise ValueError("a mistake of the game")


NAME = f"{__file__}:"
HEAP = Task(meta={"heap": 7, "most": 3, "seed": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("seats") / "tiny")


def engine_of(folder, run=None, league=None, **environment):
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "environment": {"players": 2, "max_turn_tokens": 6, "league": league, **environment},
            "rewards": "environment",
            "data": {"source": "nim", "max_prompt_tokens": 60},
            "rollout": {"max_new_tokens": 400, "concurrent": 16},
        }
    )
    loaded = open_folder(folder, config.model, torch.device("cpu"))
    return make_engine(loaded, config, run), loaded, config


def played(engine, n=4, requests=1, task=HEAP, first=0):
    for i in range(first, first + requests):
        engine.submit(Request(i, [1, 2, 3], Sampling(max_tokens=300), n=n, task=task))
    done = []
    while engine.has_work:
        done += engine.step()
    assert sorted((c.request.id, c.index) for c in done) == [
        (i, k) for i in range(first, first + requests) for k in range(n)
    ]
    return sorted(done, key=lambda c: (c.request.id, c.index))


def test_both_seats_are_learned_with_their_own_prompt_tokens_and_reward(folder):
    engine, loaded, config = engine_of(folder, name=f"{NAME}SameWord")
    sampled, step = [], engine.inner.step

    def watched():
        made = step()
        sampled.extend(made)
        return made

    engine.inner.step = watched
    done = played(engine, n=4, requests=2)
    assert [c.seat for c in done] == [0, 1] * 4
    learned = [t for c in done for t, m in zip(c.tokens, c.mask) if m]
    assert sorted(learned) == sorted(t for c in sampled for t in c.tokens) and len(sampled) == 8 * 3
    prompts = {c.seat: loaded.tokenizer.decode(c.request.prompt) for c in done}
    assert "say:" in prompts[0] and "say too:" in prompts[1]
    assert {c.played.reward for c in done if c.seat == 0} == {0.75}
    for c in done:
        assert [r for _, r in c.turn_rewards] == pytest.approx([c.played.reward / 3] * 3, abs=0.26)
        assert c.played.turns == 3 and c.played.parts["rounds"] == 3.0 and c.played.is_solved
    own = {GROUP: np.array([c.request.id for c in done]), ID: np.arange(len(done))}
    found = score(loaded.model, rollout_columns(done).merge(own), config).values
    mask = np.concatenate([c.mask for c in done]).astype(bool)
    assert np.abs(found - np.concatenate([c.logprobs for c in done]))[mask].max() < 1e-4


def test_the_same_match_is_the_same_beside_others(folder):
    alone = played(engine_of(folder, name=f"{NAME}SameWord")[0], requests=1)
    beside = played(engine_of(folder, name=f"{NAME}SameWord")[0], requests=5)[: len(alone)]
    assert [c.tokens for c in alone] == [c.tokens for c in beside]


def test_a_game_that_fails_costs_its_own_match(folder):
    done = played(engine_of(folder, name=f"{NAME}Raises")[0], n=2)
    assert all("a mistake of the game" in c.played.error and sum(c.mask) > 0 for c in done)


def test_past_versions_play_and_their_moves_are_not_learned(folder, tmp_path):
    league = {"every": 1, "share": 1.0}
    engine, loaded, _ = engine_of(folder, tmp_path, league, name="nim_duel")
    assert {c.seat for c in played(engine)} == {0, 1}  # nobody has been before
    engine.load(None, 1)
    with torch.no_grad():
        for tensor in loaded.model.parameters():
            tensor += 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    engine.load(None, 2)
    done = played(engine, n=4, requests=3, first=10)
    assert [c.seat for c in done] == [0, 1] * 6 and all(c.played.parts["against_past"] == 1.0 for c in done)
    kept = League(tmp_path / "league", engine.league.settings)
    matches = kept.matches()
    assert len(matches) == 12 and all(m.version == 2 and POLICY in m.players for m in matches)
    assert {name for m in matches for name in m.players} == {POLICY, "v00000001"}
    past = engine.past.engine(1)
    assert past.model is not loaded.model and not torch.equal(past.model.lm_head.weight, loaded.model.lm_head.weight)


def test_evaluations_are_played_against_the_expert(folder):
    engine, *_ = engine_of(folder, name="nim_duel")
    done = played(engine, n=3, task=Task(meta={"heap": 9, "most": 3, "seed": 1, "seat": 1}, is_trial=True))
    assert [c.seat for c in done] == [1, 0, 1]


def test_players_and_seats_must_agree(folder):
    with pytest.raises(ConfigError, match="has 2 seats"):
        engine_of(folder, name="nim_duel", players=3)
    with pytest.raises(ConfigError, match="is for one"):
        engine_of(folder, name="nim")


def test_perfect_players_of_tic_tac_toe_draw():
    for seed in range(20):
        game = TicTacToe(Task(meta={"seed": seed}))
        state = game.reset()
        while not state.is_done:
            [seat] = state.asks
            state = game.step({seat: game.expert(seat)})
        assert state.rewards == {0: 0.0, 1: 0.0} and state.solved == {0: True, 1: True}


def test_a_perfect_player_of_nim_wins_a_winnable_heap():
    for heap in (5, 6, 7, 9, 10, 11):
        game = NimDuel(Task(meta={"heap": heap, "most": 3, "seed": heap}))
        state = game.reset()
        while not state.is_done:
            [seat] = state.asks
            state = game.step({seat: game.expert(seat) if seat == 0 else "1"})
        assert state.rewards == {0: 1.0, 1: -1.0}


def test_a_move_that_breaks_the_rules_loses():
    game = TicTacToe(Task())
    game.reset()
    assert game.step({0: "x"}).rewards == {1: 1.0, 0: -1.0}
    assert value(placed("XX.OO....", 2)) == -1 and len(careless(random.Random(1), "." * 9)) > 2
