"""The environments that come along."""

import random

import pytest

import tidemill
from tidemill.check import precheck
from tidemill.data.nim import nim, reply
from tidemill.environment import registry
from tidemill.environment.api import Task
from tidemill.environment.nim import Nim
from tidemill.environment.tools.calculator import calculator
from tidemill.environment.tools.environment import Tools
from tidemill.errors import ConfigError
from tidemill.recipe import load as recipe


def double(text: str) -> str:
    return text * 2


def test_the_winning_move_of_nim_wins_every_opening_and_a_slip_loses() -> None:
    rng = random.Random(0)
    for _ in range(50):
        problem = nim(rng)
        game = Nim(Task(meta=problem.meta))
        assert game.reset() == problem.prompt
        while not (turn := game.step(str(game.heap % (game.most + 1)))).is_done:
            pass
        assert (turn.reward, turn.is_solved) == (1.0, True)
        lost = Nim(Task(meta=problem.meta))
        best = lost.heap % (lost.most + 1)
        turn = lost.step(str(best % lost.most + 1) if best % lost.most + 1 <= lost.heap else "0")
        while not turn.is_done:
            turn = lost.step(str(reply(lost.heap, lost.most, rng)))
        assert turn.reward == 0.0 and turn.is_solved is False


@pytest.mark.parametrize("text", ["0", "9", "", "two", "-1", "1" * 9])
def test_a_broken_rule_loses_at_once(text: str) -> None:
    turn = Nim(Task(meta={"heap": 7, "most": 3, "seed": 0})).step(text)
    assert (turn.is_done, turn.reward, turn.parts) == (True, 0.0, {"broken_rules": 1.0})


def test_a_tool_is_called_and_its_result_is_told() -> None:
    tools = Tools(Task())
    turn = tools.step('let me see <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>')
    assert (turn.text, turn.is_done, turn.parts["calls"]) == ("<tool_response>42</tool_response>", False, 1.0)
    assert tools.step("it is 42").is_done
    assert tools.stop == ("</tool_call>",)


def test_one_tool_takes_plain_text_and_ones_own_function_is_a_tool() -> None:
    own = Tools(Task(), functions=[f"{__file__}:double"], opening="<", closing=">", inline=True, result="{}")
    turn = own.step("<ab>")
    assert (turn.text, turn.is_inline) == ("abab", True)


def test_a_tool_that_fails_tells_the_model() -> None:
    tools = Tools(Task(), functions=["calculator", f"{__file__}:double"])
    for call, told in (("1+1", "a call is JSON"), ('{"name": "calculater"}', "did you mean calculator")):
        turn = tools.step(f"<tool_call>{call}</tool_call>")
        assert told in turn.text and turn.parts["failed_calls"] == 1.0


@pytest.mark.parametrize(
    ("text", "value"), [("2+3*4", "14"), ("(1/3)*3", "1"), ("7/2", "3.5"), ("-2**3", "-8"), ("10 % 4", "2")]
)
def test_the_calculator_is_exact(text: str, value: str) -> None:
    assert calculator(text) == value


@pytest.mark.parametrize("text", ["1/0", "9**9**9", "__import__('os')", "x", "1+", "2**(1/2)", "9" * 300, "(" * 150])
def test_the_calculator_refuses_what_is_no_sum_or_too_large(text: str) -> None:
    with pytest.raises(ValueError):
        calculator(text)


def test_an_unknown_environment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean nim"):
        registry.find("nimm")
    config = recipe.load("cpu/game", ["environment.name=nimm"]).config
    with pytest.raises(ConfigError, match="did you mean nim"):
        precheck.check(config)


def test_arguments_an_environment_does_not_take_are_refused() -> None:
    config = recipe.load("cpu/game", ["environment.name=tools", "environment.args={functon: [calculator]}"]).config
    with pytest.raises(ConfigError, match=r"no argument 'functon'; did you mean functions"):
        precheck.check(config)


def test_its_reward_without_an_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="rewards is environment, but there is no environment"):
        precheck.check(recipe.load("cpu/grpo", ["rewards=environment"]).config)


def test_a_game_of_gymnasium_is_played_by_its_text() -> None:
    pytest.importorskip("gymnasium")
    game = registry.find("gymnasium:FrozenLake-v1")(
        Task(seed=3), actions=["left", "down", "right", "up"], is_slippery=False
    )
    assert "[S]FFF" in game.reset()
    turn = game.step("I go down")
    assert "[F]HFH" in turn.text and not turn.is_done
    for move in ("down", "right", "right", "down", "right"):
        turn = game.step(move)
    assert turn.is_done and turn.reward == 1.0


def test_a_game_of_textarena_tells_only_what_is_new() -> None:
    pytest.importorskip("textarena")
    game = registry.find("textarena:GuessTheNumber-v0")(Task(seed=3))
    assert "between 1 and 20" in game.reset()
    turn = game.step("[5]")
    assert turn.text.startswith("[GAME]") and "between" not in turn.text


def test_a_missing_package_of_games_is_named() -> None:
    try:
        import textarena  # noqa: F401
    except ImportError:
        with pytest.raises(tidemill.errors.TidemillError, match=r"textarena.*not installed"):
            registry.find("textarena:GuessTheNumber-v0")
    else:
        pytest.skip("it is installed")
