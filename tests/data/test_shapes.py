"""Pictures that are drawn on the spot, and questions about them."""

import random

import numpy as np
import pytest

from tidemill.data.generators import find, held_out
from tidemill.data.pictures.shapes import COLOURS, PAPER, shapes
from tidemill.data.seen_grid import Grid, seen_grid
from tidemill.data.source import open_source
from tidemill.environment.api import Task
from tidemill.environment.seen_grid import SeenGrid
from tidemill.errors import DataError
from tidemill.recipe.config import Data

pytest.importorskip("PIL")


def test_a_count_is_what_is_drawn() -> None:
    """Counted again by connected areas of one colour: shapes never touch."""
    rng = random.Random(0)
    for _ in range(100):
        problem = shapes(rng, tasks=["count"], size=64, kinds=["circle"])
        assert areas((problem.images[0] != np.array(PAPER)).any(-1)) == int(problem.answer)


def areas(drawn: np.ndarray) -> int:
    """How many connected areas there are."""
    left, found = {(int(y), int(x)) for y, x in np.argwhere(drawn)}, 0
    while left:
        edge, found = [left.pop()], found + 1
        while edge:
            y, x = edge.pop()
            near = {(y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & left
            left -= near
            edge += near
    return found


def test_answers_are_in_the_pictures_and_not_in_the_questions() -> None:
    rng, answers = random.Random(1), {}
    for _ in range(600):
        problem = shapes(rng, most=3, kinds=["circle", "square"])
        assert problem.images[0].shape == (96, 96, 3) and "<image>" in problem.prompt
        answers.setdefault(problem.prompt, set()).add(problem.answer)
    assert len(answers) >= 10 and all(len(seen) >= 3 for seen in answers.values())


def test_the_highest_bar_is_the_highest() -> None:
    rng = random.Random(2)
    for _ in range(50):
        problem = shapes(rng, tasks=["chart"], size=96)
        if "highest" not in problem.prompt:
            continue
        tops = {}
        for name, colour in COLOURS.items():
            rows = np.flatnonzero((problem.images[0] == np.array(colour)).sum(1) >= 8)  # a bar is wide, a mark is not
            if name != "black" and len(rows):
                tops[name] = rows[0]
        if problem.answer != "black":
            assert min(tops, key=tops.get) == problem.answer


def test_pictures_of_training_are_not_held_out_ones() -> None:
    args = {"tasks": ["count"], "size": 32, "most": 3, "cells": 3}
    held = held_out("shapes", find("shapes"), args, 40).examples
    training, _ = open_source(Data(source="shapes", args=args), seed=0)
    seen = {(e.prompt, e.images[0].tobytes()) for e in map(training.example, range(400))}
    assert len(held) == 40 and not seen & {(e.prompt, e.images[0].tobytes()) for e in held}


@pytest.mark.parametrize(
    "args, why",
    [
        ({"tasks": ["conut"]}, "did you mean `?count"),
        ({"tasks": "count"}, "is a list of"),
        ({"size": 8}, "from 24"),
        ({"cells": 1}, "cells must be"),
        ({"most": 99}, "most must be"),
        ({"kinds": ["circle"], "tasks": ["relation"]}, "two kinds"),
    ],
)
def test_wrong_arguments_are_refused_with_what_would_do(args: dict, why: str) -> None:
    with pytest.raises(DataError, match=why):
        shapes(random.Random(0), **args)


def test_a_perfect_player_always_reaches_the_goal_and_sees_every_step() -> None:
    rng = random.Random(3)
    for _ in range(40):
        game = SeenGrid(Task(meta=seen_grid(rng).meta))
        before = game.grid.picture()
        for _ in range(20):
            turn = game.step(f" {game.grid.best()}\n")
            if turn.is_done:
                break
            assert len(turn.images) == 1 and (turn.images[0] != before).any()
            before = turn.images[0]
        assert turn.is_solved and turn.reward == 1.0


def test_falls_slowness_and_words_that_are_no_move_end_a_game() -> None:
    grid = Grid(3, 36, (0, 0), (2, 2), ((0, 1),))
    meta = grid.meta()
    assert SeenGrid(Task(meta=meta)).step("right").parts == {"falls": 1.0}
    assert SeenGrid(Task(meta=meta)).step("north").parts == {"broken_rules": 1.0}
    game = SeenGrid(Task(meta=meta), spare=0)
    turns = [game.step("up") for _ in range(4)]
    assert [turn.is_done for turn in turns] == [False] * 3 + [True] and turns[-1].parts == {"too_slow": 1.0}
    assert Grid.of(meta) == grid
