"""What a model said, taken apart: words, thoughts, and calls of tools. Every chat format is read into these records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]  # of one tool, as OpenAI writes it: {"type": "function", "function": {"name": …}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Any  # as a rule a mapping; whatever else the model wrote in its place
    id: str = ""  # where the model's format gives calls a name of their own

    def arguments_json(self) -> str:
        """The arguments as OpenAI's clients want them: JSON in a string."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Answer:
    content: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    unread: tuple[str, ...] = ()  # what stands where a call should, and is none

    def message(self) -> dict[str, Any]:
        """As a message of the conversation, in the form that chat templates read."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            made["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return made


def decoded(arguments: Any) -> Any:
    """Arguments that are JSON in a string, as OpenAI writes them, as what that string says."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def call_of(value: Any) -> ToolCall | None:
    """`{"name": …, "arguments": …}` in the spellings that models use; None for anything else."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    given: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    return ToolCall(name, decoded(given), str(value.get("id") or ""))


def parameters_of(tools: Sequence[Schema], name: str) -> Mapping[str, Any]:
    """The JSON schema of each parameter of a tool; empty where the tool is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            found: Mapping[str, Any] = (function.get("parameters") or {}).get("properties") or {}
            return found
    return {}
