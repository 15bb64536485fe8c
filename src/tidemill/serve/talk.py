"""Messages to tokens, and tokens to what a client reads, for one model.

A conversation that the server remembers goes on from its own tokens: where a request begins with messages that end in
an answer given here, those are the tokens that were sampled, whatever the client's framework did with the text.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tidemill.batch import Array
from tidemill.chat.answer import Answer, Schema
from tidemill.chat.formats.api import THINK, without_thoughts
from tidemill.chat.messages import Message, plain, text_of
from tidemill.chat.template import Chat, TemplateError
from tidemill.data.pictures.opened import NoPicture, as_picture
from tidemill.data.pictures.shown import Pictures, has_images, in_messages, text_with_places
from tidemill.errors import DataError
from tidemill.models.vision.views.view import Plan
from tidemill.tiles import Tiles

WHERE = "messages"
HEARD = {"role": "tool", "name": "called", "tool_call_id": "call00000", "content": "heard"}
MOST_VARIANTS = 32  # of a chat template's options, kept at once
# No template's options: what is handed to it otherwise.
TAKEN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}


@dataclass(frozen=True, slots=True)
class Said:
    """An answer that the server gave: the tokens up to its end, and what the client was told it says."""

    tokens: Array  # int32, of prompt and answer
    message: Mapping[str, Any]
    has_ended: bool  # the model closed its message itself


class Memory:
    """Answers of one conversation or of many, found again by the messages up to them. The oldest are forgotten."""

    def __init__(self, most_tokens: int = 1 << 22) -> None:
        self._said: OrderedDict[bytes, Said] = OrderedDict()
        self.size, self._most = 0, most_tokens  # in tokens

    def keep(self, key: bytes, said: Said) -> None:
        if key in self._said:  # the same words twice: the first answer stays, so that no request depends on another's
            return
        self._said[key] = said
        self.size += len(said.tokens)
        while self.size > self._most and len(self._said) > 1:
            _, oldest = self._said.popitem(last=False)
            self.size -= len(oldest.tokens)

    def find(self, key: bytes) -> Said | None:
        return self._said.get(key)


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation as tokens."""

    tokens: list[int]
    key: bytes  # of the messages, which `Memory` keeps the answer by
    has_thoughts: bool  # the prompt ends inside the model's thoughts
    tiles: Tiles = ()  # what they show


@dataclass(frozen=True, slots=True)
class Shown:
    """The images of some messages."""

    looking: Pictures | None  # None where there are no images
    pictures: list[Any]
    plans: list[Plan]

    def behind(self, messages: Sequence[Message]) -> Shown:
        """Those that come after the ones of these messages."""
        before = len(in_messages(messages)[1])
        return Shown(self.looking, self.pictures[before:], self.plans[before:])

    def written(self, text: str) -> str:
        if self.looking is None:
            return text
        try:
            return self.looking.written(text, self.plans, WHERE)
        except DataError as error:
            raise TemplateError(error.message) from None

    def placed(self, messages: Sequence[Message], clean: Callable[[str], str]) -> str:
        """Plain text, for a model without a template."""
        if self.looking is None:
            return "".join(clean(text_of(message)) for message in messages)
        try:
            return self.looking.placed("".join(map(text_with_places, messages)), self.plans, WHERE, clean)
        except DataError as error:
            raise TemplateError(error.message) from None

    def tiles(self, tokens: Sequence[int]) -> Tiles:
        if self.looking is None:
            return ()
        try:
            return self.looking.tiles(self.pictures, tokens, WHERE, self.plans)
        except DataError as error:
            raise TemplateError(error.message) from None


