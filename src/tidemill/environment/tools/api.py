"""What a tool is: a name, a schema that the model is told, and a call that gives text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tidemill.chat.schema import schema_of


class Tool(Protocol):
    """One per conversation, so that it may keep what it is told."""

    schema: Mapping[str, Any]

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """What the model reads next, as text or as JSON. An exception is told to the model."""


@runtime_checkable
class ClosesTool(Protocol):
    """A tool that holds something to give back."""

    def close(self) -> None: ...


@dataclass(slots=True)
class FunctionTool:
    """A plain function; its schema comes from its signature and docstring."""

    function: Callable[..., Any]
    name: str
    schema: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.schema = schema_of(self.function, self.name)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        bound = inspect.signature(self.function).bind(**arguments)  # says what is missing or unknown
        return self.function(*bound.args, **bound.kwargs)


def name_of(tool: Tool) -> str:
    return str(tool.schema["function"]["name"])


def as_text(result: Any) -> str:
    """A result as the model reads it: text as it is, anything else as JSON where that can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
