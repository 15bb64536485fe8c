"""Environments of the package `verifiers` as programs: their rollouts, tools and rewards, with our endpoint as model.

It runs in an interpreter that has verifiers (`environment.python`), whose pins conflict with ours, so it needs nothing
of ours. Rollouts go through verifiers' own training client, which sends tokens to `/inference/v1/generate` and reads
tokens and log-probs back, or through its plain client, which relays chat completions.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients.train import ElasticRendererPool
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment

__all__ = ["ChatLoop"]  # verifiers takes this module as a harness's: what it exports is the harness
OWN_LOOP = "tidemill_chat"
sys.modules[OWN_LOOP] = sys.modules[__name__]
KEY = "OPENAI_API_KEY"


class ChatLoop(Harness[HarnessConfig]):  # type: ignore[misc]
    """A conversation with the task's tools in this process: verifiers' own `null` starts an interpreter for each."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, places, sessions = await connect_mcp(servers, stack)
            while True:
                given: Any = {"tools": tools} if tools else {}
                try:
                    made = await client.chat.completions.create(model=ctx.model, messages=messages, **given)
                except APIStatusError as error:
                    if is_context_overflow(error):  # a sample's tokens are used up: what was said is judged
                        break
                    raise
                said = made.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls or trace.stop_condition is not None:
                    break
                for call in said.tool_calls:
                    result = await _result(sessions, places, call)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _result(sessions: Any, places: Any, call: Any) -> Any:
    name = call.function.name
    if name not in places:
        return f"error: there is no tool {name!r}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(sessions, places, name, arguments)


@lru_cache(maxsize=4)
def _environment(taskset: str, environment: str, settings: str) -> tuple[Any, list[Any]]:
    """An environment and its tasks. `settings`: of the whole environment, as JSON."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    given = json.loads(settings)
    if "." in taskset:  # verifiers knows modules of one word: this one is found by its last
        module, taskset = importlib.import_module(taskset), taskset.rpartition(".")[2]
        sys.modules[taskset] = module
    own = {**given, "id": environment, "taskset": {**given.get("taskset", {}), "id": taskset}}
    kind = environment_class(taskset, environment)
    config_kind = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
    roles = [name for name, field in config_kind.model_fields.items() if isinstance(field.default, AgentConfig)]
    for role in roles:
        seat = {"harness": {"id": OWN_LOOP}, "runtime": {"type": "subprocess"}, **given.get(role, {})}
        own[role] = seat
    made = load_environment(config_kind.model_validate(own))
    tasks = list(made.taskset) if made.taskset.bounded else list(made.taskset.take(1024))
    return made, tasks


def prepare(
    taskset: str,
    environment: str = "",
    settings: Mapping[str, Any] | None = None,
    client: str = "train",
    renderer: Mapping[str, Any] | None = None,
) -> None:
    """Load an environment and a tokenizer before the first sample: the copies that play samples share them."""
    _environment(taskset, environment, json.dumps(dict(settings or {}), sort_keys=True))
    if client == "train":
        own = _client("http://127.0.0.1", client, renderer)
        pool = ElasticRendererPool(own.renderer_model_name, own.renderer, multiplex=own.multiplex)
        asyncio.run(pool.grow())


def _client(base_url: str, client: str, renderer: Mapping[str, Any] | None) -> Any:
    own: dict[str, Any] = {"base_url": base_url, "api_key_var": KEY}
    if client != "train":
        return EvalClientConfig.model_validate(own)
    own |= {"renderer_model_name": os.environ["TIDEMILL_TOKENIZER"], "renderer": dict(renderer or {}) or None}
    return TrainClientConfig.model_validate(own)


async def rollout(
    base_url: str,
    api_key: str,
    task: Mapping[str, Any],
    taskset: str,
    environment: str = "",
    settings: Mapping[str, Any] | None = None,
    client: str = "train",
    renderer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Play a row's task (`task["task"]` is its number). `client`: `train` (tokens) or `eval` (chat completions).
    `renderer`: settings of the training client's, such as {name: default, tool_parser: qwen3}."""
    played, tasks = _environment(taskset, environment, json.dumps(dict(settings or {}), sort_keys=True))
    os.environ[KEY] = api_key
    own = _client(base_url, client, renderer)
    context = ModelContext(model="policy", client=own, sampling=SamplingConfig())
    async with played.serving():
        [slot] = played.slots(tasks[int(task["task"])])
        episode = await played.run_slot(slot, context)
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable] or episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    reward = sum(trace.reward for trace in traces) / len(traces)
    parts = {name: float(value) for trace in traces for name, value in trace.metrics.items()}
    return {"reward": reward, "parts": parts}


rollout.prepare = prepare  # type: ignore[attr-defined]  # called before the first sample, with the recipe's arguments


def tell(taskset: str, environment: str = "", settings: Mapping[str, Any] | None = None) -> None:
    """Print the tasks as JSON, for data.source: verifiers:TASKSET."""
    _, tasks = _environment(taskset, environment, json.dumps(dict(settings or {}), sort_keys=True))
    rows = []
    for task in tasks:
        system, prompt = task.data.system_prompt, task.data.prompt
        shown = task.data.prompt_text if prompt is not None and not isinstance(prompt, str) else prompt or ""
        rows.append({"prompt": f"{system}\n\n{shown}" if system else shown, "name": task.data.name})
    print(json.dumps({"tasks": rows}))
