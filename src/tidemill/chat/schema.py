"""A tool's schema from a Python function: its name, its signature's types and its docstring."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
SECTION = re.compile(r"^\s*(args|arguments|parameters|params)\s*:?\s*$", re.IGNORECASE)
ENTRY = re.compile(r"^\s*:?(?:param\s+)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
NEXT_SECTION = re.compile(r"^\s*(returns?|raises|yields|examples?|notes?)\s*:?\s*$", re.IGNORECASE)


def schema_of(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """As OpenAI writes a tool. Types that JSON does not know are any value."""
    about, documented = described(inspect.getdoc(function) or "")
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        own = type_schema(hints.get(parameter.name, Any))
        if parameter.name in documented:
            own["description"] = documented[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, str | int | float | bool | None):
            own["default"] = parameter.default
        properties[parameter.name] = own
    parameters = {"type": "object", "properties": properties, "required": required}
    called = name or getattr(function, "__name__", "tool")
    return {"type": "function", "function": {"name": called, "description": about, "parameters": parameters}}


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError):  # names that only a type checker sees
        return {}


def type_schema(hint: Any) -> dict[str, Any]:
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        about = next((extra for extra in args[1:] if isinstance(extra, str)), None)
        return type_schema(args[0]) | ({"description": about} if about else {})
    if origin is Literal:
        kinds = {PLAIN.get(type(value)) for value in args}
        return {"enum": list(args)} | ({"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {})
    if origin in (Union, types.UnionType):
        options = [type_schema(arg) for arg in args]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if hint is list or origin in (list, Sequence, tuple, set) or hint in (tuple, set):
        return {"type": "array"} | ({"items": type_schema(args[0])} if args else {})
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object"} | ({"additionalProperties": type_schema(args[1])} if len(args) == 2 else {})
    return {}


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter (Google's sections, or Sphinx's `:param`)."""
    about, parameters, place, latest = list[str](), dict[str, str](), "about", ""
    for line in docstring.splitlines():
        entry = ENTRY.match(line)
        if SECTION.match(line):
            place = "parameters"
        elif NEXT_SECTION.match(line) or re.match(r"^\s*:(returns?|raises?|rtype)", line):
            place = "behind"
        elif entry is not None and (place == "parameters" or line.lstrip().startswith(":param")):
            latest = entry[1]
            parameters[latest] = entry[2].strip()
        elif place == "parameters" and latest and line.strip():
            parameters[latest] += f" {line.strip()}"
        elif place == "about":
            about.append(line.strip())
    return " ".join(line for line in about if line).strip(), parameters
