"""From examples to tokens: chat template, system message, prompt template, limits. Text is tokenised once, here."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tidemill.chat.answer import Schema
from tidemill.chat.template import Chat
from tidemill.data import conversations
from tidemill.data.pictures.shown import HERE, Pictures, with_parts
from tidemill.data.source import Example, Message
from tidemill.errors import ConfigError, DataError, did_you_mean
from tidemill.models.vision.views.view import Plan, View
from tidemill.tiles import Tiles

if TYPE_CHECKING:
    from tidemill.recipe.config import Data


class PromptTokens:
    """Turns examples into token lists with one tokenizer and one set of data settings. `longest_response`: of the
    responses in the data; longer ones are cut, and counted in `cut_responses`. `tools`: what every prompt offers,
    beside the row's own. `view`: how the model takes images; None where it reads text alone."""

    def __init__(
        self,
        tokenizer: Any,
        data: Data,
        longest_response: int | None = None,
        tools: Sequence[Schema] = (),
        view: View | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.pictures = Pictures.of(view, data.images)
        self.tools = list(tools)
        self.longest_response = longest_response
        self.cut_responses = 0
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if data.chat == "on" and not has_template:
            raise ConfigError(
                "data.chat is on, but the model's tokenizer has no chat template",
                "set data.chat=off, or add a chat template to the model folder",
            )
        self.is_chat = has_template and data.chat != "off"
        if data.system and not self.is_chat:
            raise ConfigError(
                "data.system is set, but prompts are not in chat form (no chat template, or data.chat=off)",
                "put the instruction into data.template",
            )

    def encode(self, example: Example) -> list[int]:
        """The prompt's tokens. A prompt that is empty or too long is a DataError that names the row."""
        tokens = self.prompt(example)
        self._check_length(tokens, example.where)
        return tokens

    def prompt(self, example: Example) -> list[int]:
        """The prompt's tokens, however many."""
        if example.text is not None:
            raise DataError(
                f"{example.where}: the row is a document, not a prompt",
                "algorithm sft learns from documents; set eval.size=0, since there is nothing to ask of them",
            )
        plans = self._plans(example)
        if self.is_chat:
            tools, messages = self._tools(example), self._messages(example)
            if tools and not self.chat.takes_tools(tools):
                messages, tools = self.chat.told(messages, tools), None
            options = {"asks": True, **self.data.chat_args}
            text = conversations.render(self.tokenizer, messages, tools, example.where, **options)
            if self.pictures is not None:
                text = self.pictures.written(text, plans, example.where)
            tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        else:
            text = self.text(example)
            tokens = self._plain_tokens(text if not plans else self._looking().placed(text, plans, example.where))
        if not tokens:
            raise DataError(f"{example.where}: the prompt is empty", "fill it, or set data.on_bad_row=skip")
        return tokens

    def tiles(self, example: Example, tokens: Sequence[int]) -> Tiles:
        """What the prompt shows, where its tokens have places for it."""
        if not example.images:
            return ()
        return self._looking().tiles(example.images, tokens, example.where, self._plans(example))

    def _plans(self, example: Example) -> list[Plan]:
        return self._looking(example.where).plans(example.images, example.where) if example.images else []

    def _looking(self, where: str = "") -> Pictures:
        if self.pictures is None:
            raise DataError(
                f"{where}: the row has images, and data.images is none",
                "set data.images for a model that takes images, or data.columns.images=none",
            )
        return self.pictures

    @cached_property
    def chat(self) -> Chat:
        return Chat(self.tokenizer, self.data.chat_args)

    def _tools(self, example: Example) -> list[Any] | None:
        found = [*(conversations.tools_of(example.meta) or []), *self.tools]
        return found or None

    def _check_length(self, tokens: list[int], where: str) -> None:
        limit = self.data.max_prompt_tokens
        if len(tokens) > limit:
            raise DataError(
                f"{where}: the prompt has {len(tokens)} tokens, more than data.max_prompt_tokens ({limit})",
                f"data.max_prompt_tokens={len(tokens)} would do, or data.on_bad_row=skip to leave such rows out",
            )

    def encode_taught(self, example: Example) -> tuple[list[int], list[int], list[bool]]:
        """Encode prompt, response and which of the response's tokens are learned: all of them, or with
        `data.learn_turns=all` what an assistant said in any turn of a conversation."""
        if self.data.learn_turns == "all" and self.is_chat and example.messages and self.data.template is None:
            messages = self._with_system(list(example.messages))
            tools = conversations.tools_of(example.meta)
            plans = self._plans(example)
            if plans:
                messages = with_parts(messages, len(plans), example.where)
            grown = (lambda text: self._looking().partly(text, plans)) if plans else None
            tokens, said = conversations.spoken(self.tokenizer, messages, tools, example.where, grown)
            first = said.index(True)
            self._check_length(tokens[:first], example.where)
            return tokens[:first], self._cut(tokens[first:]), said[first:][: self.longest_response]
        prompt, response = self.encode_pair(example)
        return prompt, response, [True] * len(response)

    def encode_text(self, example: Example, longest: int) -> list[tuple[list[int], list[int], list[bool]]]:
        """Cut a document into pieces of at most `longest` tokens, its end token last. A piece begins with the last
        token of the one before, so that every token but the document's first is learned once."""
        tokens = list(self.tokenizer.encode(example.text))
        end = self.tokenizer.eos_token_id
        if end is not None and tokens and tokens[-1] != end:
            tokens.append(end)
        if len(tokens) < 2:
            raise DataError(f"{example.where}: the text has fewer than two tokens: there is nothing to predict")
        step = max(1, longest - 1)
        pieces = [tokens[at : at + step + 1] for at in range(0, len(tokens) - 1, step)]
        return [(piece[:1], piece[1:], [True] * (len(piece) - 1)) for piece in pieces]

    def shown(self, example: Example) -> str:
        """The prompt as a person would put it: the user's last message, without the chat template around it."""
        if example.text is not None:
            return str(example.text)
        if isinstance(example.prompt, str) or self.data.template is not None:
            return self.text(example)
        asked = [_words(m["content"]) for m in example.prompt if m["role"] == "user"]
        return asked[-1] if asked else _words(example.prompt[-1]["content"])

    def encode_pair(self, example: Example) -> tuple[list[int], list[int]]:
        """Prompt and response for supervised training; the response ends with the model's end token."""
        if example.response is None:
            raise DataError(
                f"{example.where}: the row has no response to learn from",
                "name the response's column with data.columns.response",
            )
        return self.encode(example), self.response_tokens(example.response, example.where)

    def response_tokens(self, text: str, where: str) -> list[int]:
        """The response's tokens, cut where the longest response ends."""
        return self._cut(self.whole_response(text, where))

    def _cut(self, tokens: list[int]) -> list[int]:
        if self.longest_response is not None and len(tokens) > self.longest_response:
            self.cut_responses += 1
            return tokens[: self.longest_response]
        return tokens

    def take_cut(self) -> int:
        """Return how many responses were cut since the last call."""
        cut, self.cut_responses = self.cut_responses, 0
        return cut

    def whole_response(self, text: str, where: str) -> list[int]:
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        end = self.tokenizer.eos_token_id
        if not tokens and end is None:
            raise DataError(f"{where}: the response is empty, and the tokenizer has no end token to learn there")
        return tokens if end is None or (tokens and tokens[-1] == end) else [*tokens, end]

    def text(self, example: Example) -> str:
        """The prompt as plain text, before any chat template."""
        if self.data.template is not None:
            return fill(self.data.template, example)
        if isinstance(example.prompt, str):
            return example.prompt
        if self.data.chat != "off":
            raise DataError(
                f"{example.where}: the prompt is a list of chat messages, but the tokenizer has no chat template",
                "use a chat model, or set data.chat=off to join the messages' texts",
            )
        return "\n".join(_words(message["content"]) for message in example.prompt)

    def _messages(self, example: Example) -> list[Message]:
        if isinstance(example.prompt, list) and self.data.template is None:
            messages = list(example.prompt)
        else:
            messages = [{"role": "user", "content": self.text(example)}]
        messages = self._with_system(messages)
        if example.images:
            messages = with_parts(messages, len(example.images), example.where)
        if not any(str(message["content"]).strip() for message in messages):
            raise DataError(f"{example.where}: the prompt is empty")
        return messages

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if not self.data.system or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.data.system}, *messages]

    def _plain_tokens(self, text: str) -> list[int]:
        tokens = list(self.tokenizer.encode(text)) if text else []
        # Some tokenizers close every text with the end token; a prompt that goes on must not be closed.
        while tokens and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()
        return tokens


def _words(content: Any) -> str:
    """A message's text; where an image stands, it says so."""
    if not isinstance(content, list):
        return str(content)
    parts = (part if isinstance(part, dict) else {} for part in content)
    return "".join(HERE if part.get("type") == "image" else str(part.get("text", "")) for part in parts)


def fill(template: str, example: Example) -> str:
    """The template with its `{column}` places filled; `{{` and `}}` are literal braces."""
    columns = {**example.meta, "prompt": example.prompt, "answer": example.answer}
    for name in template_columns(template):
        if name not in columns:
            raise DataError(
                f"{example.where}: data.template names column {name!r}, which the row does not have"
                f"{did_you_mean(name, columns)}",
                f"its columns are {', '.join(columns)}",
            )
    return string.Formatter().vformat(template, (), columns)


def template_columns(template: str) -> list[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.template cannot be read: {error}", "write {column} for a column and {{ }} for plain braces"
        ) from error
    if bad := [field for field in fields if not field.isidentifier()]:
        raise ConfigError(
            f"data.template has the place {{{bad[0]}}}, which is not the name of a column",
            "write {column} for a column and {{ }} for plain braces",
        )
    return fields
