"""DeepSeek V3, R1 and V3.1: calls between special tokens of their own. V3.2: invocations in DSML."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from tidemill.chat.answer import Answer, Schema, ToolCall, decoded
from tidemill.chat.formats.api import RESULT, THINK, UNTHINK, with_thoughts, without_thoughts

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, BETWEEN, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"
INVOKE = re.compile(rf'<{DSML}invoke name="([^"]+)">(.*?)(?:</{DSML}invoke>|\Z)', re.DOTALL)
PARAMETER = re.compile(
    rf'<{DSML}parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</{DSML}parameter>', re.DOTALL
)


class DeepSeek:
    name = "deepseek"
    markers: tuple[str, ...] = (ALL, ALL_END, ONE, BETWEEN, ONE_END, DSML, THINK, UNTHINK)
    openings: tuple[str, ...] = (ALL, ONE, f"<{DSML}")
    how_to_call = (
        f"To use some, write {ALL}{ONE}NAME{BETWEEN}{{…}}{ONE_END}{ALL_END} with the arguments as JSON; you will then "
        "read what they give."
    )
    result = RESULT

    def is_of(self, template: str) -> bool:
        return ONE in template or DSML in template

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        reasoning, text = without_thoughts(text)
        if DSML in text:
            return with_thoughts(reasoning, _dsml(text))
        calls, unread = list[ToolCall](), list[str]()
        words, *parts = text.split(ONE)
        for part in parts:
            inside = part.partition(ONE_END)[0]
            call = _call(inside)
            calls += [call] if call is not None else []
            unread += [inside.strip()] if call is None else []
        words = words.partition(ALL)[0] + text.partition(ALL_END)[2]
        return with_thoughts(reasoning, Answer(words.strip(), None, tuple(calls), tuple(unread)))

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        return None


def _call(text: str) -> ToolCall | None:
    """`function<sep>NAME` and a fenced block of JSON (V3, R1), or `NAME<sep>{…}` (V3.1)."""
    head, has_mark, body = text.partition(BETWEEN)
    if not has_mark:
        return None
    name = head.strip()
    if name == "function":
        name, _, body = body.partition("\n")
        body = body.strip().removeprefix("```json").removesuffix("```")
    given = decoded(body.strip())
    return None if isinstance(given, str) or not name.strip() else ToolCall(name.strip(), given)


def _dsml(text: str) -> Answer:
    words = text.partition(f"<{DSML}")[0].strip()
    calls = []
    for name, body in INVOKE.findall(text):
        given: dict[str, Any] = {}
        for key, is_text, value in PARAMETER.findall(body):
            try:
                given[key] = value if is_text == "true" else json.loads(value)
            except ValueError:
                given[key] = value
        calls.append(ToolCall(name, given))
    return Answer(words, None, tuple(calls), () if calls else (text[len(words) :].strip(),))
