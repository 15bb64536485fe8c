"""A model's chat template, in both directions: messages to tokens, and what was sampled to an answer.

A conversation goes on from its own tokens: `follow` gives only what stands behind the model's latest message, as the
template would write it. What the model sampled is never written as text and tokenised again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tidemill.chat.answer import Answer, Schema
from tidemill.chat.formats import detect
from tidemill.chat.formats.api import THINK, Format
from tidemill.chat.messages import Message, mapped
from tidemill.errors import DataError

TOLD = "You may use these tools, given as JSON:"
MARK = "\u2063said\u2063"  # a text that no template changes
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class TemplateError(DataError):
    """The chat template refuses the conversation."""


class Chat:
    """`options`: what the template is told besides messages and tools, such as enable_thinking."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] = NO_OPTIONS, format: Format | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(options)
        template = getattr(tokenizer, "chat_template", None) or ""
        text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
        self.has_template = bool(text)
        self.format = format or detect(text)
        self.specials = _specials(tokenizer)
        self._words = sorted(self.specials.values(), key=len, reverse=True)
        self._any_word = re.compile("|".join(map(re.escape, self._words)))
        self._hidden = {id for id, word in self.specials.items() if word not in self.format.markers}
        self._takes_tools: bool | None = None
        self._has_marks = len(self._hidden) < len(self.specials)

    # Messages to tokens

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] | None, *, asks: bool) -> str:
        """`asks`: end with the head of the model's next message."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) if tools else None, add_generation_prompt=asks, tokenize=False,
                    **self.options,
                )
            )  # fmt: skip
        except Exception as error:  # a template is a program of others: what it raises is its own affair
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise TemplateError(f"the chat template refuses the conversation: {why}") from error

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None = None,
        written: Callable[[str], str] | None = None,
    ) -> list[int]:
        """`written`: writes out the images that the text shows."""
        messages = [self.cleaned(message) for message in messages]
        if tools and not self.takes_tools(tools):
            messages, tools = self.told(messages, tools), None
        text = self.render(messages, tools, asks=True)
        return self.encode(text if written is None else written(text))

    def takes_tools(self, tools: Sequence[Schema]) -> bool:
        """Whether the template tells the model of the tools that it is given."""
        if self._takes_tools is None:
            asked = [{"role": "user", "content": "?"}]
            try:
                without = self.render(asked, None, asks=True)
            except TemplateError:  # it cannot do without tools
                without = ""
            self._takes_tools = self.render(asked, tools, asks=True) != without
        return self._takes_tools

    def told(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[dict[str, Any]]:
        """The messages with the tools written out in front, for a template that leaves them out."""
        listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        text = f"{TOLD}\n{listed}\n{self.format.how_to_call}"
        first = messages[0] if messages else {"role": "user", "content": ""}
        joined = mapped(first, lambda own: f"{text}\n\n{own}")
        return [joined, *map(dict, messages[1:])]

    def follow(
        self,
        said: Message,
        new: Sequence[Message],
        tools: Sequence[Schema] | None,
        *,
        has_ended: bool,
        written: Callable[[str], str] | None = None,
    ) -> list[int] | None:
        """The tokens behind the model's message `said`, up to where it speaks next. `has_ended`: it closed its message
        itself. `written`: writes out the images that the text shows. None where the template writes a message
        otherwise once others follow it."""
        new = [self.cleaned(message) for message in new]
        found = self._behind(said, new, tools)
        if found is None:
            return None
        own, behind = found
        return self.encode(("" if has_ended else own) + (behind if written is None else written(behind)))

    def _behind(self, said: Message, new: Sequence[Message], tools: Sequence[Schema] | None) -> tuple[str, str] | None:
        """The end token that closes `said`, and what the template writes behind it."""
        said = {key: value for key, value in said.items() if key not in ("reasoning", "reasoning_content")}
        for shown in ({**said, "content": MARK}, said):
            before = [{"role": "user", "content": "?"}, shown]
            whole, ours = self.render([*before, *new], tools, asks=True), self.render(before, tools, asks=False)
            if shown is not said:
                if whole.count(MARK) != 1 or ours.count(MARK) != 1:
                    continue  # beside its calls the template leaves out the words
                whole, ours = whole.partition(MARK)[2], ours.partition(MARK)[2]
            if whole.startswith(ours):
                closing = self._closing_in(ours)
                return closing[0], closing[1] + whole[len(ours) :]
        return None

    def _closing_in(self, text: str) -> tuple[str, str]:
        """The special token that a message ends with, and what stands behind it."""
        stripped = text.rstrip()
        for word in self._words:
            if stripped.endswith(word):
                return word, text[len(stripped) :]
        return "", ""

    def cleaned(self, message: Message) -> dict[str, Any]:
        """Nobody but the template writes special tokens: a text that could would end messages or speak for others."""
        return mapped(message, self.clean)

    def clean_all(self, value: Any) -> Any:
        """Clean every text inside a value."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, Mapping):
            return {self.clean(str(name)): self.clean_all(inner) for name, inner in value.items()}
        return [self.clean_all(inner) for inner in value] if isinstance(value, list | tuple) else value

    def clean(self, text: str) -> str:
        if not self._words or self._any_word.search(text) is None:
            return text
        ends = {word[-1] for word in self._words}
        kept, size = list[str](), max(map(len, self._words))
        for character in text:  # taking one word out may put another together
            kept.append(character)
            if character in ends:
                tail = "".join(kept[-size:])
                word = next((word for word in self._words if tail.endswith(word)), "")
                del kept[len(kept) - len(word) :]
        return "".join(kept)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    # What was sampled to an answer

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens, but for those that the format reads."""
        if not self._has_marks:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        return str(self.tokenizer.decode(self.shown(tokens), skip_special_tokens=False))

    def shown(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that `text` shows."""
        return [token for token in tokens if token not in self._hidden]

    def read(self, tokens: Sequence[int], tools: Sequence[Schema] = (), *, has_thoughts: bool = False) -> Answer:
        """`has_thoughts`: the prompt ended by opening the model's thoughts."""
        return self.format.read((THINK if has_thoughts else "") + self.text(tokens), tools)

    def opens_thoughts(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside thoughts."""
        if THINK not in self.format.markers:
            return False
        return str(self.tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)).rstrip().endswith(THINK)


def _specials(tokenizer: Any) -> dict[int, str]:
    """Every token that a decoder leaves out as special, by its number."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {int(id): str(token.content) for id, token in added.items() if token.special}
    for word in filter(None, map(str, getattr(tokenizer, "all_special_tokens", ()))):
        if word not in found.values() and hasattr(tokenizer, "convert_tokens_to_ids"):
            found[int(tokenizer.convert_tokens_to_ids(word))] = word
    return found
