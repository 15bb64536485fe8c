"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.chat.answer import Answer, Schema, ToolCall, call_of
from tidemill.chat.formats.api import (
    HOW_TO_CALL,
    RESULT,
    THINK,
    UNTHINK,
    call_rules,
    first_json,
    quoted,
    with_thoughts,
    without_thoughts,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    name = "hermes"
    markers: tuple[str, ...] = (OPEN, CLOSE, THINK, UNTHINK)
    openings: tuple[str, ...] = (OPEN,)
    how_to_call = HOW_TO_CALL
    result = RESULT

    def is_of(self, template: str) -> bool:
        return OPEN in template

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        reasoning, text = without_thoughts(text)
        words, *parts = text.split(OPEN)
        calls, unread = list[ToolCall](), list[str]()
        for part in parts:
            inside, closed, behind = part.partition(CLOSE)
            try:
                value, rest = first_json(inside)
                call = call_of(value)
            except ValueError:
                call, rest = None, ""
            if call is None:
                unread.append(inside.strip())
            else:
                calls.append(call)
                behind = behind if closed else rest
            words += behind
        return with_thoughts(reasoning, Answer(words.strip(), None, tuple(calls), tuple(unread)))

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        call, rules = call_rules(tools)
        one = f'{quoted(OPEN, specials)} "\\n" call "\\n" {quoted(CLOSE, specials)}'
        more = f' ("\\n" {one})*' if parallel else ""
        return f"start: {one}{more}\n{call}\n{rules}"
