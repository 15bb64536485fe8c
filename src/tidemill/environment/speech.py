"""Between an environment's text and the tokens of a conversation. What the model sampled is never tokenised again.

In chat form an answer is a message of its own: it closes the model's message, stands in one of role `role`, and opens
the model's next. That frame is read off the tokenizer's own template, so every chat model gets its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.errors import ConfigError

SPOKEN, HEARD = "\u2063spoken\u2063", "\u2063heard\u2063"  # marks that no template changes


class Speech:
    def __init__(self, tokenizer: Any, is_chat: bool, role: str = "user") -> None:
        self.tokenizer = tokenizer
        self.frame = chat_frame(tokenizer, role) if is_chat else None
        self.specials = sorted(filter(None, map(str, tokenizer.all_special_tokens)), key=len, reverse=True)

    def said(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def heard(self, text: str, *, is_inline: bool, has_ended: bool) -> list[int]:
        """The tokens of an answer. `has_ended`: the model closed its message itself, with its end token."""
        text = self._plain(text)
        if is_inline or self.frame is None:
            return self._encode(text)
        closing, before, behind = self.frame
        return self._encode(("" if has_ended else closing) + before + text + behind)

    def _plain(self, text: str) -> str:
        """An environment's text must not be able to end a message or to speak for the model."""
        for special in self.specials:
            text = text.replace(special, "")
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


def chat_frame(tokenizer: Any, role: str) -> tuple[str, str, str]:
    """What closes the model's message, what then stands before an answer, and what behind it."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": SPOKEN},
        {"role": role, "content": HEARD},
    ]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs, and refuse in their own ways
        raise ConfigError(
            f"environment.role is {role!r}, which the tokenizer's chat template refuses: {error}",
            "set environment.role=user",
        ) from error
    if text.count(SPOKEN) != 1 or text.count(HEARD) != 1:
        raise ConfigError(
            f"the tokenizer's chat template leaves out messages of role {role!r}", "set environment.role=user"
        )
    before, _, behind = text.partition(SPOKEN)[2].partition(HEARD)
    end = str(tokenizer.eos_token or "")
    if end and before.startswith(end):
        return end, before.removeprefix(end), behind
    return "", before, behind
