"""`/v1/completions`, `/inference/v1/generate`, `/tokenize` and `/detokenize`: what has no messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.chat.template import TemplateError
from tidemill.rollout.engine import Completion
from tidemill.serve.asking import (
    Completing,
    Detokenizing,
    GenerateParams,
    Generating,
    Refused,
    Tokenizing,
    decoded,
    grammar_of,
)
from tidemill.serve.link import Answering
from tidemill.serve.saying import Decoding, cut, pieces_of
from tidemill.serve.service import Served, Service, Session, Wanted, new_id, news, usage, whole

MOST_PROMPTS = 64  # of one request
DEFAULT_TOKENS = 16  # OpenAI's own, of completions without max_tokens


@dataclass(slots=True)
class TextCall:
    """A text request on its way: one `Answering` per prompt."""

    model: Served
    body: Completing
    prompts: list[list[int]]
    answering: list[Answering]
    id: str
    created: int


def read(service: Service, body: Completing) -> list[list[int]]:
    """Read the prompts, in any thread: long ones take seconds."""
    return _prompts(service.model(body.model), body.prompt)


def begin(service: Service, session: Session, body: Completing, prompts: list[list[int]]) -> TextCall:
    model = service.model(body.model)
    if body.echo:
        raise Refused("echo is not supported", "echo")
    if body.stream and len(prompts) > 1:
        raise Refused("several prompts cannot be streamed in one request", "prompt")
    grammar = grammar_of([], None, body.response_format, model.talk.chat.format, {}, True)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    tops = body.logprobs or 0
    wanted = Wanted(most, body.stream and not tops, grammar, tops)
    answering = [service.ask(session, model, prompt, body, wanted) for prompt in prompts]
    return TextCall(model, body, prompts, answering, new_id("cmpl"), int(time.time()))


def _prompts(model: Served, given: str | list[Any]) -> list[list[int]]:
    if isinstance(given, str):
        given = [given]
    if not given:
        _refuse_empty()
    if all(isinstance(x, int) for x in given):
        return [given]
    if len(given) > MOST_PROMPTS:
        raise Refused(f"prompt has {len(given)} entries; at most {MOST_PROMPTS} go into one request", "prompt")
    if all(isinstance(x, str) for x in given):
        model.check_length(max(map(len, given)), "prompt")
        return [model.talk.chat.encode(text) or _refuse_empty() for text in given]
    if all(isinstance(x, list) and x and all(isinstance(t, int) for t in x) for x in given):
        return given
    raise Refused("prompt must be a text, a list of tokens, or a list of one of these", "prompt")


def _refuse_empty() -> list[int]:
    raise Refused("the prompt is empty", "prompt")


async def answer(call: TextCall) -> dict[str, Any]:
    choices, made = list[dict[str, Any]](), 0
    for prompt, answering in zip(call.prompts, call.answering):
        for completion in await whole(answering):
            made += len(completion.tokens)
            text, _ = cut(call.model.talk.text(completion.tokens), answering.request.sampling.stop_strings)
            choices.append(_choice(call, len(choices), text, prompt, completion))
    head = {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model.name}
    return {**head, "choices": choices, "usage": usage(sum(map(len, call.prompts)), made)}


def _choice(call: TextCall, index: int, text: str, prompt: list[int], completion: Completion) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": text,
        "logprobs": _logprobs(call, completion.tokens, completion.logprobs, completion.tops),
        "finish_reason": completion.finish,
    }
    own = {"token_ids": completion.tokens, "prompt_token_ids": prompt} if call.body.return_token_ids else {}
    return choice | own


def _logprobs(
    call: TextCall, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any] | None
) -> dict[str, Any] | None:
    if call.body.logprobs is None:
        return None
    tokenizer = call.model.talk.tokenizer
    texts = pieces_of(tokenizer, tokens)
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    named = [dict(zip(pieces_of(tokenizer, [t for t, _ in top]), [v for _, v in top])) for top in tops or ()]
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "top_logprobs": named if tops else None,
        "text_offset": offsets[:-1],
    }


async def chunks(call: TextCall) -> AsyncIterator[dict[str, Any]]:
    answering = call.answering[0]
    stops = answering.request.sampling.stop_strings
    decodings = [Decoding(call.model.talk) for _ in range(answering.request.n)]
    told = [0] * answering.request.n
    head = {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model.name}
    async for batch in news(answering):
        for new in batch:
            decoding, completion = decodings[new.index], new.completion
            decoding.add(new.tokens)
            if completion is not None:
                decoding.end()
            text, _ = cut(decoding.text, stops)
            sure = (
                len(text)
                if completion is not None
                else max(told[new.index], len(text) - max(map(len, stops), default=0))
            )
            choice = {
                "index": new.index,
                "text": text[told[new.index] : sure],
                "logprobs": _logprobs(call, new.tokens, new.logprobs, completion.tops if completion else None),
                "finish_reason": completion.finish if completion is not None else None,
            }
            told[new.index] = max(told[new.index], min(sure, len(text)))
            own = {"token_ids": new.tokens} if call.body.return_token_ids else {}
            yield {**head, "choices": [choice | own]}
    if call.body.stream_options is not None and call.body.stream_options.include_usage:
        made = sum(len(c.tokens) for c in answering.done if c is not None)
        yield {**head, "choices": [], "usage": usage(len(call.prompts[0]), made)}


# Tokens in, tokens out


async def generate(service: Service, session: Session, body: Generating) -> dict[str, Any]:
    """As vLLM's `/inference/v1/generate` answers."""
    if body.stream:
        raise Refused("stream is not supported here: ask for the whole answer", "stream")
    model = service.model(body.model)
    params: GenerateParams = _params(body.sampling_params)
    if not body.token_ids:
        _refuse_empty()
    tops = max((params.logprobs or 0) - 1, 0)
    answering = service.ask(session, model, body.token_ids, params, Wanted(params.max_tokens, tops=tops))
    done = await whole(answering)
    choices = [
        {
            "index": c.index,
            "token_ids": c.tokens,
            "finish_reason": c.finish,
            "logprobs": None if params.logprobs is None else {"content": _numbered(c)},
        }
        for c in done
    ]
    return {
        "request_id": body.request_id or new_id("generate"),
        "model": model.name,
        "choices": choices,
        "prompt_logprobs": None,
        "usage": usage(len(body.token_ids), sum(len(c.tokens) for c in done)),
    }


