"""What the endpoint answers, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve.made import TOOLS, client, served

HELLO = [{"role": "user", "content": "hello"}]


def events(response):
    found = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


def chat(ask, **body):
    return ask.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 8, **body})


def wait_until(look, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stream_says_what_the_whole_answer_says(ask):
    own = {"seed": 3, "max_tokens": 40, "return_token_ids": True, "logprobs": True}
    whole = chat(ask, **own).json()
    made = [e["choices"][0] for e in events(chat(ask, **own, stream=True))]
    (choice,) = whole["choices"]
    assert "".join(e["delta"].get("content", "") for e in made) == choice["message"]["content"]
    assert [t for e in made for t in e.get("token_ids", ())] == choice["token_ids"]
    streamed = [p for e in made if e["logprobs"] for p in e["logprobs"]["content"]]
    assert [p["token"] for p in streamed] == [p["token"] for p in choice["logprobs"]["content"]]
    # The second request finds its prompt in the cache, so its first sums may be made in another order.
    near = pytest.approx([p["logprob"] for p in choice["logprobs"]["content"]], abs=1e-5)
    assert [p["logprob"] for p in streamed] == near


def test_a_stop_string_ends_the_answer_and_is_not_in_it(ask):
    text = chat(ask, seed=4, max_tokens=60).json()["choices"][0]["message"]["content"]
    stop = text[10:13]
    before = text[: text.find(stop)]
    made = chat(ask, seed=4, max_tokens=60, stop=stop).json()["choices"][0]
    assert made["message"]["content"] == before and made["finish_reason"] == "stop"
    streamed = events(chat(ask, seed=4, max_tokens=60, stop=[stop], stream=True))
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed) == before


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_a_named_tool_is_called_with_its_own_arguments(folder, tmp_path, family):
    from tests.serve.made import model_folder

    place = folder if family == "qwen" else model_folder(tmp_path / family, family)
    with served(place, window=900) as server, client(server) as ask:
        choice = {"type": "function", "function": {"name": "add"}}
        own = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300, "seed": 1}
        (made,) = chat(ask, **own).json()["choices"]
        (call,) = made["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"a", "b"} and made["finish_reason"] == "tool_calls"
        streamed = [e["choices"][0] for e in events(chat(ask, **own, stream=True))]
        told = [d for e in streamed for d in e["delta"].get("tool_calls", ())]
        assert [d["function"] for d in told] == [call["function"]] and streamed[-1]["finish_reason"] == "tool_calls"


def test_a_format_without_a_grammar_says_so(tmp_path):
    from tests.serve.made import model_folder

    with served(model_folder(tmp_path / "gemma", "gemma")) as server, client(server) as ask:
        made = chat(ask, tools=TOOLS, tool_choice="required")
    assert made.status_code == 400 and "gemma" in made.json()["error"]["message"]


def test_a_remembered_conversation_goes_on_from_its_own_tokens(ask):
    """Text that tokenises otherwise the second time is the rule with random weights."""
    headers = {"x-session-id": "one"}
    messages, tokens, again = list(HELLO), [], 0
    for turn in range(6):
        body = {"messages": messages, "max_tokens": 12, "seed": turn, "return_token_ids": True}
        made = ask.post("/v1/chat/completions", json=body, headers=headers).json()
        assert made["prompt_token_ids"][: len(tokens)] == tokens
        fresh = ask.post("/tokenize", json={"messages": messages}).json()["tokens"]
        again += fresh != made["prompt_token_ids"]
        tokens = made["prompt_token_ids"] + made["choices"][0]["token_ids"]
        said = made["choices"][0]["message"]
        messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": f"turn {turn}"}]
    assert again > 0


def test_without_a_session_the_answer_depends_on_the_request_alone(ask):
    said = chat(ask, seed=1).json()["choices"][0]["message"]["content"]
    messages = [*HELLO, {"role": "assistant", "content": said}, *HELLO]
    made = chat(ask, messages=messages, return_token_ids=True).json()
    assert made["prompt_token_ids"] == ask.post("/tokenize", json={"messages": messages}).json()["tokens"]


def test_tokens_in_are_tokens_out(ask):
    body = {"token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 5, "logprobs": 1, "seed": 2, "n": 2}}
    made = ask.post("/inference/v1/generate", json=body).json()
    assert len(made["choices"]) == 2
    for choice in made["choices"]:
        named = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert named == [f"token_id:{token}" for token in choice["token_ids"]]


def test_text_becomes_tokens_and_text_again(ask):
    told = ask.post("/tokenize", json={"prompt": "the answer"}).json()
    assert ask.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "the answer"}
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 1024


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", None),
        (b"[" * 100_000, None),
        (b'{"messages": "hello"}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"content": "x"}]}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}', "n"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', "tool_choice"),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}', "response_format"),
        (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"a": 1}}', "logit_bias"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(ask, body, field):
    made = ask.post("/v1/chat/completions", content=body)
    assert made.status_code == 400, made.text
    error = made.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and error["param"] == field


def test_a_prompt_beyond_the_window_is_refused_with_openais_code(ask):
    made = chat(ask, messages=[{"role": "user", "content": "\x01" * 2000}])
    assert made.status_code == 400 and made.json()["error"]["code"] == "context_length_exceeded"


def test_nothing_is_answered_without_the_key(folder):
    with served(folder, key="the-key") as server:
        with client(server) as ask:
            assert chat(ask).status_code == 401 and ask.get("/metrics").status_code == 401
            assert ask.get("/health").status_code == 200
        with client(server, "the-kez") as ask:
            assert ask.get("/v1/models").status_code == 401
        with client(server, "the-key") as ask:
            assert chat(ask).status_code == 200


def test_a_body_that_is_too_large_is_not_read(folder):
    with served(folder, most_body=10_000) as server, client(server) as ask:
        assert chat(ask, messages=[{"role": "user", "content": "x" * 20_000}]).status_code == 413

        def parts():
            for _ in range(100):
                yield b"x" * 1000

        with contextlib.suppress(httpx.WriteError):  # the length is not declared, and the connection may close first
            assert ask.post("/v1/chat/completions", content=parts()).status_code == 413
        assert chat(ask).status_code == 200


def test_a_client_that_goes_away_frees_its_place(server):
    host, port = server.listener.getsockname()
    link = server.served[0].link
    for streams in (b"true", b"false"):
        body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000, "ignore_eos": true, "stream": %s}'
        body %= streams
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        with socket.create_connection((host, port)) as end:
            end.sendall(head + body)
            wait_until(lambda: link.open_requests > 0)
        began = time.monotonic()
        wait_until(lambda: link.open_requests == 0)
        assert time.monotonic() - began < 5


def test_sixty_four_clients_get_what_one_gets(server):
    def one(seed):
        with client(server) as ask:
            return chat(ask, seed=seed, max_tokens=20).json()["choices"][0]["message"]["content"]

    alone = [one(seed) for seed in range(4)]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, [i % 4 for i in range(64)])) == [alone[i % 4] for i in range(64)]


def test_metrics_count_what_was_made(folder):
    with served(folder) as server, client(server) as ask:
        chat(ask, max_tokens=5, ignore_eos=True)
        chat(ask, n=1000)
        text = ask.get("/metrics").text
    assert (
        'tidemill_generated_tokens_total{model="tiny"} 5' in text and 'tidemill_refused_total{status="400"} 1' in text
    )


def test_several_models_and_adapters_answer_by_name(folder, tmp_path):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    token = [40, 41, 42]
    with torch.no_grad():
        expected = int(adapted(torch.tensor([token])).logits[0, -1].argmax())
        plain = int(adapted.unload()(torch.tensor([token])).logits[0, -1].argmax())
    options = {"models": (f"other={folder}",), "adapters": (f"adapted={tmp_path / 'adapter'}",)}
    with served(folder, **options) as server, client(server) as ask:

        def first(model):
            body = {"model": model, "token_ids": token, "sampling_params": {"max_tokens": 1, "temperature": 0}}
            return ask.post("/inference/v1/generate", json=body).json()["choices"][0]["token_ids"][0]

        assert [first(name) for name in ("tiny", "other", "adapted")] == [plain, plain, expected]
        assert {m["id"]: m["parent"] for m in ask.get("/v1/models").json()["data"]}["adapted"] == "tiny"
        assert chat(ask, model="none").status_code == 404
