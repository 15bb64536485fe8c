"""`/v1/chat/completions`: messages in, messages, thoughts and calls out, whole or as they are made."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.chat.answer import Answer, Schema, ToolCall
from tidemill.chat.template import TemplateError
from tidemill.data.pictures.shown import in_messages
from tidemill.rollout.engine import Completion
from tidemill.serve.asking import Chatting, Refused, grammar_of, tools_of
from tidemill.serve.link import Answering
from tidemill.serve.saying import BROKEN, Saying, pieces_of
from tidemill.serve.service import News, Served, Service, Session, Wanted, new_id, news, usage, whole
from tidemill.serve.talk import Asked

LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class ChatCall:
    """A chat request on its way."""

    model: Served
    body: Chatting
    asked: Asked
    answering: Answering
    sayings: list[Saying]
    id: str
    created: int
    tools: list[Schema]
    session: Session

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)


@dataclass(frozen=True, slots=True)
class Read:
    """A chat request's messages as tokens."""

    model: Served
    tools: list[Schema]
    asked: Asked


def read(service: Service, session: Session, body: Chatting) -> Read:
    """Read the messages, in any thread: long ones take seconds."""
    model = service.model(body.model)
    if not body.messages:
        raise Refused("messages is empty", "messages")
    for i, message in enumerate(body.messages):
        if not isinstance(message.get("role"), str):
            raise Refused(f"messages[{i}] has no role", "messages")
    tools = tools_of(body.tools, body.tool_choice)
    model.check_length(_characters(in_messages(body.messages)[0]))
    try:
        asked = model.talk.asked(body.messages, tools, body.chat_template_kwargs or {}, session.memory)
    except (TemplateError, TypeError, AttributeError, KeyError) as error:
        raise Refused(getattr(error, "message", None) or f"messages cannot be read: {error}", "messages") from None
    return Read(model, tools, asked)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def begin(service: Service, session: Session, body: Chatting, given: Read) -> ChatCall:
    model, tools, asked = given.model, given.tools, given.asked
    is_parallel = body.parallel_tool_calls is not False
    chat = model.talk.chat
    grammar = grammar_of(tools, body.tool_choice, body.response_format, chat.format, chat.specials, is_parallel)
    if body.top_logprobs and not body.logprobs:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    tops = body.top_logprobs or 0
    asked_most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    wanted = Wanted(asked_most, body.stream and not tops, grammar, tops)  # the likeliest are known at the end
    answering = service.ask(session, model, asked.tokens, body, wanted, asked.tiles)
    stops = answering.request.sampling.stop_strings
    count = answering.request.n
    sayings = [Saying(model.talk, tools, stops, has_thoughts=asked.has_thoughts) for _ in range(count)]
    return ChatCall(model, body, asked, answering, sayings, new_id("chatcmpl"), int(time.time()), tools, session)


async def answer(call: ChatCall) -> dict[str, Any]:
    """The whole answer."""
    done = await whole(call.answering)
    choices = []
    for completion in done:
        said, message = told(call, completion)
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": _logprobs(call, completion.tokens, completion.logprobs, completion.tops),
            "finish_reason": finish_of(completion, said),
        }
        choices.append(choice | ({"token_ids": completion.tokens} if call.body.return_token_ids else {}))
    head = {"id": call.id, "object": "chat.completion", "created": call.created, "model": call.model.name}
    made = sum(len(c.tokens) for c in done)
    body = {**head, "choices": choices, "usage": usage(len(call.asked.tokens), made)}
    return body | ({"prompt_token_ids": call.asked.tokens} if call.body.return_token_ids else {})


def told(call: ChatCall, completion: Completion) -> tuple[Answer, dict[str, Any]]:
    """What a sample says, and the message that the client gets; remembered, where the session remembers."""
    saying = call.sayings[completion.index]
    said = saying.whole(completion.tokens)
    if said.unread and not said.calls:  # no call after all: the client gets all the words
        said = Answer(call.model.talk.text(completion.tokens).strip(), said.reasoning)
    if call.body.parallel_tool_calls is False and len(said.calls) > 1:
        said = Answer(said.content, said.reasoning, said.calls[:1])
    has_ended = bool(completion.tokens) and completion.tokens[-1] in call.model.eos_ids
    if call.session.memory is not None:
        call.model.talk.keep(call.session.memory, call.asked, completion.tokens, said.message(), has_ended)
    message: dict[str, Any] = {"role": "assistant", "content": said.content or None, "refusal": None}
    if not said.calls:
        message["content"] = said.content
    else:
        message["tool_calls"] = [_call(call, one) for one in said.calls]
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    return said, message


