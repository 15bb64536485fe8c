"""Messages as clients send them (OpenAI's), in the form that chat templates read.

Content may be a list of parts: text parts are joined, any other part (a picture) is left where it stands, for a
template and a processor that know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.chat.answer import decoded

Message = Mapping[str, Any]
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    own = {key: value for key, value in message.items() if value is not None}
    role = str(own.get("role", ""))
    made = {**own, "role": "system" if role == "developer" else role, "content": content_of(own.get("content"))}
    if own.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in own["tool_calls"]]
    return made


def content_of(content: Any) -> Any:
    """Text, or a list of parts where some are no text."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    if all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content):
        return "".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    return content


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they are given what the JSON says."""
    function = dict(call.get("function") or {})
    return {**call, "type": "function", "function": {**function, "arguments": decoded(function.get("arguments"))}}


def text_of(message: Message) -> str:
    """All text of a message; parts that are no text are left out."""
    content = content_of(message.get("content"))
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", "")) for part in content if part.get("type") in TEXT_PARTS)


def mapped(message: Message, change: Any) -> dict[str, Any]:
    """The message with `change` applied to each of its texts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [{**p, "text": change(p["text"])} if isinstance(p.get("text"), str) else p for p in content]
        return {**message, "content": parts}
    return {**message, "content": change(content) if isinstance(content, str) else content}
