"""`/v1/responses`: the part of OpenAI's Responses API that agent frameworks use, on top of chat completions.

Text, function calls and reasoning; tools are functions. `previous_response_id` goes on from an answer given here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from tidemill.serve.asking import Chatting, Refused
from tidemill.serve.chatting import ChatCall, Read, begin, finish_of, told
from tidemill.serve.service import Service, Session, new_id, news, whole

MOST_KEPT = 4096  # responses that can be gone on from
MOST_BYTES = 256 << 20  # of their messages, as JSON


class Responding(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses`."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    seed: int | None = None


class Responses:
    """What was answered, for `previous_response_id`. Sessions do not see each other's; the oldest are forgotten."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, owner: str, id: str, messages: list[dict[str, Any]]) -> None:
        told = msgspec.json.encode(messages)
        self._kept[owner, id] = told
        self._bytes += len(told)
        while len(self._kept) > MOST_KEPT or (self._bytes > MOST_BYTES and len(self._kept) > 1):
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def messages(self, owner: str, id: str | None) -> list[dict[str, Any]]:
        if id is None:
            return []
        if (owner, id) not in self._kept:
            raise Refused(f"there is no response {id!r}", "previous_response_id", 404)
        return list(msgspec.json.decode(self._kept[owner, id]))


class ResponseCall:
    """A request on its way, and the items that it comes to."""

    call: ChatCall

    def __init__(self, body: Responding, kept: Responses, owner: str) -> None:
        self.body, self.kept, self.owner = body, kept, owner
        before = kept.messages(owner, body.previous_response_id)
        self.messages = [*before, *messages_of(body.input)]
        head = [{"role": "system", "content": body.instructions}] if body.instructions else []
        self.chat = Chatting(
            model=body.model,
            messages=[*head, *self.messages],
            max_tokens=body.max_output_tokens,
            stream=body.stream,
            tools=_tools(body.tools),
            tool_choice=_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=_format(body.text),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
        )
        self.id, self.created = new_id("resp"), int(time.time())

    def begin(self, service: Service, session: Session, given: Read) -> None:
        self.call = begin(service, session, self.chat, given)

    async def answer(self) -> dict[str, Any]:
        (completion,) = await whole(self.call.answering)
        said, message = told(self.call, completion)
        return self.finished(message, finish_of(completion, said), len(completion.tokens))

    def finished(self, message: dict[str, Any], finish: str, made: int) -> dict[str, Any]:
        self.kept.keep(self.owner, self.id, [*self.messages, message])
        is_cut = finish == "length"
        body = self.described("incomplete" if is_cut else "completed", items_of(message))
        body["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        body["usage"] = {
            "input_tokens": len(self.call.asked.tokens),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(self.call.asked.tokens) + made,
        }
        return body

    def described(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        drawn = self.call.answering.request.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.call.model.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": drawn.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": drawn.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self.described("in_progress", [])}
        yield {"type": "response.in_progress", "response": self.described("in_progress", [])}
        words, text = _Words(0), ""
        async for batch in news(self.call.answering):
            for new in batch:
                piece = self.call.sayings[0].add(new.tokens)
                if piece.content:
                    text += piece.content
                    for event in words.delta(piece.content):
                        yield event
                if new.completion is None:
                    continue
                said, message = told(self.call, new.completion)
                rest = self.call.sayings[0].rest(said).content
                for event in words.delta(rest) if rest else ():
                    yield event
                final = self.finished(message, finish_of(new.completion, said), len(new.completion.tokens))
                for event in _closing(words, final):
                    yield event
                kind = "response.incomplete" if final["status"] == "incomplete" else "response.completed"
                yield {"type": kind, "response": final}


class _Words:
    """Events of the message item: it begins with its first piece."""

    def __init__(self, place: int) -> None:
        self.place, self.id, self.has_begun = place, new_id("msg"), False

    def delta(self, text: str) -> list[dict[str, Any]]:
        where = {"item_id": self.id, "output_index": self.place, "content_index": 0}
        begun = [] if self.has_begun else self._begin(where)
        self.has_begun = True
        return [*begun, {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []}]

    def _begin(self, where: dict[str, Any]) -> list[dict[str, Any]]:
        item = {"id": self.id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        return [
            {"type": "response.output_item.added", "output_index": self.place, "item": item},
            {"type": "response.content_part.added", **where, "part": part},
        ]


def _closing(words: _Words, final: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that end each item of the output."""
    events: list[dict[str, Any]] = []
    for place, item in enumerate(final["output"]):
        if item["type"] == "message":
            if not words.has_begun:  # nothing was said
                events += words.delta("")
            item["id"] = words.id
            part = item["content"][0]
            where = {"item_id": words.id, "output_index": place, "content_index": 0}
            events.append({"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []})
            events.append({"type": "response.content_part.done", **where, "part": part})
        elif item["type"] == "function_call":
            begun = {**item, "arguments": "", "status": "in_progress"}
            where = {"item_id": item["id"], "output_index": place}
            given = item["arguments"]
            events.append({"type": "response.output_item.added", "output_index": place, "item": begun})
            events.append({"type": "response.function_call_arguments.delta", **where, "delta": given})
            done = {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": given}
            events.append(done)
        else:
            events.append({"type": "response.output_item.added", "output_index": place, "item": item})
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    return events


def numbered(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async def made() -> AsyncIterator[dict[str, Any]]:
        place = 0
        async for event in events:
            yield {**event, "sequence_number": place}
            place += 1

    return made()


# Items and messages


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a request as messages of a chat; calls of one answer become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role", "user"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise Refused(f"input[{i}] is a {kind!r}, which is not supported", "input")
    return found


def items_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as items of the output: words first, as they were streamed."""
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
        items.append(
            {"id": new_id("msg"), "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        )
    for call in calls:
        about = {"call_id": call["id"], **call["function"]}
        items.append({"id": new_id("fc"), "type": "function_call", "status": "completed", **about})
    if message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": [thought]})
    return items


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions without the object around them, as this API writes them."""
    for i, tool in enumerate(given or ()):
        if tool.get("type") != "function":
            raise Refused(f"tools[{i}] is of type {tool.get('type')!r}; only functions are supported", "tools")
    names = ("name", "description", "parameters")
    return [{"type": "function", "function": {n: t[n] for n in names if n in t}} for t in given or ()] or None


def _choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    return {"type": "function", "function": {"name": given.get("name")}} if isinstance(given, dict) else given


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    told = (text or {}).get("format")
    if not isinstance(told, dict):
        return None
    return {"type": "json_schema", "json_schema": told} if told.get("type") == "json_schema" else told