def _params(given: dict[str, Any]) -> GenerateParams:
    import msgspec

    try:
        return msgspec.convert(given, GenerateParams)
    except msgspec.ValidationError as error:
        raise Refused(f"sampling_params does not fit: {error}", "sampling_params") from None


def _numbered(completion: Completion) -> list[dict[str, Any]]:
    entries = []
    for i, (token, logprob) in enumerate(zip(completion.tokens, completion.logprobs)):
        tops = [] if completion.tops is None else completion.tops[i]
        top = [{"token": f"token_id:{t}", "logprob": v, "bytes": None} for t, v in tops]
        entries.append({"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": top})
    return entries


def tokenize(service: Service, body: Tokenizing) -> dict[str, Any]:
    model = service.model(body.model)
    if body.messages is not None:
        try:
            tokens = model.talk.asked(body.messages, body.tools or [], body.chat_template_kwargs or {}, None).tokens
        except (TemplateError, TypeError, AttributeError, KeyError) as error:
            raise Refused(f"messages cannot be read: {error}", "messages") from None
    elif body.prompt is not None:
        tokens = list(model.talk.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens))
    else:
        raise Refused("give a prompt or messages", "prompt")
    texts = pieces_of(model.talk.tokenizer, tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.window, "tokens": tokens, "token_strs": texts}


def detokenize(service: Service, body: Detokenizing) -> dict[str, Any]:
    tokenizer = service.model(body.model).talk.tokenizer
    if any(not 0 <= token < len(tokenizer) for token in body.tokens):
        raise Refused(f"tokens must be from 0 to {len(tokenizer) - 1}", "tokens")
    return {"prompt": str(tokenizer.decode(body.tokens, skip_special_tokens=False))}


__all__ = ["TextCall", "answer", "begin", "chunks", "decoded", "detokenize", "generate", "tokenize"]
