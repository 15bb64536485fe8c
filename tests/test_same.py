"""`tidemill bench same` and `tidemill bench house`: that golden values still hold, and that a change would show."""

import json
from pathlib import Path

import pytest
from benchmarks import house, same

from tidemill import bench
from tidemill.errors import ConfigError

GOLDEN = json.loads(same.GOLDEN.read_text())
ELSEWHERE = 1e-5  # on another processor or compiler sums have another order; measured without vectors: 1.5e-7


@pytest.mark.parametrize("name", ["grpo", "dpo", "ppo", "lora"])
def test_a_run_has_its_golden_metrics(name: str) -> None:
    here = same.fingerprint()
    if here["torch"].split("+")[0] != GOLDEN["machine"]["torch"].split("+")[0]:
        pytest.skip(f"golden values are of torch {GOLDEN['machine']['torch']}, this is {here['torch']}")
    within = None if here == GOLDEN["machine"] else ELSEWHERE
    assert list(same.differences(name, GOLDEN["cases"], within)) == []


def test_one_percent_more_learning_rate_shows_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(same.CASES, "sft", (*same.CASES["sft"], "learn.lr=3.03e-3"))
    found = list(same.differences("sft", GOLDEN["cases"], ELSEWHERE))
    assert {f["step"] for f in found} == {1, 2, 3} and {f["metric"] for f in found} >= {"loss"}


def test_one_bit_is_a_difference_where_bits_are_compared() -> None:
    want, got = {"1": {"loss": (0.1).hex()}}, {"1": {"loss": (0.1 + 2**-56).hex()}}
    ((found),) = same.compare(want, got, 0.0)
    assert (found["step"], found["metric"], found["want"]) == (1, "loss", 0.1) and found["got"] > 0.1
    assert not list(same.compare(want, got, 1e-6))


@pytest.mark.parametrize("got", [{}, {"1": {}}, {"1": {"loss": "nan"}}])
def test_a_metric_that_is_missing_or_nan_is_a_difference_at_any_tolerance(got: same.Steps) -> None:
    assert [f["metric"] for f in same.compare({"1": {"loss": (0.1).hex()}}, got, 1.0)] == ["loss"]


def test_a_case_that_fails_is_reported_and_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(same.CASES, "dpo", ("algorithm=dpo", "learn.lr=fast"))
    result = bench.run("same", {"cases": ["dpo", "sft"]})
    assert (result["cases"], result["differs"][0]["case"]) == (2, "dpo")
    assert "ConfigError" in result["differs"][0]["got"]


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="no case 'grppo'"):
        bench.run("same", {"cases": "grppo"})


def test_every_case_has_golden_values() -> None:
    assert list(GOLDEN["cases"]) == list(same.CASES)


SOURCE = """
class Learner: ...
class Quick(Learner): ...
class Shape: ...
def look(x):
    return isinstance(x, (int, Quick)) or isinstance(x, int | a.Learner) or isinstance(x, Shape)
def check(config):
    if config:
        yield f"lr is {config}; 1 would do"
        yield config
    problems.append("no data")
    raise ValueError("heads must divide")
"""


@pytest.mark.parametrize("path", ["t/settings/a.py", "t/check/a.py", "t/config.py", "t/recipe/read.py"])
def test_code_is_counted_wherever_its_files_lie(path: str) -> None:
    found = house.count({Path(path): SOURCE, Path("t/long.py"): "def f():\n" + "    x = 1\n" * 451})
    assert (found["isinstance_own"], found["isinstance_any_own"], found["refusals"]) == (2, 3, 3)
    assert (found["functions"], found["functions_over_80"], found["files_over_450"]) == (3, 1, 1)
    assert found["functions_under_25_share"] == pytest.approx(2 / 3)