def _call(call: ChatCall, one: ToolCall) -> dict[str, Any]:
    function = {"name": one.name, "arguments": one.arguments_json()}
    return {"id": one.id or call_id(call.model), "type": "function", "function": function}


def call_id(model: Served) -> str:
    """Mistral's templates take ids of nine letters only."""
    if model.talk.chat.format.name == "mistral":
        return "".join(secrets.choice(LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def finish_of(completion: Completion, said: Answer) -> str:
    return "tool_calls" if said.calls and completion.finish == "stop" else completion.finish


def _logprobs(
    call: ChatCall, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any] | None
) -> dict[str, Any] | None:
    if not call.wants_logprobs:
        return None
    tokenizer = call.model.talk.tokenizer
    entries = []
    for i, (text, logprob) in enumerate(zip(pieces_of(tokenizer, tokens), logprobs)):
        likeliest = [] if tops is None or i >= len(tops) else tops[i]
        names = pieces_of(tokenizer, [token for token, _ in likeliest])
        top = [_token(name, value) for name, (_, value) in zip(names, likeliest)]
        entries.append({**_token(text, logprob), "top_logprobs": top})
    return {"content": entries, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": None if BROKEN in text else list(text.encode())}


# As it is made


async def chunks(call: ChatCall) -> AsyncIterator[dict[str, Any]]:
    options = call.body.stream_options
    has_usage = options is not None and options.include_usage
    for k in range(call.answering.request.n):
        first = _chunk(call, k, {"role": "assistant", "content": ""}, has_usage=has_usage)
        yield first | ({"prompt_token_ids": call.asked.tokens} if call.body.return_token_ids and k == 0 else {})
    async for batch in news(call.answering):
        for new in batch:
            for chunk in _told(call, new, has_usage):
                yield chunk
    if has_usage:
        made = sum(len(c.tokens) for c in call.answering.done if c is not None)
        yield {**_head(call), "choices": [], "usage": usage(len(call.asked.tokens), made)}


def _told(call: ChatCall, new: News, has_usage: bool) -> list[dict[str, Any]]:
    saying, completion = call.sayings[new.index], new.completion
    piece = saying.add(new.tokens) if new.tokens else None
    delta: dict[str, Any] = {}
    calls: list[ToolCall] = []
    finish = None
    if completion is not None:
        said, message = told(call, completion)
        rest = saying.rest(said)
        content = (piece.content if piece else "") + rest.content
        reasoning = (piece.reasoning if piece else "") + rest.reasoning
        finish = finish_of(completion, said)
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": i, **one} for i, one in enumerate(message["tool_calls"])]
            calls = list(said.calls)
    else:
        assert piece is not None
        content, reasoning = piece.content, piece.reasoning
    delta |= {"content": content} if content else {}
    delta |= {"reasoning_content": reasoning} if reasoning else {}
    if not delta and finish is None and not (call.wants_logprobs or call.body.return_token_ids):
        return []
    tops = None if completion is None else completion.tops
    chunk = _chunk(call, new.index, delta, has_usage=has_usage, finish=None if calls else finish)
    choice = chunk["choices"][0]
    choice["logprobs"] = _logprobs(call, new.tokens, new.logprobs, tops)
    if call.body.return_token_ids:
        choice["token_ids"] = new.tokens
    if calls:  # the calls first, then the end
        return [chunk, _chunk(call, new.index, {}, has_usage=has_usage, finish=finish)]
    return [chunk]


def _head(call: ChatCall) -> dict[str, Any]:
    return {"id": call.id, "object": "chat.completion.chunk", "created": call.created, "model": call.model.name}


def _chunk(
    call: ChatCall, index: int, delta: dict[str, Any], *, has_usage: bool, finish: str | None = None
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**_head(call), "choices": [choice], **({"usage": None} if has_usage else {})}
