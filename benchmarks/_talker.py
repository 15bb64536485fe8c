"""An agent for `tidemill bench agents`: conversations with tools and branches, as frameworks make them. Plain HTTP, and
every choice is drawn from the task's seed."""

from __future__ import annotations

import contextlib
import json
import random
import urllib.error
import urllib.request
from typing import Any

NUMBER = {"type": "integer", "maximum": 999}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": NUMBER, "b": NUMBER},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "subtract")
]


class Full(Exception):
    """The sample's tokens are used up."""


def talk(base_url: str, api_key: str, task: dict[str, Any], family: str) -> dict[str, Any]:
    """Several turns; some call tools, some are asked twice, some histories are shortened, some answers are streamed."""
    chance, calls = random.Random(task["seed"]), [0]
    with contextlib.suppress(Full):
        converse(Asker(base_url, api_key, chance), task, family, calls)
    return {"reward": chance.random(), "parts": {"tool_calls": calls[0]}}


def converse(ask: Asker, task: dict[str, Any], family: str, calls: list[int]) -> None:
    chance = ask.chance
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{task['prompt']} {chance.random()}"}]
    for turn in range(chance.randint(2, 4)):
        demands = family in ("qwen", "llama") and chance.random() < 0.5
        own: dict[str, Any] = {"tools": TOOLS} | (
            {"tool_choice": "required", "parallel_tool_calls": family == "qwen" and chance.random() < 0.5}
            if demands
            else {}
        )
        said = ask(messages, max_tokens=120 if demands else chance.randint(1, 12), **own)
        if chance.random() < 0.2:  # a retry: the same question again, and the conversation goes on from this answer
            said = ask(messages, max_tokens=8, **own) if not demands else said
        messages.append(repeated(said, chance))
        for call in said.get("tool_calls") or ():
            calls[0] += 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result(call)})
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": f"turn {turn}"})
        if chance.random() < 0.2:  # a sub-agent
            ask([{"role": "user", "content": f"look up {chance.random()}"}], max_tokens=6)
        if chance.random() < 0.1:  # a history that is shortened
            messages = [{"role": "user", "content": f"in short, {turn} {chance.random()}"}]


class Asker:
    def __init__(self, base_url: str, api_key: str, chance: random.Random) -> None:
        self.url, self.key, self.chance = f"{base_url}/chat/completions", api_key, chance

    def __call__(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        streams = self.chance.random() < 0.3
        data = json.dumps({"model": "any", "messages": messages, "stream": streams, **body}).encode()
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url, data, headers), timeout=600) as answer:
                if streams:
                    return joined(answer.read().decode())
                said: dict[str, Any] = json.load(answer)["choices"][0]["message"]
                return said
        except urllib.error.HTTPError as error:
            told = error.read().decode()
            if "context_length_exceeded" in told:
                raise Full from None
            raise RuntimeError(f"{error.code}: {told}") from None


def joined(text: str) -> dict[str, Any]:
    """A streamed answer as one message."""
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            said["content"] += choice["delta"].get("content") or ""
            said["tool_calls"] += [
                {k: v for k, v in call.items() if k != "index"} for call in choice["delta"].get("tool_calls") or ()
            ]
    return said


def repeated(said: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """An answer as frameworks send it back: without spaces at its ends, its arguments written anew."""
    content = said.get("content")
    kept: dict[str, Any] = {
        "role": "assistant",
        "content": content.strip() if content and chance.random() < 0.5 else content,
    }
    if said.get("tool_calls"):
        kept["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))},
            }
            for call in said["tool_calls"]
        ]
    return kept


def result(call: dict[str, Any]) -> str:
    function = call["function"]
    given = json.loads(function["arguments"])
    return str(given["a"] + given["b"] if function["name"] == "add" else given["a"] - given["b"])
