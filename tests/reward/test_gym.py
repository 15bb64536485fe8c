import random

import pytest

pytest.importorskip("reasoning_gym")

from tidemill.data.source import open_source
from tidemill.errors import DataError
from tidemill.recipe.config import Data, Rewards
from tidemill.reward.api import Sample
from tidemill.reward.score import Scorer
from tidemill.reward.verifiers.gym import reasoning_gym


def test_a_task_is_judged_by_its_own_verifier() -> None:
    train, held_out = open_source(Data(source="reasoning_gym:basic_arithmetic", held_out=5), seed=0)
    example = train.example(3)
    assert example == open_source(Data(source="reasoning_gym:basic_arithmetic", held_out=5), seed=0)[0].example(3)
    right = Sample(str(example.prompt), example.answer, example.answer, example.meta)
    assert reasoning_gym(right).correct
    wrong = Sample(str(example.prompt), "no idea", example.answer, example.meta)
    assert not reasoning_gym(wrong).correct
    assert held_out.size == 5


ODD = [
    "",
    " ",
    "None",
    "[]",
    "{}",
    "\x00",
    "(" * 500,
    "1" * 4000,
    "NaN",
    "-",
    "[[1, 2], [",
    "😀",
    "1/0",
    "__import__('os')",
    "\n\n\n",
]


@pytest.mark.parametrize("task", ["countdown", "number_sorting", "sudoku", "simple_equations", "word_ladder", "maze"])
def test_odd_answers_score_and_do_not_raise(task) -> None:
    train, _ = open_source(Data(source=f"reasoning_gym:{task}", held_out=0), seed=1)
    example = train.example(0)
    for odd in ODD:
        assert 0.0 <= reasoning_gym(Sample(str(example.prompt), odd, example.answer, example.meta)).value <= 1.0


def test_it_runs_in_workers() -> None:
    train, _ = open_source(Data(source="reasoning_gym:chain_sum", held_out=0), seed=random.randrange(9))
    examples = [train.example(i) for i in range(4)]
    samples = [Sample(str(e.prompt), e.answer, e.answer, e.meta) for e in examples]
    with Scorer(Rewards(functions="reasoning_gym", timeout_s=30)) as scorer:
        assert all(s.correct for s in scorer.score(samples))


def test_an_unknown_task_shows_the_nearest() -> None:
    with pytest.raises(DataError, match=r"did you mean .*countdown"):
        open_source(Data(source="reasoning_gym:countdwn"), seed=0)


def test_settings_that_a_task_refuses_are_named() -> None:
    with pytest.raises(DataError, match=r"refuses data\.args"):
        open_source(Data(source="reasoning_gym:countdown", args={"min_numbers": -1}), seed=0)
