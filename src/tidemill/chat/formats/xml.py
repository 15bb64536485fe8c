"""Qwen3-Coder and later: `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from tidemill.chat.answer import Answer, Schema, ToolCall, parameters_of
from tidemill.chat.formats.api import RESULT, THINK, UNTHINK, with_thoughts, without_thoughts

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class Xml:
    name = "xml"
    markers: tuple[str, ...] = (OPEN, CLOSE, "<function=", "</function>", "<parameter=", "</parameter>", THINK, UNTHINK)
    openings: tuple[str, ...] = (OPEN, "<function=")
    how_to_call = (
        "To use one, write <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>; you will "
        "then read what it gives. Several calls may follow one another."
    )
    result = RESULT

    def is_of(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        reasoning, text = without_thoughts(text)
        calls, unread = list[ToolCall](), list[str]()
        words, place = "", 0
        for found in FUNCTION.finditer(text):
            words += text[place : found.start()]
            place = found.end()
            name = found[1].strip()
            schema = parameters_of(tools, name)
            given = {
                key.strip(): value_of(value, schema.get(key.strip())) for key, value in PARAMETER.findall(found[2])
            }
            calls.append(ToolCall(name, given))
        words += text[place:]
        for part in words.split(OPEN)[1:]:
            inside = part.partition(CLOSE)[0].strip()
            unread += [inside] if inside else []
            words = words.replace(inside, "") if inside else words
        words = words.replace(OPEN, "").replace(CLOSE, "").strip()
        return with_thoughts(reasoning, Answer(words, None, tuple(calls), tuple(unread)))

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        return None


def value_of(text: str, schema: Any) -> Any:
    """A parameter's text as its schema's type; text where there is no schema, or the text does not fit it."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text.strip().lower() if kind == "boolean" else text)
    except ValueError:
        return text
