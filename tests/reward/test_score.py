import subprocess
import sys
import textwrap
import time

import pytest

from tidemill.errors import ConfigError, RewardError
from tidemill.recipe.config import Rewards
from tidemill.reward.api import Sample
from tidemill.reward.registry import missing_columns
from tidemill.reward.score import Scorer, workers


@pytest.fixture
def functions(tmp_path):
    """A user's file of reward functions; gives the import path of one."""
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
        import os, time
        from tidemill.reward.api import Reward
        def length(sample, scale=1.0): return scale * len(sample.response)
        def breaks(sample):
            if sample.response == "bad": raise KeyError("oops")
            return 1.0
        def nan(sample): return float("nan")
        def none(sample): return None
        def hangs(sample):
            while sample.response == "bad": pass
            return 1.0
        def dies(sample):
            if sample.response == "bad": os._exit(3)
            print("noise on standard output")
            return 1.0
        def full(sample): return Reward(0.2, {"style": 0.7}, correct=True)
        def modules(sample):
            import sys
            return float("torch" in sys.modules)
        """)
    )
    return lambda name: f"{file}:{name}"


def samples(*responses: str, answer: str = "17") -> list[Sample]:
    return [Sample("p", r, answer, {}, id=10 + i, where=f"data.jsonl:{i}") for i, r in enumerate(responses)]


def test_last_number_is_right_when_the_last_total_is() -> None:
    with Scorer(Rewards(functions="last_number")) as scorer:
        scored = scorer.submit(samples("12 9 17", "12 9 18", "17 3", "", "12 9 17.0")).result()
    assert [s.value for s in scored] == [1, 0, 0, 0, 1]
    assert [s.correct for s in scored] == [True, False, False, False, True]
    assert scored[0].parts == {"last_number": 1.0}


def test_each_outcome_is_told_as_it_comes(functions) -> None:
    told = []
    rewards = Rewards(functions=["last_number", functions("length")])
    with Scorer(rewards, lambda: told.append(1)) as scorer:
        scorer.score(samples("1", "2", "3"))
    assert len(told) == 6


def test_rewards_add_up_with_their_weights_and_keep_their_parts(functions) -> None:
    rewards = Rewards(
        functions=[
            {"function": "exact", "weight": 2.0},
            {"function": functions("length"), "weight": 0.1, "args": {"scale": 0.5}},
            {"function": functions("full"), "label": "judged"},
        ]
    )
    with Scorer(rewards) as scorer:
        (scored,) = scorer.score(samples("17"))
    assert scored.value == pytest.approx(2.0 + 0.1 * 1.0 + 0.2)
    assert scored.parts == {"exact": 1.0, "length": 1.0, "judged": 0.2, "judged.style": 0.7}
    assert scored.correct and scored.error is None


def test_order_is_kept_over_many_workers(functions) -> None:
    with Scorer(Rewards(functions=functions("length"), workers=2)) as scorer:
        futures = [scorer.submit(samples(*("x" * n for n in range(50)))) for _ in range(3)]
        for future in futures:
            assert [s.value for s in future.result()] == list(range(50))


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("breaks", "raised", "raised KeyError: 'oops'"),
        ("hangs", "timed_out", "took longer than"),
        ("dies", "died", "exit status 3"),
    ],
)
def test_only_the_sample_at_fault_is_lost_and_it_is_named(functions, name, fault, words) -> None:
    with Scorer(Rewards(functions=functions(name), timeout_s=0.5)) as scorer:
        scored = scorer.score(samples("a", "b", "bad", "c", "d"))
        assert [s.value for s in scored] == [1, 1, 0, 1, 1]
        assert [s.error is not None for s in scored] == [False, False, True, False, False]
        assert words in scored[2].error and "sample 12 (data.jsonl:2)" in scored[2].error and name in scored[2].error
        assert scorer.failures.by_fault == {fault: 1}
        assert scorer.failures.first.message == scored[2].error


@pytest.mark.parametrize(("name", "fault"), [("nan", "not_finite"), ("none", "wrong_type")])
def test_what_is_no_finite_number_counts_as_zero(functions, name, fault) -> None:
    with Scorer(Rewards(functions=functions(name))) as scorer:
        (scored,) = scorer.score(samples("a"))
        assert (scored.value, scored.correct) == (0.0, False)
        assert scorer.failures.by_fault == {fault: 1}


def test_on_error_fail_ends_with_the_sample_named(functions) -> None:
    words = r"sample 11 \(data.jsonl:1\).*breaks.*KeyError"
    with (
        Scorer(Rewards(functions=functions("breaks"), on_error="fail")) as scorer,
        pytest.raises(RewardError, match=words),
    ):
        scorer.score(samples("a", "bad"))


def test_workers_do_not_load_torch(functions) -> None:
    with Scorer(Rewards(functions=functions("modules"))) as scorer:
        assert scorer.score(samples("a"))[0].value == 0.0


def test_quick_rewards_start_no_process() -> None:
    code = (
        "import sys; from tidemill.recipe.config import Rewards; from tidemill.reward.score import Scorer\n"
        "from tidemill.reward.api import Sample\n"
        "s = Scorer(Rewards(functions='last_number')); s.score([Sample('', '1', '1')]); s.close()\n"
        "assert s._pool is None and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_submitting_does_not_wait(functions) -> None:
    with Scorer(Rewards(functions=functions("hangs"), timeout_s=1.0)) as scorer:
        began = time.monotonic()
        future = scorer.submit(samples("bad"))
        assert time.monotonic() - began < 0.5
        assert future.result()[0].error


def test_closing_ends_a_hanging_worker_at_once(functions) -> None:
    scorer = Scorer(Rewards(functions=functions("hangs"), timeout_s=600))
    future = scorer.submit(samples("bad", "a"))
    scorer.close()
    assert [s.value for s in future.result(timeout=10)] == [0, 0]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ("exakt", "did you mean exact"),
        ([{"function": "exact", "args": {"finel": "tag"}}], "did you mean final"),
        ([{"function": "exact", "args": {"final": "middle"}}], "final must be"),
        ("no_such_module:f", "cannot import"),
        ("tidemill.reward.verifiers.answers:exat", "did you mean exact"),
    ],
)
def test_a_recipes_mistake_is_found_before_any_sample(rewards, words) -> None:
    with pytest.raises(ConfigError, match=words):
        Scorer(Rewards(functions=rewards))


def test_the_first_failure_is_kept_with_its_sample_prompt_and_line(functions) -> None:
    with Scorer(Rewards(functions=functions("breaks"))) as scorer:
        scorer.score(samples("a", "bad", "bad"))
        found = scorer.failures
    assert (found.scored, found.failed, found.by_fault) == (3, 2, {"raised": 2})
    assert (found.first.sample, found.first.where, found.first.prompt) == (11, "data.jsonl:1", "p")
    assert found.first.at.endswith("mine.py:6") and "KeyError" in found.first.message


def test_a_librarys_exception_is_told_at_the_line_of_the_function_that_called_it(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\ndef broken(sample):\n    return json.loads('{')\n")
    with Scorer(Rewards(functions=f"{file}:broken")) as scorer:
        scorer.score(samples("a"))
        assert scorer.failures.first.at == f"{file}:3"


@pytest.mark.parametrize(
    ("rewards", "row", "missing"),
    [
        ("exact", {"answer": "3"}, []),
        ("exact", {}, ["answer"]),
        ("math", {"answer": " "}, ["answer"]),
        ("last_number", {"answer": None, "other": 1}, ["answer"]),
        ("code", {"tests": ["assert f(1) == 1"]}, []),
        ("code", {"answer": '["assert f(1) == 1"]'}, []),
        ("code", {"answer": ""}, ["tests|answer"]),
        ("countdown", {"numbers": [1], "target": 0}, []),
        ("countdown", {"answer": "3"}, ["numbers", "target"]),
        ("json_schema", {"answer": "3"}, ["schema"]),
        ([{"function": "json_schema", "args": {"schema": {}}}], {}, []),
        ([{"function": "regex", "args": {"pattern": "a{answer}"}}], {}, ["answer"]),
        ([{"function": "regex", "args": {"pattern": "a"}}], {}, []),
        ([{"function": "model", "args": {"path": "none"}}, "format"], {}, []),
        (["exact", "code"], {}, ["answer", "tests|answer"]),
    ],
)
def test_the_columns_that_a_row_lacks_are_named(rewards, row, missing) -> None:
    assert [found.column for found in missing_columns(Rewards(functions=rewards), row)] == missing


def test_a_users_reward_declares_what_it_reads(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tidemill.reward.api import reads\n@reads('tone')\ndef polite(sample): return 1.0\n"
        "def silent(sample): return 1.0\n"
    )
    rewards = Rewards(functions=[f"{file}:polite", f"{file}:silent"])
    (found,) = missing_columns(rewards, {"answer": "3"})
    assert found.column == "tone" and str(found) == f"the reward '{file}:polite' reads the column tone"
    assert missing_columns(rewards, {"tone": "warm"}) == []


def test_every_built_in_reward_is_checked_without_torch() -> None:
    code = (
        "import sys; from tidemill.recipe.config import Rewards\n"
        "from tidemill.reward.registry import BUILT_IN, missing_columns\n"
        "missing_columns(Rewards(functions=list(BUILT_IN)), {})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_are_as_many_as_cores_unless_a_number_is_given(monkeypatch) -> None:
    monkeypatch.setattr("tidemill.device.host.cores", lambda: 5)
    assert workers(Rewards(functions="math")) == 5
    assert workers(Rewards(functions="math", workers=3)) == 3
    monkeypatch.setattr("tidemill.device.host.cores", lambda: 500)
    assert workers(Rewards(functions="math")) == 32


def test_no_more_workers_start_than_there_are_samples_for(functions) -> None:
    with Scorer(Rewards(functions=functions("length"), workers=8)) as scorer:
        scorer.score(samples("a", "b"))
        assert sum(lane.thread.is_alive() for lane in scorer._pool._lanes) == 2
        scorer.score(samples("a", "b", "c"))
        assert sum(lane.thread.is_alive() for lane in scorer._pool._lanes) == 3
