"""Requests that no honest client would send: each is answered or refused, and the next one is served."""

from __future__ import annotations

import json
import math
import socket
import threading
import time

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.made import TOOLS, client, served

HELLO = [{"role": "user", "content": "hello"}]
FINE = {200, 400, 404, 413, 429}
WORDS = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "user", "tool", "<|im_end|>", "\ud83d", "{{ 7 * 7 }}", "\x00"])
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -1, 1e308, -1e-300]),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
DRAWING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "n", "max_tokens", "model", "stream", "logprobs",
)  # fmt: skip
FIELDS = {
    "/v1/chat/completions": (*DRAWING, "messages", "tools", "tool_choice", "response_format", "top_logprobs",
                             "chat_template_kwargs", "max_completion_tokens", "stream_options"),
    "/v1/completions": (*DRAWING, "prompt", "echo", "response_format"),
    "/v1/responses": ("input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "temperature",
                      "top_p", "stream", "previous_response_id", "metadata", "seed"),
    "/inference/v1/generate": ("token_ids", "sampling_params", "model", "stream", "request_id"),
    "/tokenize": ("prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens"),
    "/detokenize": ("tokens", "model"),
}  # fmt: skip
PARTS = ("content", "tool_calls", "tool_call_id", "name", "reasoning_content")
PLAIN = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [40], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [40]},
}


def is_served(ask):
    made = ask.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, "seed": 1})
    return made.status_code == 200


@pytest.mark.parametrize("path", FIELDS)
def test_no_value_of_any_field_fails_the_server(ask, path):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(FIELDS[path]), ANYTHING, min_size=1, max_size=3))
    def tried(given):
        made = ask.post(path, content=json.dumps({**PLAIN[path], **given}).encode())
        assert made.status_code in FINE, (given, made.status_code, made.text)
        if made.status_code != 200:
            assert made.json()["error"]["message"]

    tried()
    assert is_served(ask)


@given(st.lists(st.fixed_dictionaries({"role": WORDS}, optional=dict.fromkeys(PARTS, ANYTHING)), max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_messages_fail_the_server(ask, messages):
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    made = ask.post("/v1/chat/completions", content=body, headers={"x-session-id": "fuzz"})
    assert made.status_code in FINE, made.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan), ("temperature", math.inf), ("top_p", 0), ("top_p", 2), ("min_p", 5), ("n", 10**9),
        ("seed", 2**80), ("seed", -(2**80)), ("max_tokens", 2**80), ("stop_token_ids", [-1, 10**15]),
        ("stop", [""] * 99),
        ("logit_bias", {"99999999": 1.0}), ("logit_bias", {"-5": 1.0}), ("logit_bias", {"5": 1e308}),
        ("repetition_penalty", 0), ("repetition_penalty", 1e308), ("top_logprobs", 10**9), ("top_k", 2**80),
    ],
)  # fmt: skip
def test_a_number_beyond_reason_is_refused_or_clamped(ask, field, value):
    own = {"logprobs": True} if field == "top_logprobs" else {}
    body = json.dumps({**PLAIN["/v1/chat/completions"], **own, field: value})
    made = ask.post("/v1/chat/completions", content=body.encode())
    assert made.status_code in (200, 400), made.text
    assert is_served(ask)


def test_a_request_cannot_bring_its_own_template(ask):
    """A template is a program: one that a client sends could take the server's time, or read what others cannot."""
    for options in (
        {"chat_template": "{% for i in range(10**9) %}{{ i }}{% endfor %}"},
        {"tokenize": True},
        {"padding": 1},
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            made = ask.post(
                path, json={"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": options}, timeout=20
            )
            assert made.status_code == 400 and "chat_template_kwargs" in made.json()["error"]["message"]


def test_templates_in_messages_are_words(ask):
    told = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% raise %}"}]}
    tokens = ask.post("/tokenize", json=told).json()["tokens"]
    assert "{{ 7 * 7 }}{% raise %}" in ask.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "pattern": "(((((((x{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}){1,99})"},
        {"type": "string", "maxLength": 10**12},
        {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        {"$ref": "#"},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"enum": [str(i) for i in range(20_000)]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "no such type"},
        {"properties": {f"k{i}": {"type": "string"} for i in range(2000)}, "required": [f"k{i}" for i in range(2000)]},
    ],
    ids=lambda s: next(iter(s)) + str(len(json.dumps(s))),
)
def test_no_schema_stands_in_the_way_of_other_clients(server, ask, schema):
    """Whatever a schema costs, the server answers others meanwhile, soon."""
    longest, ends = [], threading.Event()

    def others():
        with client(server) as other:
            while not (longest and ends.is_set()):
                began = time.monotonic()
                assert is_served(other)
                longest.append(time.monotonic() - began)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        made = ask.post("/v1/chat/completions", json={**PLAIN["/v1/chat/completions"], "response_format": form})
    finally:
        ends.set()
        thread.join()
    assert made.status_code in (200, 400), made.text
    assert max(longest) < 5.0, longest


