"""What a chat format is: marks around calls, and how an answer is read."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tidemill.chat.answer import Answer, Schema

THINK, UNTHINK = "<think>", "</think>"
HOW_TO_CALL = (
    'To use one, write <tool_call>{"name": NAME, "arguments": {…}}</tool_call>; you will then read what it gives. '
    "Several calls may follow one another."
)
RESULT = "<tool_response>\n{}\n</tool_response>"


class Format(Protocol):
    name: str
    markers: tuple[str, ...]  # texts that mean something to `read`, though a tokenizer may call them special tokens
    openings: tuple[str, ...]  # texts that a call may begin with: what stands before is words
    how_to_call: str  # in words, for templates that tell the model nothing of tools
    result: str  # the frame of a tool's result, for templates that know no messages of tools

    def is_of(self, template: str) -> bool: ...

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        """A whole answer, its end token left out. Text that is no call stays in `content` or `unread`."""

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        """A Lark grammar of calls of these tools, at least one; None where the format has none. Its first rule is
        `start`. `specials`: words that are one token each."""


def call_rules(tools: Sequence[Schema], key: str = "arguments") -> tuple[str, str]:
    """The rule `call`, a JSON object that calls one of the tools, and those it consists of."""
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, key: parameters(tool)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    names = [f"call_{i}" for i in range(len(schemas))]
    rules = [f"{name}: %json {json.dumps(schema)}" for name, schema in zip(names, schemas)]
    return f"call: {' | '.join(names)}", "\n".join(rules)


def parameters(tool: Schema) -> Any:
    """The JSON schema of a tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def quoted(word: str, specials: Collection[str]) -> str:
    """A word as Lark has it: a special token by its name, anything else as a string."""
    return word if word in specials and word.startswith("<") and word.endswith(">") else json.dumps(word)


def without_thoughts(text: str) -> tuple[str | None, str]:
    """Thoughts up to `</think>`, and the rest. The prompt itself may have opened them."""
    thoughts, closed, rest = text.partition(UNTHINK)
    before, opened, inside = thoughts.partition(THINK)
    if before.strip() and opened:
        return None, text
    if closed:
        return (inside if opened else thoughts).strip("\n"), rest.lstrip("\n")
    return (inside.strip("\n"), "") if opened else (None, text)


def with_thoughts(reasoning: str | None, answer: Answer) -> Answer:
    return answer if reasoning is None else replace(answer, reasoning=reasoning)


def first_json(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and what stands behind it. ValueError where there is none."""
    text = text.lstrip()
    value, end = json.JSONDecoder().raw_decode(text)
    return value, text[end:]
