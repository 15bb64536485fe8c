"""Tools: the model calls them, reads what they give, and speaks again; what it says without a call is its answer.

For a chat model calls and results have its template's own form, several calls in one answer too. A plain model writes a
call between `opening` and `closing`: JSON with `name` and `arguments` or, where there is one tool only, the text that
the tool is given. What a tool raises is told to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.chat.answer import Answer, Schema, ToolCall, call_of
from tidemill.environment.api import Task, Turn
from tidemill.environment.tools.api import ClosesTool, as_text
from tidemill.environment.tools.find import Entry, toolbox
from tidemill.errors import did_you_mean

OPENING, CLOSING = "<tool_call>", "</tool_call>"
WANTED = 'a call is JSON: {"name": …, "arguments": {…}}'


class Tools:
    """`environment: {name: tools, args: {functions: [calculator, my_tools.py:search]}}`."""

    def __init__(
        self,
        task: Task,
        functions: Sequence[Entry] = ("calculator",),
        opening: str | None = None,
        closing: str | None = None,
        inline: bool = False,
        result: str = "<tool_response>{}</tool_response>",
        cost: float = 0.0,
        longest_result: int = 2000,
    ) -> None:
        """`opening`, `closing`, `inline` and `result` are for calls in plain text, also by a chat model. `cost`: taken
        from the reward per call. `longest_result`: characters that the model reads of one."""
        self.tools = toolbox(functions)
        self.prompt, self.inline, self.result, self.cost = task.prompt, inline, result, cost
        is_plain = opening is not None or closing is not None or inline
        self.schemas: list[Schema] = [] if is_plain else [tool.schema for tool in self.tools.values()]
        self.opening = OPENING if opening is None else opening
        self.closing = CLOSING if closing is None else closing
        self.stop = (self.closing,)  # in plain text
        self.longest_result = longest_result

    @staticmethod
    def offered(functions: Sequence[Entry] = ("calculator",), **others: Any) -> list[Schema]:
        """What prompts tell a chat model, for these arguments; nothing where calls are plain text."""
        return Tools(Task(), functions, **others).schemas

    def reset(self) -> str:
        return self.prompt

    def use(self, said: Answer) -> Turn:
        """What a chat model said: all its calls are carried out, in their order."""
        if not said.calls and not said.unread:
            return Turn(is_done=True)
        told: list[dict[str, Any]] = []
        failed = 0
        for call in said.calls:
            text, is_failure = self._told(call)
            failed += is_failure
            own = {"tool_call_id": call.id} if call.id else {}
            told.append({"role": "tool", "name": call.name, **own, "content": text})
        told += [{"role": "tool", "name": "", "content": f"error: {WANTED}"} for _ in said.unread]
        count, failed = len(told), failed + len(said.unread)
        parts = {"calls": float(count), "failed_calls": float(failed)}
        return Turn("\n".join(m["content"] for m in told), reward=-self.cost * count, parts=parts, messages=told)

    def step(self, text: str) -> Turn:
        """What a model said in plain text, which stopped at the end of a call."""
        call = self._call(text)
        if call is None:
            return Turn(is_done=True)
        told, is_failure = self._told(call) if isinstance(call, ToolCall) else (f"error: {call}", True)
        parts = {"calls": 1.0, "failed_calls": float(is_failure)}
        return Turn(self.result.format(told), reward=-self.cost, is_inline=self.inline, parts=parts)

    def close(self) -> None:
        for tool in self.tools.values():
            if isinstance(tool, ClosesTool):
                tool.close()

    def _call(self, text: str) -> ToolCall | str | None:
        """The call that the text ends with, or what is wrong with it. The token that ended the call may hold more."""
        before, has_closed, _ = text.rpartition(self.closing)
        if not has_closed:
            return None
        _, has_opened, inside = before.rpartition(self.opening) if self.opening else ("", "", before)
        if self.opening and not has_opened:
            return None
        try:
            call = call_of(json.loads(inside))
        except (json.JSONDecodeError, RecursionError):
            call = None
        if call is None and len(self.tools) == 1:
            return ToolCall(next(iter(self.tools)), inside)
        return call or WANTED

    def _told(self, call: ToolCall) -> tuple[str, bool]:
        """What the model is told of a call, and whether it failed."""
        try:
            return as_text(self._use(call))[: self.longest_result], False
        except Exception as error:  # a tool is foreign code, and its failure is for the model to mend
            return f"error: {error}"[: self.longest_result], True

    def _use(self, call: ToolCall) -> Any:
        tool = self.tools.get(call.name)
        if tool is None:
            raise ValueError(f"there is no tool {call.name!r}{did_you_mean(call.name, self.tools)}")
        if isinstance(call.arguments, Mapping):
            return tool.call(call.arguments)
        names = list((tool.schema["function"].get("parameters") or {}).get("properties") or {})
        if not names:
            raise ValueError("arguments are a JSON object")
        return tool.call({names[0]: call.arguments})  # the one thing it is given, without its name
