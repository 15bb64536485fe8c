"""Agent frameworks and evaluation tools, each through its own client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = "tiny"
ASK = [{"role": "user", "content": "what is the sum of these two numbers?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}]


def test_litellm_answers_streams_and_calls(address, key):
    litellm = pytest.importorskip("litellm")
    own = {"model": f"openai/{MODEL}", "api_base": f"{address}/v1", "api_key": key, "max_tokens": 100}
    assert isinstance(litellm.completion(messages=ASK, **own).choices[0].message.content, str)
    pieces = [c.choices[0].delta.content or "" for c in litellm.completion(messages=ASK, stream=True, seed=1, **own)]
    assert "".join(pieces) == litellm.completion(messages=ASK, seed=1, **own).choices[0].message.content
    made = litellm.completion(messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **own)
    assert json.loads(made.choices[0].message.tool_calls[0].function.arguments).keys() == {"a", "b"}


def test_langchain_binds_tools_and_structured_output(address, key):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(model=MODEL, base_url=f"{address}/v1", api_key=key, max_tokens=100)
    said = model.invoke("hello")
    assert isinstance(said.content, str) and said.usage_metadata["total_tokens"] > 0
    assert "".join(piece.content for piece in model.stream("hello"))
    called = model.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False).invoke("add")
    assert called.tool_calls[0]["name"] == "add" and called.tool_calls[0]["args"].keys() == {"a", "b"}
    made = model.with_structured_output({"title": "point", **SCHEMA}, method="json_schema").invoke("a point")
    assert made.keys() == {"a", "b"}


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_openai_agents_run_a_tool(address, key, api):
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    asked = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        asked.append((a, b))
        return a + b

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    agent = agents.Agent(
        name="adder",
        instructions="Add.",
        tools=[add],
        model=kind(model=MODEL, openai_client=client),
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",  # what random weights would say to the result has no end
    )
    result = agents.Runner.run_sync(agent, "add two numbers", max_turns=3)
    assert len(asked) == 1 and int(result.final_output) == sum(asked[0])

    async def streamed():
        run = agents.Runner.run_streamed(agent, "add two numbers", max_turns=3)
        return [event.type async for event in run.stream_events()]

    assert "run_item_stream_event" in asyncio.run(streamed()) and len(asked) == 2


def test_inspect_ai_generates_and_calls(address, key):
    inspect_model = pytest.importorskip("inspect_ai.model")
    from inspect_ai.tool import ToolInfo, ToolParams

    model = inspect_model.get_model(f"openai-api/tidemill/{MODEL}", base_url=f"{address}/v1", api_key=key)
    parameters = ToolParams(properties=SCHEMA["properties"], required=["a", "b"])
    tool = ToolInfo(name="add", description="Add.", parameters=parameters)

    async def run():
        plain = await model.generate("hello", config=inspect_model.GenerateConfig(max_tokens=8, logprobs=True))
        config = inspect_model.GenerateConfig(max_tokens=200, parallel_tool_calls=False)
        return plain, await model.generate("add", tools=[tool], tool_choice="any", config=config)

    plain, called = asyncio.run(run())
    assert plain.usage.output_tokens == 8 and len(plain.choices[0].logprobs.content) == 8
    assert called.choices[0].message.tool_calls[0].function == "add"


def test_openenv_grades_the_endpoint_as_trainable(address, key):
    validate = pytest.importorskip("openenv.core.harness.capture.validate_llm")
    report = validate.validate_llm(address, MODEL, api_key=key)
    assert report.capture_level == "tokens" and report.ok, report.findings
    assert report.logprobs_mode == "processed"


def test_openai_node_passes_its_own_script(address, key):
    modules = os.environ.get("CLIENTS_NODE")
    if not modules or shutil.which("node") is None:
        pytest.skip("no node with the package openai")
    script = Path(__file__).with_name("openai_node.mjs").read_text()
    place = Path(modules) / "openai_node.mjs"
    place.write_text(script)
    made = subprocess.run(
        ["node", str(place), f"{address}/v1", key, MODEL], capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.strip().endswith("ok")
