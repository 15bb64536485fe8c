"""Gemma: calls as in Python inside a `tool_code` block (Gemma 2 and 3); FunctionGemma's `call:NAME{key:value}` between
marks of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from tidemill.chat.answer import Answer, Schema, ToolCall
from tidemill.chat.formats.pythonic import calls_in

FENCE = re.compile(r"```tool_code\s*\n(.*?)(?:```|\Z)", re.DOTALL)
OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*\Z", re.DOTALL)


class Gemma:
    name = "gemma"
    markers: tuple[str, ...] = (OPEN, CLOSE, QUOTE)
    openings: tuple[str, ...] = ("```tool_code", OPEN)
    how_to_call = (
        "To use some, write them as in Python inside a block that begins with ```tool_code and ends with ```; you will "
        "then read what they give."
    )
    result = "```tool_output\n{}\n```"

    def is_of(self, template: str) -> bool:
        return "<start_of_turn>" in template or OPEN in template

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        calls, unread = list[ToolCall](), list[str]()
        for block in FENCE.findall(text):
            found = calls_in(block)
            calls += found
            unread += [] if found else [block.strip()]
        words = FENCE.sub("", text)
        head, *parts = words.split(OPEN)
        for part in parts:
            inside, _, behind = part.partition(CLOSE)
            call = _call(inside)
            calls += [call] if call is not None else []
            unread += [inside.strip()] if call is None else []
            head += behind
        return Answer(head.strip(), None, tuple(calls), tuple(unread))

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        return None


def _call(text: str) -> ToolCall | None:
    match = CALL.match(text)
    if match is None:
        return None
    try:
        return ToolCall(match[1], json.loads(_as_json(match[2])))
    except ValueError:
        return None


def _as_json(text: str) -> str:
    """Keys are bare words, and texts stand between two `<escape>`."""
    parts = text.split(QUOTE)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([{,]\s*)([A-Za-z_][\w\-]*)\s*:", r'\1"\2":', parts[i])
    for i in range(1, len(parts), 2):
        text_value: Any = parts[i]
        parts[i] = json.dumps(text_value, ensure_ascii=False)
    return "".join(parts)
