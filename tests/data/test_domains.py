"""Generated cases of real work: what they promise, whatever the seed."""

import ast
import itertools
import random
import re

import pytest

from tidemill.data.domains import GENERATORS
from tidemill.data.domains.health import LEAST_OXYGEN, LEAST_PRESSURE, SYMPTOMS
from tidemill.data.domains.industry import FAULTS
from tidemill.data.generators import Problem
from tidemill.data.source import open_source
from tidemill.errors import DataError
from tidemill.recipe.config import Data, Rewards, RewardSpec
from tidemill.reward.api import Reward, Sample
from tidemill.reward.registry import find, missing_columns

REWARDS = {name: {"records": "record", "replies": "reply"}.get(name, name) for name in GENERATORS}


def made(name: str, count: int = 300, **args: object) -> list[Problem]:
    rng = random.Random(f"tests {name}")
    return [GENERATORS[name](rng, **args) for _ in range(count)]


def judged(name: str, problem: Problem, response: str | None) -> Reward:
    return find(REWARDS[name])(Sample(str(problem.prompt), response or "", problem.answer, problem.meta))


@pytest.mark.parametrize("name", GENERATORS)
def test_every_given_response_is_right_and_no_column_that_its_reward_reads_is_missing(name: str) -> None:
    rewards = Rewards(functions=(RewardSpec(function=REWARDS[name]),))
    for problem in made(name):
        verdict = judged(name, problem, problem.response)
        assert verdict.correct and verdict.value == 1.0, (problem, verdict)
        assert not missing_columns(rewards, {**problem.meta, "answer": problem.answer})


@pytest.mark.parametrize("name", GENERATORS)
def test_the_answer_of_another_case_is_wrong_and_worth_less(name: str) -> None:
    problems = made(name)
    for problem, other in itertools.pairwise(problems):
        if problem.answer != other.answer:
            verdict = judged(name, problem, other.response)
            assert not verdict.correct and verdict.value < 1.0, (problem, other, verdict)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(
    "response", ["", "\n", "I do not know.", "{", "red" * 500, "[R1]", "1/0 % FY2020", "((((" * 200]
)
def test_nonsense_is_never_right(name: str, response: str) -> None:
    assert not judged(name, made(name, 1)[0], response).correct


@pytest.mark.parametrize("name", GENERATORS)
def test_a_thousand_held_out_cases_never_occur_in_training(name: str) -> None:
    train, held_out = open_source(Data(source=name, held_out=1000), seed=1)
    assert held_out.size == 1000
    aside = {str(held_out.example(i).prompt) for i in range(1000)}
    assert len(aside) == 1000
    assert aside.isdisjoint(str(train.example(i).prompt) for i in range(300))


def test_a_red_flag_is_said_in_the_note_and_only_then() -> None:
    flags = [said for s in SYMPTOMS if s.level == "red" for said in s.said]
    shares = []
    for problem in made("health", 600):
        note = str(problem.prompt).split("\n")[1]
        oxygen, pressure = (int(n) for n in re.findall(r"SpO2 (\d+), BP (\d+)", note)[0])
        present = note.split(". SpO2")[0].split(": ", 1)[1].split(", ")
        has_flag = any(part in flags for part in present) or oxygen < LEAST_OXYGEN or pressure < LEAST_PRESSURE
        assert has_flag == problem.meta["is_red_flag"], note
        shares.append(has_flag)
    assert 0.3 < sum(shares) / len(shares) < 0.5


@pytest.mark.parametrize("response", ["amber R07.4", "", "green", "not red R07.4", "re"])
def test_a_red_flag_not_called_red_breaks_the_rule_whatever_else_is_right(response: str) -> None:
    flagged = next(p for p in made("health") if p.meta["is_red_flag"])
    verdict = judged("health", flagged, response)
    assert verdict.value == -1.0 and verdict.parts["broken"] == 1.0 and not verdict.correct


def test_calling_a_harmless_case_red_is_wrong_but_breaks_no_rule() -> None:
    harmless = next(p for p in made("health") if not p.meta["is_red_flag"])
    verdict = judged("health", harmless, " ".join(["red", *harmless.meta["codes"]]))
    assert verdict.parts["broken"] == 0.0 and 0.0 < verdict.value < 1.0 and not verdict.correct


def test_alarms_tell_every_fault_from_the_others() -> None:
    assert len({fault.alarms for fault in FAULTS}) == len(FAULTS)
    for problem in made("industry", unknown=0.0):
        log = [line.split(" ", 2) for line in str(problem.prompt).split("\n")[1:-1]]
        alarms = tuple(alarm for _, tag, alarm in log if tag == problem.meta["machine"])
        assert [f.name for f in FAULTS if f.alarms == alarms] == [problem.meta["fault"]]


def test_a_formula_must_be_made_of_the_statements_figures() -> None:
    problem = next(p for p in made("finance") if re.match(r"\d+/\d+ %", p.answer))
    formula, rest = problem.answer.split(" ", 1)
    above, below = formula.split("/")
    assert judged("finance", problem, f"{above} / {below} {rest}").correct
    for wrong in (
        f"{2 * int(above)}/{2 * int(below)}",
        f"{below}/{above}",
        f"{problem.meta['value']}",
        f"{above}//{below}",
    ):
        assert not judged("finance", problem, f"{wrong} {rest}").correct
    assert ast.parse(formula)


def test_money_that_the_policy_does_not_give_costs_and_two_citations_are_one_too_many() -> None:
    refused = next(p for p in made("service") if p.meta["decision"] == "refuse")
    clause = refused.meta["clause"]
    assert judged("service", refused, f"refund 10 EUR [{clause}]").value == -0.5
    assert not judged("service", refused, f"refuse [{clause}] [R{(int(clause[1]) % 9) + 1}]").correct
    assert not judged("service", refused, "refuse").correct


def test_a_record_is_judged_by_its_fields_and_its_schema_not_by_its_spelling() -> None:
    problem = next(p for p in made("records") if '"count"' in p.answer)
    assert judged("records", problem, problem.answer.replace(": ", " :  ")).correct
    assert not judged("records", problem, problem.answer[:-1] + ', "extra": 1}').correct
    assert not judged("records", problem, re.sub(r'"count": (\d+)', r'"count": "\1"', problem.answer)).correct


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("finance", {"lines": 2}),
        ("health", {"symptoms": 9}),
        ("industry", {"unknown": 2}),
        ("service", {"clauses": 9}),
        ("records", {"kinds": ["letter"]}),
        ("replies", {"good_share": 2}),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_can(name: str, args: dict[str, object]) -> None:
    with pytest.raises(DataError, match=f"data.args.*{next(iter(args))}"):
        made(name, 1, **args)