class Talk:
    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        is_chat: bool = True,
        pictures: Pictures | None = None,
    ) -> None:
        """`is_chat`: false for a model that reads plain text though its tokenizer has a template. `pictures`: how
        messages may show images; None where they may not."""
        self.pictures = pictures
        self.tokenizer, self.options = tokenizer, dict(options or {})
        self._variants: OrderedDict[str, Chat] = OrderedDict()
        self._mutex = threading.Lock()  # messages are read in several threads
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        self.chat = self._chat({})
        self.has_template = self.chat.has_template and is_chat
        self._has_tool_role = self.has_template and self._shows("heard", HEARD)
        self._has_calls = self.has_template and self._shows("called")

    def _chat(self, options: Mapping[str, Any]) -> Chat:
        own = TAKEN & options.keys()
        if own:  # among them a template of the client's own, which is a program
            raise TemplateError(f"chat_template_kwargs are a template's own options, and {min(own)!r} is none")
        key = json.dumps(options, sort_keys=True, default=str)
        with self._mutex:
            found = self._variants.get(key)
            if found is None:
                told = self.chat.clean_all(options) if options else {}
                found = self._variants[key] = Chat(self.tokenizer, {**self.options, **told})
                while len(self._variants) > MOST_VARIANTS:
                    self._variants.popitem(last=False)
        return found

    # Messages to tokens

    def asked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        options: Mapping[str, Any],
        memory: Memory | None,
    ) -> Asked:
        """Raise TemplateError where the template refuses the messages, or an image cannot be shown."""
        keys = _keys(messages, tools, options)
        chat, shown = self._chat(options), self._shown(messages)
        for count in range(len(messages), 0, -1) if memory is not None else ():
            said = memory.find(keys[count]) if memory is not None else None
            if said is not None and messages[count - 1].get("role") == "assistant":
                behind = self._behind(chat, said, messages[count:], tools, shown.behind(messages[:count]))
                if behind is not None:
                    return self._asked([*said.tokens.tolist(), *behind], keys[-1], chat, shown)
        return self._asked(self._prompt(chat, messages, tools, shown), keys[-1], chat, shown)

    def _shown(self, messages: Sequence[Message]) -> Shown:
        """What the messages show. Only what stands in them is looked at: no request leads to a file or an address."""
        _, found = in_messages(messages)
        if not found and not has_images(messages):
            return Shown(None, [], [])
        if self.pictures is None:
            raise TemplateError("the messages show an image, and this model is asked with text alone")
        for url in found:
            if not isinstance(url, str) or not url.startswith("data:"):
                raise TemplateError("an image must stand in the message itself, as a data: URL")
        try:
            pictures = [as_picture(url) for url in found]
            return Shown(self.pictures, pictures, self.pictures.plans(pictures, WHERE))
        except NoPicture as error:
            raise TemplateError(f"an image {error}") from None
        except DataError as error:
            raise TemplateError(error.message) from None

    def _asked(self, tokens: list[int], key: bytes, chat: Chat, shown: Shown) -> Asked:
        return Asked(tokens, key, self.has_template and chat.opens_thoughts(tokens), shown.tiles(tokens))

    def _behind(
        self, chat: Chat, said: Said, new: Sequence[Message], tools: Sequence[Schema], shown: Shown
    ) -> list[int] | None:
        if not new:
            return None
        if not self.has_template:
            return chat.encode(shown.placed(new, chat.clean))
        fitting = in_messages(self._fitting(new))[0]
        return chat.follow(said.message, fitting, tools or None, has_ended=said.has_ended, written=shown.written)

    def _prompt(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Schema], shown: Shown) -> list[int]:
        if self.has_template:
            return chat.prompt(in_messages(self._fitting(messages))[0], tools or None, shown.written)
        return chat.encode(shown.placed(messages, chat.clean))

    def _fitting(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in a form that the template knows: one that has no tools reads calls and results as words."""
        found: list[dict[str, Any]] = []
        for message in plain(messages):
            if message["role"] == "tool" and not self._has_tool_role:
                text = self.chat.format.result.format(text_of(message))
                if found and found[-1].get("is_result"):
                    found[-1]["content"] += f"\n{text}"
                else:
                    found.append({"role": "user", "content": text, "is_result": True})
            elif message.get("tool_calls") and not self._has_calls:
                calls = [c["function"] for c in message.pop("tool_calls")]
                told = [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
                texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in told]
                said = "\n".join([text_of(message), *texts])
                found.append({**message, "content": said.strip()})
            else:
                found.append(message)
        return [{k: v for k, v in message.items() if k != "is_result"} for message in found]

    def _shows(self, word: str, *more: Mapping[str, Any]) -> bool:
        """Whether the template shows a word of a call, or of what follows it."""
        call = {"type": "function", "id": "call00000", "function": {"name": "called", "arguments": {}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self.chat.render([{"role": "user", "content": "?"}, said, *more], None, asks=False)
        except TemplateError:
            return False
        return word in text

    # Tokens to an answer

    def text(self, tokens: Sequence[int]) -> str:
        return self.chat.text(tokens)

    def read(self, text: str, tools: Sequence[Schema], *, has_thoughts: bool) -> Answer:
        """What a whole text says. Without tools it is words, but for thoughts."""
        format = self.chat.format
        if not self.has_template:
            return format.read(text, tools) if tools else Answer(text)
        text = THINK + text if has_thoughts else text
        if tools or format.name in ("harmony", "mistral"):
            answer = format.read(text, tools)
            if tools or not answer.calls:
                return answer
        if THINK in format.markers and THINK in text:
            reasoning, words = without_thoughts(text)
            return Answer(words, reasoning)
        return Answer(text)

    def keep(
        self, memory: Memory, asked: Asked, tokens: Sequence[int], message: Mapping[str, Any], has_ended: bool
    ) -> None:
        whole = np.array([*asked.tokens, *tokens], np.int32)
        memory.keep(_next(asked.key, message), Said(whole, message, has_ended))


def _keys(messages: Sequence[Message], tools: Sequence[Schema], options: Mapping[str, Any]) -> list[bytes]:
    """Of every beginning of the messages, the empty one first."""
    told = json.dumps([tools, options], sort_keys=True, default=str)
    keys = [hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=16).digest()]
    for message in messages:
        keys.append(_next(keys[-1], message))
    return keys


def _next(key: bytes, message: Message) -> bytes:
    """A message as clients repeat it: they change spaces at its ends, drop thoughts and write arguments anew."""
    content = message.get("content")
    if isinstance(content, list) and any(p.get("type") not in TEXTS for p in content if isinstance(p, Mapping)):
        words: Any = content
    else:
        words = text_of(message).strip()
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    role = "system" if message.get("role") == "developer" else message.get("role")
    told = json.dumps([role, words, calls], sort_keys=True, default=str)
    return hashlib.blake2b(key + told.encode("utf-8", "surrogatepass"), digest_size=16).digest()


TEXTS = ("text", "input_text", "output_text", "refusal")


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return [function.get("name"), arguments]