def test_names_of_tools_are_words_and_no_grammar(ask):
    for name in ('x" | "y', "a\nstart: /.*/", "%json {}", "<tool_call>", "\ud800", "x" * 5000):
        tool = {"type": "function", "function": {**TOOLS[0]["function"], "name": name}}
        own = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
        body = json.dumps({"messages": HELLO, **own}).encode()
        made = ask.post("/v1/chat/completions", content=body)
        assert made.status_code in (200, 400)
        for call in made.json().get("choices", [{}])[0].get("message", {}).get("tool_calls") or ():
            assert call["function"]["name"] == name
    assert is_served(ask)


# Connections


def connected(server):
    host, port = server.listener.getsockname()
    return socket.create_connection((host, port), timeout=30)


def test_headers_without_end_are_not_kept(folder):
    with served(folder) as server, client(server) as ask:
        before = psutil.Process().memory_info().rss
        with connected(server) as end:
            end.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            sent = 0
            try:
                while sent < 200 << 20:
                    sent += end.send(b"x-more: " + b"y" * 65000 + b"\r\n")
            except OSError:
                pass
        assert sent < 100 << 20 and psutil.Process().memory_info().rss - before < 50 << 20
        assert is_served(ask)


def test_a_client_that_never_finishes_its_question_loses_its_place(folder, monkeypatch):
    monkeypatch.setattr("tidemill.serve.connections.HEADERS_S", 0.5)
    monkeypatch.setattr("tidemill.serve.app.BODY_S", 0.5)
    with served(folder, most_connections=8) as server, client(server) as ask:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        slow = [connected(server) for _ in range(12)]
        for i, end in enumerate(slow):
            end.sendall((b"", head, head + b"content-length: 1000\r\n\r\n{")[i % 3])
        deadline = time.monotonic() + 20
        while True:
            try:
                if is_served(ask):
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for end in slow:
            end.close()


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:8000", ""])
def test_a_foreign_name_that_leads_here_is_not_served_without_a_key(folder, server, host):
    with client(server) as ask:
        made = ask.post("/v1/chat/completions", json=PLAIN["/v1/chat/completions"], headers={"host": host})
        assert made.status_code in (400, 421)
    with served(folder, key="the-key") as guarded, client(guarded, "the-key") as ask:
        made = ask.post("/v1/chat/completions", json=PLAIN["/v1/chat/completions"], headers={"host": "any.example"})
        assert made.status_code == 200


def test_what_is_remembered_has_a_limit_in_bytes(folder, monkeypatch):
    monkeypatch.setattr("tidemill.serve.responding.MOST_BYTES", 5_000)
    monkeypatch.setattr("tidemill.serve.service.MOST_REMEMBERED", 20_000)
    with served(folder) as server, client(server) as ask:
        ids = []
        for i in range(20):
            made = ask.post(
                "/v1/responses", json={"input": f"{i} " + "x" * 400, "max_output_tokens": 1, "metadata": {}}
            )
            ids.append(made.json()["id"])
            ask.post("/v1/chat/completions", json=PLAIN["/v1/chat/completions"], headers={"x-session-id": str(i)})
        gone = ask.post("/v1/responses", json={"input": "on", "previous_response_id": ids[0], "max_output_tokens": 1})
        kept = ask.post("/v1/responses", json={"input": "on", "previous_response_id": ids[-1], "max_output_tokens": 1})
        assert gone.status_code == 404 and kept.status_code == 200
        assert server.service.remembered_tokens <= 20_000


def test_questions_at_once_are_counted_by_their_samples(folder):
    with served(folder, most_open=16) as server, client(server) as ask:
        made = ask.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, "n": 17})
        assert made.status_code == 429 and is_served(ask)
