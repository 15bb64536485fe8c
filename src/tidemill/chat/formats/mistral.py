"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, or since its v11 tokenizers `[TOOL_CALLS]NAME[ARGS]{…}`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.chat.answer import Answer, Schema, ToolCall, call_of, decoded
from tidemill.chat.formats.api import RESULT, call_rules, first_json, quoted

CALLS, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THINK, UNTHINK = "[THINK]", "[/THINK]"


class Mistral:
    name = "mistral"
    markers: tuple[str, ...] = (CALLS, ARGS, ID, THINK, UNTHINK)
    openings: tuple[str, ...] = (CALLS,)
    how_to_call = (
        'To use some, write [TOOL_CALLS] [{"name": NAME, "arguments": {…}}]; you will then read what they give.'
    )
    result = RESULT

    def is_of(self, template: str) -> bool:
        return CALLS in template

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        reasoning = None
        if text.lstrip().startswith(THINK):
            reasoning, _, text = text.lstrip().removeprefix(THINK).partition(UNTHINK)
        words, *parts = text.split(CALLS)
        calls, unread = list[ToolCall](), list[str]()
        for part in parts:
            found = _named(part) if ARGS in part or "{" in part.partition("[")[0] else _listed(part)
            calls += found
            unread += [] if found else [part.strip()]
        return Answer(words.strip(), reasoning, tuple(calls), tuple(unread))

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        if CALLS in specials:  # written between square brackets, which Lark has no name for
            return None
        call, rules = call_rules(tools)
        more = ' (", " call)*' if parallel else ""
        return f'start: {quoted(CALLS, specials)} " [" call{more} "]"\n{call}\n{rules}'


def _listed(text: str) -> list[ToolCall]:
    try:
        value, _ = first_json(text)
    except ValueError:
        return []
    found = [call_of(one) for one in (value if isinstance(value, list) else [value])]
    return [call for call in found if call is not None] if None not in found else []


def _named(text: str) -> list[ToolCall]:
    head, has_marks, body = text.partition(ARGS)
    if not has_marks:  # some tokenizers write nothing between the name and its arguments
        head, brace, body = text.partition("{")
        body = brace + body
    name, _, id = head.partition(ID)
    try:
        value, _ = first_json(body)
    except ValueError:
        return []
    return [ToolCall(name.strip(), decoded(value), id.strip())] if name.strip() else []
