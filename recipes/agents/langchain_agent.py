"""An agent of LangChain: a chat model with a tool bound to it."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tidemill.recipes.agents.calculator import STOP, calculate, outcome


@tool
def calculator(expression: str) -> str:
    """Work out a product."""
    return calculate(expression)


async def solve(base_url, api_key, task, most=3):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, stop=STOP, max_retries=0)
    asked = model.bind_tools([calculator])
    messages, calls = [HumanMessage(task["prompt"])], 0
    for _ in range(most):
        said = await asked.ainvoke(messages)
        messages.append(said)
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            calls += 1
            messages.append(ToolMessage(await result(call), tool_call_id=call["id"]))
    return outcome(task, said.content, calls)


async def result(call):
    try:
        return await calculator.ainvoke(call["args"])
    except (ValueError, TypeError) as error:
        return f"error: {error}"
