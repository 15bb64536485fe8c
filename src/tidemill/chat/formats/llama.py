"""Llama 3 and 4: an answer that is JSON with `name` and `parameters`, several with `;` between them; or, as Llama 3.2
and 4 may, calls as in Python: `[search(query="tides"), add(a=1, b=2)]`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.chat.answer import Answer, Schema, ToolCall, call_of
from tidemill.chat.formats.api import RESULT, call_rules, first_json
from tidemill.chat.formats.pythonic import calls_in

TAG, END_TAG = "<|python_tag|>", "<|python_end|>"
STARTS = ("<|python_start|>", TAG)


class Llama:
    name = "llama"
    markers: tuple[str, ...] = (TAG, "<|python_start|>", END_TAG)
    openings: tuple[str, ...] = (*STARTS, "{", "[")
    how_to_call = (
        'To use one, answer with nothing but {"name": NAME, "parameters": {…}}; you will then read what it gives.'
    )
    result = RESULT

    def is_of(self, template: str) -> bool:
        return TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        words, tag = text, ""
        for start in STARTS:
            if start in text:
                words, tag, text = text.partition(start)
        body = text.replace(END_TAG, "").strip()
        calls = _as_json(body) or calls_in(body)
        known = {tool.get("function", tool).get("name") for tool in tools}
        if calls and (tag or not known or all(call.name in known for call in calls)):
            return Answer(words.strip() if tag else "", None, tuple(calls))
        return Answer(words.strip(), None, (), (body,)) if tag else Answer(text.strip())

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        call, rules = call_rules(tools, "parameters")
        more = ' ("; " call)*' if parallel else ""
        return f"start: call{more}\n{call}\n{rules}"


def _as_json(text: str) -> list[ToolCall]:
    """All of the text, or nothing: JSON in the middle of words is an example, not a call."""
    calls: list[ToolCall] = []
    while text.strip(" \n;"):
        try:
            value, text = first_json(text.lstrip(" \n;"))
        except ValueError:
            return []
        found = [call_of(one) for one in (value if isinstance(value, list) else [value])]
        if None in found or not found:
            return []
        calls += [call for call in found if call is not None]
    return calls
