"""Several sources as one: exact shares, exact positions, rewards of their own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.test_readers import jsonl

from tidemill.data.mix import Mixed, whole_numbers, with_own_rewards
from tidemill.data.source import open_source
from tidemill.errors import ConfigError
from tidemill.recipe.config import Config, Data
from tidemill.reward.api import FROM, Sample
from tidemill.reward.score import Scorer


def sums(path: Path, n: int, sign: str = "+") -> str:
    return jsonl(path, [{"question": f"{i}{sign}1=", "answer": str(i)} for i in range(n)])


def mixed(tmp_path: Path, *weights: float, **more: Any) -> Data:
    sources = [
        {"source": sums(tmp_path / f"s{i}.jsonl", 10 + 7 * i, sign), "weight": weight}
        for i, (weight, sign) in enumerate(zip(weights, "+-*/"))
    ]
    return Data(sources=sources, columns={"prompt": "question"}, held_out=2, **more)


def taken(source: Any, count: int) -> list[str]:
    return [source.example(i).meta[FROM] for i in range(count)]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 7.5]), min_size=1, max_size=4))
def test_shares_are_exact_in_every_cycle_and_near_in_between(weights: list[float]) -> None:
    counts = whole_numbers(weights)
    assert [n / sum(counts) for n in counts] == pytest.approx([w / sum(weights) for w in weights])
    mix = Mixed.__new__(Mixed)
    Mixed.__init__(mix, [type("P", (), {"weight": w, "name": str(i)})() for i, w in enumerate(weights)])  # type: ignore[misc]
    seen: Counter[int] = Counter()
    for place, (which, rank) in enumerate(mix.cycle, 1):
        assert rank == seen[which]
        seen[which] += 1
        for i, n in enumerate(counts):
            assert abs(seen[i] - place * n / sum(counts)) < len(counts)
    assert [seen[i] for i in range(len(counts))] == counts


def test_each_source_is_shuffled_and_begun_again_by_itself(tmp_path: Path) -> None:
    training, held_out = open_source(mixed(tmp_path, 3, 1), seed=4)
    assert training.size == 10 + 17 - 4 and held_out.size == 4
    examples = [training.example(i) for i in range(4 * 40)]
    assert Counter(e.meta[FROM] for e in examples) == {"s0": 120, "s1": 40}
    first = [e.prompt for e in examples if e.meta[FROM] == "s0"]
    passes = [first[at : at + 8] for at in range(0, 120, 8)]  # 10 rows, 2 held out
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert passes[0] != passes[1]
    aside = {held_out.example(i).prompt for i in range(4)}
    assert not aside & {e.prompt for e in examples}
    assert [held_out.example(i).meta[FROM] for i in range(4)] == ["s0", "s1"] * 2


def test_a_position_says_all(tmp_path: Path) -> None:
    """What comes at a position depends on nothing that was read before."""
    data = mixed(tmp_path, 2, 1, 1)
    one, other = open_source(data, seed=1)[0], open_source(data, seed=1)[0]
    wanted = [one.example(i).prompt for i in range(60)]
    assert [other.example(i).prompt for i in reversed(range(60))] == wanted[::-1]


def test_no_source_trains_on_what_another_holds_out(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl", 40)
    copy = tmp_path / "b.jsonl"
    copy.write_text(Path(path).read_text())
    data = Data(sources=[{"source": path}, {"source": str(copy)}], columns={"prompt": "question"}, held_out=5)
    training, held_out = open_source(data, seed=3)
    aside = {held_out.example(i).prompt for i in range(held_out.size or 0)}
    assert aside and training.size is not None
    assert not aside & {training.example(i).prompt for i in range(2 * training.size)}


def test_files_and_generators_are_mixed(tmp_path: Path) -> None:
    data = Data(
        sources=[
            {"source": sums(tmp_path / "a.jsonl", 9), "columns": {"prompt": "question"}},
            {"source": "reversal", "args": {"length": 3}, "name": "letters"},
        ],
        held_out=2,
    )
    training, _ = open_source(data, seed=0)
    assert training.size is None
    assert Counter(taken(training, 40)) == {"a": 20, "letters": 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": [{"source": "reversal"}, {"source": "reversal"}]}, "two sources called 'reversal'"),
        ({"sources": [{"source": "reversal", "weight": 0.1234567}, {"source": "sorting"}]}, "round them"),
        ({"sources": [{"source": "reversal"}], "fit": True}, "data.fit looks at one source"),
    ],
)
def test_what_cannot_be_mixed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config = Config(data=Data(**change))
        open_source(with_own_rewards(config).data, seed=0)
    assert caught.value.remedy


def test_a_source_of_a_reward_that_is_none_is_refused() -> None:
    rewards = [{"function": "exact", "sources": ["sortin"]}]
    config = Config.model_validate({"data": {"sources": [{"source": "sorting"}]}, "rewards": rewards})
    with pytest.raises(ConfigError, match="did you mean sorting"):
        with_own_rewards(config)


def test_a_source_that_nothing_judges_is_refused() -> None:
    rewards = [{"function": "exact", "sources": ["sorting"]}]
    sources = [{"source": "sorting"}, {"source": "reversal"}]
    config = Config.model_validate({"data": {"sources": sources}, "rewards": rewards})
    with pytest.raises(ConfigError, match="no reward judges samples of the source 'reversal'"):
        with_own_rewards(config)


def test_each_source_is_judged_by_its_own_rewards() -> None:
    sources = [{"source": "sorting", "rewards": "exact"}, {"source": "reversal"}, {"source": "chain"}]
    config = Config.model_validate({"data": {"sources": sources}, "rewards": ["last_number", "stopped"]})
    made = with_own_rewards(config)
    judges = [(spec.function, spec.sources) for spec in made.rewards.functions]
    rest = ("reversal", "chain")
    assert judges == [("last_number", rest), ("stopped", rest), ("exact", ("sorting",))]
    assert with_own_rewards(made) == made  # a resumed run prepares again
    with Scorer(made.rewards) as scorer:
        samples = [Sample("", "x 7", "7", meta={FROM: "chain"}), Sample("", "7", "7", meta={FROM: "sorting"})]
        chain, sorting = scorer.score(samples)
    assert (chain.parts.keys(), sorting.parts.keys()) == ({"last_number", "stopped"}, {"exact"})
    assert chain.correct and sorting.correct and sorting.value == 1.0


def test_a_mix_trains_tells_of_each_source_and_resumes_where_it_was(tmp_path: Path) -> None:
    from tests.trainer.test_trainer import SMALL, numbers

    from tidemill import Trainer

    def made(folder: str, steps: int) -> Path:
        source = {"source": "reversal", "args": {"length": 2}, "rewards": "exact"}
        data = {"sources": [{**source, "weight": 3}, {"source": "arithmetic", "name": "sums"}], "held_out": 4}
        data["max_prompt_tokens"] = 16
        recipe = {**SMALL, "name": "run", "rewards": "last_number", "data": data, "checkpoint": {"every": 1}}
        recipe |= {"eval": {"size": 4, "before": False, "after": True}, "folder": str(tmp_path / folder)}
        Trainer(recipe=recipe, steps=steps).train()
        return tmp_path / folder / "run"

    whole, part = made("a", 3), made("b", 2)
    Trainer.from_run(part, steps=3).train()
    wanted = [row for row in numbers(whole) if "reward" in row]
    assert [row for row in numbers(part) if "reward" in row] == wanted
    for row in wanted:
        assert (row["source/reversal/samples"], row["source/sums/samples"]) == (12, 4)
        shares = 0.75 * row["source/reversal/reward"] + 0.25 * row["source/sums/reward"]
        assert row["reward"] == pytest.approx(shares)
    assert {"eval/source/reversal/accuracy", "eval/source/sums/accuracy"} <= {n for row in numbers(whole) for n in row}
