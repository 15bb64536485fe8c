"""openai-python: plain, streamed, tools, JSON schema, completions and responses."""

from __future__ import annotations

import asyncio
import json

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

MODEL = "tiny"
ASK = [{"role": "user", "content": "what is the sum of these two numbers?"}]
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": ADD}]


class Point(pydantic.BaseModel):
    x: bool
    y: bool


@pytest.fixture
def client(address, key):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
        yield client


def test_a_plain_answer_has_every_field(client):
    made = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=7, seed=1)
    assert made.object == "chat.completion" and made.choices[0].finish_reason == "length"
    assert made.choices[0].message.role == "assistant" and isinstance(made.choices[0].message.content, str)
    assert made.usage.completion_tokens == 7 and made.usage.total_tokens == made.usage.prompt_tokens + 7


def test_the_same_seed_gives_the_same_answer_streamed_or_not(client):
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 40, "seed": 5}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole


def test_log_probs_and_tokens_have_one_length(client):
    extra = {"return_token_ids": True}
    made = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=9, seed=1, logprobs=True, top_logprobs=3, extra_body=extra
    )
    choice = made.choices[0]
    assert len(choice.token_ids) == len(choice.logprobs.content) == 9
    assert len(made.prompt_token_ids) == made.usage.prompt_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_a_demanded_tool_is_called(client):
    made = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    assert made.choices[0].finish_reason == "tool_calls"
    told = [*ASK, made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    after = client.chat.completions.create(model=MODEL, messages=told, tools=TOOLS, max_tokens=5)
    assert after.usage.prompt_tokens > made.usage.prompt_tokens


def test_a_streamed_call_is_put_together_by_the_client(client):
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    ) as stream:
        made = stream.get_final_completion()
    (call,) = made.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"a", "b"} and made.choices[0].finish_reason == "tool_calls"


def test_a_json_schema_is_followed_and_parsed(client):
    made = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Point, max_tokens=400)
    assert isinstance(made.choices[0].message.parsed, Point)


def test_usage_comes_at_the_end_of_a_stream(client):
    *_, last = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == [] and last.usage.completion_tokens == 3


def test_several_choices_are_told_apart_in_a_stream(client):
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 8, "n": 3, "seed": 2}
    whole = [c.message.content for c in client.chat.completions.create(**asked).choices]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole


def test_completions_answer_text_with_text(client):
    asked = {"model": MODEL, "prompt": "the answer", "max_tokens": 6, "seed": 3}
    made = client.completions.create(**asked, logprobs=2)
    assert made.choices[0].finish_reason == "length" and len(made.choices[0].logprobs.token_logprobs) == 6
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == client.completions.create(**asked).choices[0].text


def test_responses_answer_call_and_go_on(client):
    made = client.responses.create(model=MODEL, input="hello", max_output_tokens=8)
    assert isinstance(made.output_text, str) and made.usage.output_tokens == 8
    tool = {"type": "function", **ADD, "strict": True}
    called = client.responses.create(
        model=MODEL, input="add", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    after = client.responses.create(
        model=MODEL, input=[output], previous_response_id=called.id, tools=[tool], max_output_tokens=4
    )
    assert after.usage.input_tokens > called.usage.input_tokens


def test_streamed_responses_end_in_what_was_streamed(client):
    pieces, final, own = [], None, {"extra_body": {"seed": 1}}
    for event in client.responses.create(model=MODEL, input="hello", max_output_tokens=12, stream=True, **own):
        pieces += [event.delta] if event.type == "response.output_text.delta" else []
        final = event
    assert final.type == "response.incomplete" and "".join(pieces) == final.response.output_text
    parsed = client.responses.parse(model=MODEL, input="a point", text_format=Point)
    assert isinstance(parsed.output_parsed, Point)


def test_errors_have_their_types(client, address):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="none", messages=ASK)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[], max_tokens=3)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=0)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()


def test_models_say_how_much_they_read(client):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.max_model_len == 1024
    assert client.models.retrieve(MODEL).id == MODEL


def test_sixty_four_clients_get_what_one_gets(address, key):
    async def ask(client, seed):
        made = await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=24, seed=seed)
        return made.choices[0].message.content

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key) as client:
            alone = [await ask(client, seed) for seed in range(4)]
            together = await asyncio.gather(*(ask(client, i % 4) for i in range(64)))
        return alone, together

    alone, together = asyncio.run(run())
    assert together == [alone[i % 4] for i in range(64)]
