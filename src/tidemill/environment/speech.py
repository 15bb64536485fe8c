"""Between an environment's messages and the tokens of a conversation. What the model sampled is never tokenised again.

In chat form an answer is a message of its own: it closes the model's message, stands in one of role `role` (or is a
tool's result), and opens the model's next, as the tokenizer's own template would write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.chat.answer import Answer, Schema
from tidemill.chat.template import Chat, TemplateError
from tidemill.data.pictures.shown import Pictures, with_parts
from tidemill.environment.api import Turn
from tidemill.errors import ConfigError, DataError
from tidemill.tiles import Tiles

ANSWER = "the environment's answer"  # what messages call it


class Speech:
    def __init__(
        self,
        tokenizer: Any,
        is_chat: bool,
        role: str = "user",
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Schema] = (),
        pictures: Pictures | None = None,
    ) -> None:
        """`options`: of the chat template. `tools`: what every prompt offers. `pictures`: how the model sees images."""
        self.pictures = pictures
        self.chat = Chat(tokenizer, options or {})
        self.is_chat, self.role, self.tools = is_chat, role, tools
        self._has_tool_role = is_chat and self._takes("tool")
        if is_chat and role not in ("user", "tool"):
            self._refuse_role()
        if is_chat and role == "tool" and not self._has_tool_role:
            self._refuse_role()

    def text(self, tokens: Sequence[int]) -> str:
        return self.chat.text(tokens)

    def opening(self, text: str, system: str | None = None) -> list[int]:
        """The prompt of a conversation that begins with this text."""
        if not self.is_chat:
            tokens = list(self.chat.tokenizer.encode(self.chat.clean(text)))
            while tokens and tokens[-1] == self.chat.tokenizer.eos_token_id:
                tokens.pop()
            return tokens
        told = [{"role": "system", "content": system}] if system else []
        return self.chat.prompt([*told, {"role": "user", "content": text}], self.tools)

    def said(self, prompt: Sequence[int], tokens: Sequence[int]) -> Answer:
        return self.chat.read(tokens, self.tools, has_thoughts=self.chat.opens_thoughts(prompt))

    def heard(self, turn: Turn, said: Answer | None, *, has_ended: bool) -> list[int]:
        """The tokens of an answer. `has_ended`: the model closed its message itself, with its end token."""
        if not isinstance(turn.text, str):
            raise TypeError("its text is none")
        plans = self._looking().plans(turn.images, ANSWER) if turn.images else []
        if turn.is_inline or not self.is_chat:
            if plans:
                return self.chat.encode(self._looking().placed(turn.text, plans, ANSWER, self.chat.clean))
            return self.chat.encode(self.chat.clean(turn.text))
        message = {"role": "assistant", "content": ""} if said is None else said.message()
        new = with_parts(self._messages(turn), len(plans), ANSWER) if plans else self._messages(turn)
        written = (lambda text: self._looking().written(text, plans, ANSWER)) if plans else None
        made = self.chat.follow(message, new, self.tools, has_ended=has_ended, written=written)
        if made is None:
            raise TemplateError("the chat template writes the model's message otherwise once an answer follows it")
        return made

    def tiles(self, turn: Turn, tokens: Sequence[int]) -> Tiles:
        """What an answer shows, by their places among its tokens."""
        if not turn.images:
            return ()
        plans = self._looking().plans(turn.images, ANSWER)
        return self._looking().tiles(turn.images, tokens, ANSWER, plans)

    def _looking(self) -> Pictures:
        if self.pictures is None:
            raise DataError("the environment shows images, and data.images is none", "set data.images={}")
        return self.pictures

    def _messages(self, turn: Turn) -> list[Mapping[str, Any]]:
        if not turn.messages:
            return [{"role": self.role, "content": turn.text}]
        if self._has_tool_role or all(m["role"] != "tool" for m in turn.messages):
            return list(turn.messages)
        frame = self.chat.format.result  # a template that knows no tools: their results are the user's words
        return [{"role": "user", "content": "\n".join(frame.format(m["content"]) for m in turn.messages)}]

    def _takes(self, role: str) -> bool:
        try:
            made = self.chat.follow(
                {"role": "assistant", "content": ""}, [{"role": role, "content": "heard"}], None, has_ended=True
            )
        except TemplateError:
            return False
        return made is not None and "heard" in str(self.chat.tokenizer.decode(made, skip_special_tokens=False))

    def _refuse_role(self) -> None:
        raise ConfigError(
            f"environment.role is {self.role!r}, which the tokenizer's chat template refuses or leaves out",
            "set environment.role=user",
        )
