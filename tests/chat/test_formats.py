"""Answers as models of each family write them, read into calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.made import TEMPLATES
from tidemill.chat.answer import Answer, ToolCall
from tidemill.chat.formats import FORMATS, detect, named
from tidemill.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "code": {"type": "string"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("weather", "run", "search")
]
PARIS, ROME = ToolCall("weather", {"city": "Paris", "days": 2}), ToolCall("weather", {"city": "Rome"})
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
V31 = (
    'A moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 2}'
    '<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
V32 = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>"
)
JSON_PARIS, JSON_ROME = (
    '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}',
    (
        '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}'  # arguments as text, as OpenAI writes them
    ),
)
RECORDED: list[tuple[str, str, Answer]] = [
    ("hermes", f"<tool_call>\n{JSON_PARIS}\n</tool_call>\n<tool_call>\n{JSON_ROME}\n</tool_call>\n",
     Answer("", None, (PARIS, ROME))),
    ("hermes", f"<think>\nTwo cities.\n</think>\n\nLet me look.\n<tool_call>{JSON_PARIS}</tool_call>",
     Answer("Let me look.", "Two cities.", (PARIS,))),
    ("hermes", f"Two cities.\n</think>\n<tool_call>\n{JSON_PARIS}", Answer("", "Two cities.", (PARIS,))),
    ("hermes", "<tool_call>\n{'name': weather}\n</tool_call>", Answer("", None, (), ("{'name': weather}",))),
    ("hermes", "It is sunny.", Answer("It is sunny.")),
    ("hermes", "<think>\nStill thin", Answer("", "Still thin")),
    ("xml", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>"
     "\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
     "</tool_call>", Answer("", None, (PARIS, ROME))),
    ("xml", "First.\n<tool_call>\n<function=run>\n<parameter=code>\nif a < b:\n    print('<b>')\n</parameter>\n"
     "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
     Answer("First.", None, (ToolCall("run", {"code": "if a < b:\n    print('<b>')", "exact": True}),))),
    ("xml", "<tool_call>\nweather in Paris\n</tool_call>", Answer("", None, (), ("weather in Paris",))),
    ("llama", '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', Answer("", None, (PARIS,))),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; '
     '{"name": "weather", "parameters": {"city": "Rome"}}', Answer("", None, (PARIS, ROME))),
    ("llama", '[weather(city="Paris", days=2), weather(city="Rome")]', Answer("", None, (PARIS, ROME))),
    ("llama", "<|python_start|>[weather(city='Paris', days=2)]<|python_end|>", Answer("", None, (PARIS,))),
    ("llama", '<|python_tag|>brave_search.call(query="tides")',
     Answer("", None, (ToolCall("brave_search.call", {"query": "tides"}),))),
    ("llama", 'Write {"name": "weather"} to call it.', Answer('Write {"name": "weather"} to call it.')),
    ("llama", '{"name": "Ann", "age": 4}', Answer('{"name": "Ann", "age": 4}')),  # no tool's name
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
     '{"name": "weather", "arguments": {"city": "Rome"}}]', Answer("", None, (PARIS, ROME))),
    ("mistral", 'A moment.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]weather[CALL_ID]abcdefghi'
     '[ARGS]{"city": "Rome"}', Answer("A moment.", None, (PARIS, ToolCall("weather", {"city": "Rome"}, "abcdefghi")))),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris", "days": 2}', Answer("", None, (PARIS,))),
    ("mistral", "[THINK]Two.[/THINK]It is two.", Answer("It is two.", "Two.")),
    ("mistral", "[TOOL_CALLS] none", Answer("", None, (), ("none",))),
    ("deepseek", V3, Answer("", None, (PARIS, ROME))),
    ("deepseek", V31, Answer("A moment.", None, (PARIS, ROME))),
    ("deepseek", V32, Answer("", None, (PARIS, ROME))),
    ("deepseek", "Two.</think>It is two.", Answer("It is two.", "Two.")),
    ("harmony", "<|channel|>analysis<|message|>Two cities.<|end|><|start|>assistant<|channel|>commentary to="
     'functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
     Answer("", "Two cities.", (PARIS,))),
    ("harmony", "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is sunny."
     "<|return|>", Answer("It is sunny.", "Easy.")),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": <|call|>',
     Answer("", None, (), ('{"city":',))),
    ("gemma", '```tool_code\nprint(weather(city="Paris", days=2))\nweather(city="Rome")\n```',
     Answer("", None, (PARIS, ROME))),
    ("gemma", "Let me see.\n```tool_code\n[weather(city='Paris', days=2)]\n```",
     Answer("Let me see.", None, (PARIS,))),
    ("gemma", "<start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>"
     "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>",
     Answer("", None, (PARIS, ROME))),
    ("gemma", "```tool_code\nimport os\n```", Answer("", None, (), ("import os",))),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "answer"), RECORDED)
def test_an_answer_is_read(format: str, text: str, answer: Answer) -> None:
    assert named(format).read(text, TOOLS) == answer


@pytest.mark.parametrize(
    ("family", "format"),
    [("qwen", "hermes"), ("qwen3", "hermes"), ("llama", "llama"), ("mistral", "mistral"), ("gemma", "gemma"),
     ("harmony", "harmony"), ("deepseek", "deepseek")],
)  # fmt: skip
def test_a_template_tells_its_format(family: str, format: str) -> None:
    assert detect(TEMPLATES[family]).name == format


def test_a_template_with_functions_as_elements_is_told_from_one_with_json() -> None:
    assert detect("<tool_call> {{ '<function=' }} <parameter=").name == "xml"


def test_an_unknown_format_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean hermes"):
        named("herms")


@pytest.mark.parametrize("format", FORMATS)
@given(
    text=st.text(alphabet="<>{}[]|=_/\"'\\:,;a1 \n`(){}tool_call｜▁", max_size=80), marks=st.lists(st.integers(0, 20))
)
def test_any_text_can_be_read(format: str, text: str, marks: list[int]) -> None:
    """Whatever a model writes, and however its marks are mixed, reading it raises nothing."""
    reads = FORMATS[format]
    words = [*reads.markers, *reads.openings, '{"name": "f", "arguments": {}}', text]
    answer = reads.read("".join(words[m % len(words)] for m in marks) + text, TOOLS)
    assert all(
        isinstance(call.name, str) and json.loads(json.dumps(call.arguments)) is not ... for call in answer.calls
    )
