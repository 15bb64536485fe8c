"""What clients may ask for: the bodies of requests as typed records, and how tokens are drawn for them.

A field that no record names is ignored. What is named and cannot be done is refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tidemill.chat.answer import Schema
from tidemill.chat.formats.api import Format
from tidemill.rollout.engine import Grammar, Sampling

MOST_CHOICES = 128
MOST_STOPS = 16


class Refused(Exception):
    """A request that cannot be answered: what is wrong with it, and the field."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.field, self.status, self.code = message, field, status, code


class Drawing(msgspec.Struct, kw_only=True):
    """Fields that say how tokens are drawn, the same in every kind of request."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Chatting(Drawing, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Completing(Drawing, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool = False
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False


class Generating(msgspec.Struct, kw_only=True):
    """The body of `/inference/v1/generate`: tokens in, tokens out, as vLLM has it."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str = ""
    stream: bool = False
    request_id: str | None = None


class GenerateParams(Drawing, kw_only=True):
    max_tokens: int | None = None
    logprobs: int | None = None


class Tokenizing(msgspec.Struct, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenizing(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str = ""


def decoded(kind: type[Any], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].rstrip("`") or None
        raise Refused(f"the body does not fit: {error}", field) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from None


def choices_of(asked: Drawing) -> int:
    """How many answers are asked for."""
    if asked.n is not None and not 1 <= asked.n <= MOST_CHOICES:
        raise Refused(f"n is {asked.n}; it must be from 1 to {MOST_CHOICES}", "n")
    return asked.n or 1


def sampling(asked: Drawing, most: int, base: Sampling | None = None) -> Sampling:
    """How tokens are drawn for a request. `base`: of a run, whose temperature and cuts are the recipe's own, because
    learning computes log-probabilities at these."""
    stops = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    if len(stops) > MOST_STOPS:
        raise Refused(f"stop has {len(stops)} strings; at most {MOST_STOPS} are looked for", "stop")
    drawn = Sampling() if base is None else base
    given: dict[str, Any] = {
        "max_tokens": most,
        "stop_strings": (*drawn.stop_strings, *filter(None, stops)),
        "stop_tokens": (*drawn.stop_tokens, *(asked.stop_token_ids or ())),
        "ignore_eos": asked.ignore_eos,
        "presence_penalty": asked.presence_penalty or 0.0,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "repetition_penalty": 1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        "logit_bias": _bias(asked.logit_bias),
    }
    if base is None:
        cuts = {name: getattr(asked, name) for name in ("temperature", "top_p", "min_p")}
        given |= {name: value for name, value in cuts.items() if value is not None}
        given["top_k"] = max(asked.top_k or 0, 0)
        given["seed"] = secrets.randbits(62) if asked.seed is None else asked.seed
    return replace(drawn, **given)


def _bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token): float(value) for token, value in given.items()}
    except ValueError:
        raise Refused("logit_bias maps token numbers to numbers", "logit_bias") from None


# Tools and grammars


def tools_of(given: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None) -> list[Schema]:
    """The tools that the model is told; none where it may not call any."""
    if choice == "none" or not given:
        return []
    for i, tool in enumerate(given):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise Refused(f"tools[{i}] is no function", "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused(f"tools[{i}] has no name", "tools")
    return list(given)


def grammar_of(
    tools: Sequence[Schema],
    choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
    format: Format,
    specials: Mapping[int, str],
    parallel: bool,
) -> Grammar | None:
    """What the answer must be: a call that was demanded, or JSON of a schema."""
    demanded = _demanded(tools, choice)
    if demanded:
        lark = format.call_grammar(demanded, frozenset(specials.values()), parallel)
        if lark is None:
            raise Refused(f"tool_choice cannot be demanded of the tool format {format.name!r}: use auto", "tool_choice")
        return Grammar("lark", lark)
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        schema = _schema_of(response_format or {})
    else:
        raise Refused(f"response_format.type is {kind!r}; use text, json_object or json_schema", "response_format")
    if not tools:
        return Grammar("json_schema", json.dumps(schema))
    lark = format.call_grammar(tools, frozenset(specials.values()), parallel)
    if lark is None:
        return Grammar("json_schema", json.dumps(schema))
    return Grammar(
        "lark", lark.replace("start: ", f"start: json | calls\njson: %json {json.dumps(schema)}\ncalls: ", 1)
    )


def _schema_of(response_format: Mapping[str, Any]) -> Any:
    told = response_format.get("json_schema")
    schema = told.get("schema") if isinstance(told, Mapping) else response_format.get("schema")
    if not isinstance(schema, Mapping):
        raise Refused("response_format.json_schema.schema is missing", "response_format")
    return schema


def _demanded(tools: Sequence[Schema], choice: str | Mapping[str, Any] | None) -> list[Schema]:
    """The tools of which one must be called; empty where the model decides."""
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise Refused("tool_choice is required, and there are no tools", "tool_choice")
        return list(tools)
    if not isinstance(choice, Mapping):
        raise Refused(f"tool_choice is {choice!r}; it may be none, auto, required or a function", "tool_choice")
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise Refused(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
    return found
