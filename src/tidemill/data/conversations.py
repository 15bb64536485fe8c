"""Conversations as people have them (OpenAI's messages, ShareGPT's turns), and which of their tokens an assistant said.

`spoken` tokenises a conversation once, whole, and marks the assistant's tokens: by the chat template's own
`{% generation %}` where it has that, else by rendering the conversation up to each turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.data.source import Message
from tidemill.errors import DataError

SHAREGPT_COLUMNS = ("conversations", "conversation")
COLUMNS = ("messages", *SHAREGPT_COLUMNS)
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
GENERATION = ("{% generation", "{%- generation")
LEAVE_OUT = "set data.on_bad_row=skip to leave such rows out"


class NoConversation(ValueError):
    """What is wrong with a row's messages, as the end of a sentence about the row."""


def messages_of(row: Mapping[str, Any]) -> list[Message] | None:
    """Give the row's conversation as a list of role and content, whichever form it has; None where it has none."""
    name = next((column for column in COLUMNS if isinstance(row.get(column), list)), None)
    if name is None:
        return None
    messages = [_message(turn) for turn in row[name]]
    if not messages:
        raise NoConversation("has an empty list of messages")
    system = row.get("system")
    if name != "messages" and isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise NoConversation("has a message without role and content")
    if isinstance(turn.get("role"), str) and ("content" in turn or turn.get("tool_calls")):
        # Columnar files fill what a message lacks with null; a template would take that for something.
        own = {key: value for key, value in turn.items() if value is not None}
        return own | {"content": _text(turn.get("content"))}
    speaker = turn.get("from")
    if not isinstance(speaker, str) or "value" not in turn:
        raise NoConversation("has a message without role and content")
    if speaker not in SPEAKERS:
        raise NoConversation(f"has a message from {speaker!r}; it can be {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": _text(turn["value"])}


def _text(content: Any) -> Any:
    """Join OpenAI's list of parts to one text; parts that are no text are left for the template to take or refuse."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def tools_of(meta: Mapping[str, Any]) -> list[Any] | None:
    """Give the tools that the row offers, as a list or as JSON text."""
    tools = meta.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return None
    return tools if isinstance(tools, list) and tools else None


def render(
    tokenizer: Any, messages: list[Message], tools: list[Any] | None, where: str, *, asks: bool, **options: Any
) -> Any:
    """Apply the chat template; `asks` ends with the head of an assistant's turn. A template may refuse a row."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=asks, **({"tokenize": False} | options)
        )
    except Exception as error:  # a template is a program of others: what it raises is its own affair
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"{where}: the chat template refuses the conversation: {why}",
            "fix the row (order of roles, kinds of messages), set data.on_bad_row=skip, or give the model another "
            "chat template",
        ) from error


Grown = Callable[[str], str]


def spoken(
    tokenizer: Any, messages: list[Message], tools: list[Any] | None, where: str, grown: Grown | None = None
) -> tuple[list[int], list[bool]]:
    """Give all tokens of a conversation, and whether an assistant said each: its words and the end token behind.
    `grown`: writes out what a beginning of it shows."""
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: the conversation has no assistant's turn to learn from", LEAVE_OUT)
    if grown is None and any(mark in tokenizer.chat_template for mark in GENERATION):
        marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = render(tokenizer, messages, tools, where, asks=False, **marked)
        tokens, said = list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
    else:
        tokens, said = _by_turns(tokenizer, messages, tools, where, grown or str)
    end = tokenizer.eos_token_id
    _end_at(said, [token == end for token in tokens])
    if said[-1] and end is not None and tokens[-1] != end:  # the template closes no turn: the last one is closed here
        tokens, said = [*tokens, end], [*said, True]
    if not any(said):
        raise DataError(f"{where}: the assistant's turn is empty", LEAVE_OUT)
    return tokens, said


def _by_turns(
    tokenizer: Any, messages: list[Message], tools: list[Any] | None, where: str, grown: Grown
) -> tuple[list[int], list[bool]]:
    whole = render(tokenizer, messages, tools, where, asks=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:i], tools, where, asks=True)
        after = render(tokenizer, messages[: i + 1], tools, where, asks=False)
        if not (whole.startswith(before) and whole.startswith(after) and len(after) > len(before)):
            raise DataError(
                f"{where}: the chat template renders earlier turns differently once later ones follow, so the "
                "assistant's tokens cannot be found",
                "data.learn_turns=last learns only the last turn; a template with {% generation %} marks all",
            )
        spans.append((len(grown(before)), len(grown(after))))
    encoded = tokenizer(grown(whole), add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(a <= start and stop <= b for a, b in spans) for start, stop in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), inside


def _end_at(said: list[bool], is_end: list[bool]) -> None:
    """Unmark what a template writes behind a turn's last end token: it is no one's words."""
    start = 0
    while start < len(said):
        stop = next((i for i in range(start, len(said)) if said[i] != said[start]), len(said))
        ends = [i for i in range(start, stop) if is_end[i]]
        if said[start] and ends:
            said[ends[-1] + 1 : stop] = [False] * (stop - ends[-1] - 1)
        start = stop
