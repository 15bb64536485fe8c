"""An agent with nothing but the package openai: ask, carry out the calls, ask again."""

from __future__ import annotations

import json

from openai import AsyncOpenAI
from tidemill.recipes.agents.calculator import STOP, calculate, outcome

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": calculate.__doc__, "parameters": EXPRESSION}


async def solve(base_url, api_key, task, most=3):
    messages = [{"role": "user", "content": task["prompt"]}]
    calls = 0
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(most):
            made = await client.chat.completions.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}], stop=STOP
            )
            said = made.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                calls += 1
                result = carried_out(call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return outcome(task, said.content, calls)


def carried_out(function):
    try:
        return calculate(**json.loads(function.arguments))
    except (ValueError, TypeError) as error:
        return f"error: {error}"
