"""An agent of the OpenAI Agents SDK (openai-agents)."""

from __future__ import annotations

from agents import Agent, MaxTurnsExceeded, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
from tidemill.recipes.agents.calculator import STOP, calculate, outcome

set_tracing_disabled(True)


async def solve(base_url, api_key, task, most=3):
    calls = []

    @function_tool
    def calculator(expression: str) -> str:
        """Work out a product."""
        calls.append(expression)
        return calculate(expression)

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        agent = Agent(
            name="solver",
            tools=[calculator],
            model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
            model_settings=ModelSettings(extra_args={"stop": STOP}),
        )
        try:
            said = (await Runner.run(agent, task["prompt"], max_turns=most)).final_output
        except MaxTurnsExceeded:
            said = None
    return outcome(task, said, len(calls))
