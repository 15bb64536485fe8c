"""GPT-OSS harmony: messages in channels. `analysis` is thought, `final` said, `commentary to=functions.NAME` a call."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tidemill.chat.answer import Answer, Schema, ToolCall, decoded
from tidemill.chat.formats.api import RESULT

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class Harmony:
    name = "harmony"
    markers: tuple[str, ...] = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
    openings: tuple[str, ...] = (CHANNEL, START)
    how_to_call = (
        f"To use one, write {CHANNEL}commentary to=functions.NAME{MESSAGE}{{…}}<|call|> with the arguments as JSON; "
        "you will then read what it gives."
    )
    result = RESULT

    def is_of(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def read(self, text: str, tools: Sequence[Schema]) -> Answer:
        words, thoughts, calls, unread = list[str](), list[str](), list[ToolCall](), list[str]()
        for part in re.split("|".join(map(re.escape, (*ENDS, START))), text):
            head, has_message, body = part.partition(MESSAGE)
            if not has_message:
                words += [part] if CHANNEL not in part and part.strip() and part.strip() != "assistant" else []
                continue
            recipient = RECIPIENT.search(head)
            if recipient is not None:
                given = decoded(body)
                is_call = not isinstance(given, str)
                calls += [ToolCall(recipient[1], given)] if is_call else []
                unread += [] if is_call else [body.strip()]
            elif "analysis" in head.partition(CHANNEL)[2]:
                thoughts.append(body)
            else:
                words.append(body)
        return Answer("\n".join(words).strip(), "\n".join(thoughts) or None, tuple(calls), tuple(unread))

    def call_grammar(self, tools: Sequence[Schema], specials: Collection[str], parallel: bool) -> str | None:
        return None
