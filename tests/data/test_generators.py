import pytest

from tidemill.data.source import Order, open_source
from tidemill.errors import DataError
from tidemill.recipe.config import Data


def test_chain_works_every_step_out_and_ends_with_the_answer() -> None:
    train, _ = open_source(Data(source="chain", args={"terms": [2, 6], "max_total": 12}), seed=1)
    for index in range(200):
        example = train.example(index)
        steps = [step.split("=") for step in (example.response or "").split()]
        assert all(eval(left) == int(right) for left, right in steps)
        totals = [int(right) for _, right in steps]
        assert eval(str(example.prompt).rstrip("=")) == totals[-1] == int(example.answer)
        assert min(totals) >= 0 and max(totals) <= 12
        assert len(totals) == example.meta["terms"] - 1


def test_careless_chains_answer_at_once_and_only_short_ones_rightly() -> None:
    train, _ = open_source(Data(source="chain", args={"terms": [2, 6], "max_total": 9, "worked": 0.25}), seed=1)
    examples = [train.example(i) for i in range(800)]
    careless = [e for e in examples if "=" not in (e.response or "")]
    assert 0.65 < len(careless) / len(examples) < 0.85
    right = {e.meta["terms"] == 2: 0 for e in careless}
    for e in careless:
        right[e.meta["terms"] == 2] += (e.response or "").strip() == e.answer
    assert right[True] == sum(e.meta["terms"] == 2 for e in careless)
    assert right[False] < 0.25 * sum(e.meta["terms"] > 2 for e in careless)


@pytest.mark.parametrize("name", ["chain", "arithmetic", "addition", "multiplication", "sorting", "countdown", "code"])
def test_held_out_problems_never_occur_in_training(name: str) -> None:
    train, held_out = open_source(Data(source=name, held_out=20), seed=3)
    assert held_out.size
    aside = {str(held_out.example(i).prompt) for i in range(held_out.size)}
    assert len(aside) == held_out.size
    assert aside.isdisjoint(str(train.example(i).prompt) for i in range(300))


def test_held_out_problems_are_the_same_for_every_seed_and_training_ones_are_not() -> None:
    (a, a_out), (b, b_out) = (open_source(Data(source="chain", held_out=10), seed) for seed in (1, 2))
    assert [a_out.example(i) for i in range(10)] == [b_out.example(i) for i in range(10)]
    assert [a.example(i).prompt for i in range(10)] != [b.example(i).prompt for i in range(10)]


def test_an_example_depends_on_nothing_but_seed_and_index() -> None:
    first, _ = open_source(Data(source="sorting"), seed=5)
    second, _ = open_source(Data(source="sorting"), seed=5)
    forwards = [first.example(i) for i in range(5)]
    assert forwards == [second.example(i) for i in reversed(range(5))][::-1]


def test_countdown_solutions_reach_their_target_with_the_given_numbers() -> None:
    train, _ = open_source(Data(source="countdown"), seed=0)
    for index in range(100):
        example = train.example(index)
        assert eval(example.response or "") == example.meta["target"]


def test_every_kind_of_slip_is_made_and_none_is_right() -> None:
    source, _ = open_source(Data(source="reversal", args={"pairs": True, "slips": True}), seed=0)
    examples = [source.example(i) for i in range(300)]
    assert all(e.meta["rejected"] != e.answer for e in examples)
    assert {len(e.meta["rejected"]) - len(e.answer) for e in examples} == {-1, 0, 1}
    copies = sum(e.meta["rejected"] == e.answer[::-1] for e in examples)
    assert 40 < copies < 120


def test_a_misspelt_setting_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(DataError, match="did you mean terms"):
        open_source(Data(source="chain", args={"term": 3}), seed=0)


def test_settings_that_cannot_work_name_the_key() -> None:
    with pytest.raises(DataError, match=r"data.args.terms"):
        open_source(Data(source="chain", args={"terms": [6, 3]}), seed=0)


def test_a_generator_with_too_few_problems_says_so() -> None:
    with pytest.raises(DataError, match="held out"):
        open_source(Data(source="chain", args={"terms": 2, "max_value": 1, "operators": "+"}), seed=0)


def test_a_generator_can_be_a_users_own_function(tmp_path, monkeypatch) -> None:
    (tmp_path / "mytask.py").write_text(
        "from tidemill.data.generators import Problem\n"
        "def echo(rng, size=9):\n    n = str(rng.randint(0, 10**size)); return Problem(n, n)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    train, held_out = open_source(Data(source="mytask:echo", args={"size": 3}, held_out=5), seed=0)
    assert train.example(0).prompt == train.example(0).answer
    assert held_out.size == 5
    by_file, _ = open_source(Data(source=f"{tmp_path}/mytask.py:echo"), seed=0)
    assert by_file.example(0).answer


class Ten:
    name, size = "ten", 10

    def example(self, index: int):
        raise NotImplementedError


def test_each_pass_sees_every_example_once_in_a_new_order() -> None:
    order = Order(Ten(), seed=4)
    passes = [[order.order(p) for p in range(k * 10, k * 10 + 10)] for k in range(3)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    again = Order(Ten(), seed=4)
    assert [again.order(p) for p in range(20, 30)] == passes[2]
    assert again.order(0) == passes[0][0]


def test_without_shuffling_examples_come_as_they_are() -> None:
    order = Order(Ten(), seed=4, shuffle=False)
    assert [order.order(p) for p in range(12)] == [*range(10), 0, 1]
