"""The engine for any program: answers of a transformers model, whoever waits for them and however."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen3Config

import tidemill
from tidemill.errors import ConfigError, ModelError
from tidemill.models.load import make_tiny, save_folder
from tidemill.recipe.config import TinyModel

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [20]]


def make(config: Any) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture(params=["qwen3", "olmo2"])
def model(request: pytest.FixtureRequest) -> Any:
    """One whose layers run in the lean pass, and one that runs as the module that it is."""
    return make(Qwen3Config(**SMALL, head_dim=8) if request.param == "qwen3" else Olmo2Config(**SMALL))


@pytest.fixture
def engine(model: Any) -> Iterator[tidemill.Engine]:
    with tidemill.Engine(model, concurrent=8) as made:
        yield made


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(made[0, len(prompt) :].tolist())


def test_greedy_answers_are_transformers_own_and_the_model_stays_as_it_was(model: Any, engine: tidemill.Engine) -> None:
    model.train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = engine.generate(PROMPTS, max_new_tokens=12, temperature=0)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    model.eval()
    assert [[a.tokens for a in answers] for answers in found] == [[greedy(model, p, 12)] for p in PROMPTS]
    model(input_ids=torch.tensor([[3, 4]]))  # it can be called as before


def test_samples_have_the_log_probs_of_the_model(model: Any, engine: tidemill.Engine) -> None:
    [answers] = engine.generate([5, 6, 7], n=4, max_new_tokens=6, temperature=0.7, seed=2)
    assert len({tuple(a.tokens) for a in answers}) > 1
    for a in answers:
        logits = model(input_ids=torch.tensor([[5, 6, 7, *a.tokens]])).logits[0, 2:-1] / 0.7
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(a.tokens)[:, None])[:, 0]
        assert torch.tensor(a.logprobs).sub(wanted).abs().max() < 1e-4


def test_the_same_seed_gives_the_same_answers_whatever_ran_before(engine: tidemill.Engine) -> None:
    def draw(seed: int) -> list[list[list[int]]]:
        return [[a.tokens for a in answers] for answers in engine.generate(PROMPTS, n=2, max_new_tokens=8, seed=seed)]

    first = draw(7)
    assert draw(8) != first and draw(7) == first


def test_weights_that_changed_are_used_after_refresh(model: Any, engine: tidemill.Engine) -> None:
    prompt = list(range(5, 45))  # longer than a page: its beginning is remembered
    engine.generate(prompt, max_new_tokens=4, temperature=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    engine.refresh()
    assert engine.generate(prompt, max_new_tokens=4, temperature=0)[0][0].tokens == greedy(model, prompt, 4)


def test_threads_coroutines_and_streams_share_one_engine(model: Any, engine: tidemill.Engine) -> None:
    wanted = [greedy(model, prompt, 10) for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = engine.generate(PROMPTS[i % 3], max_new_tokens=10, temperature=0)[0][0].tokens

    async def many() -> list[Any]:
        async def stream() -> list[int]:
            pieces = engine.astream(PROMPTS[1], max_new_tokens=10, temperature=0)
            return [token async for piece in pieces for token in piece.tokens]

        waiting = [engine.agenerate(prompt, max_new_tokens=10, temperature=0) for prompt in PROMPTS]
        return [*await asyncio.gather(*waiting), await stream()]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    *awaited, streamed = asyncio.run(many())
    for thread in threads:
        thread.join()
    assert [a[0][0].tokens for a in awaited] == wanted and streamed == wanted[1]
    assert found == {i: wanted[i % 3] for i in range(6)}


def test_samples_that_find_no_room_go_on_from_the_host(model: Any, engine: tidemill.Engine) -> None:
    asked = {"n": 6, "max_new_tokens": 40, "seed": 5, "ignore_eos": True}
    wanted = [[a.tokens for a in answers] for answers in engine.generate(PROMPTS, **asked)]
    with tidemill.Engine(model, concurrent=18, max_length=64, cache_tokens=160, cache_on_host_gb=0.1) as crowded:
        found = crowded.generate(PROMPTS, **asked)
        counts = crowded._native.cache_counts()
    assert [[a.tokens for a in answers] for answers in found] == wanted
    assert counts["host_cache/in_bytes"] > 0 and not counts.get("recomputed_tokens")


def test_a_stream_that_is_left_early_frees_its_place(engine: tidemill.Engine) -> None:
    for piece in engine.stream([5, 6], max_new_tokens=100, ignore_eos=True):
        assert len(piece.tokens) == 1
        break
    assert len(engine.generate([5, 6], max_new_tokens=3, ignore_eos=True)[0][0].tokens) == 3
    assert not engine._native.has_work


def test_text_and_pieces_of_text(tmp_path: Path) -> None:
    tiny = make_tiny(TinyModel(alphabet="0123456789+=é"), torch.float32, 0, torch.device("cpu"))
    save_folder(tiny.model, tiny.tokenizer, tmp_path / "model")
    with tidemill.Engine(tmp_path / "model") as engine:
        [[one], [other]] = engine.generate(["1+1=", "2+2="], max_new_tokens=8, seed=4)
        assert one.text == tiny.tokenizer.decode(one.tokens, skip_special_tokens=True) and other.prompt_tokens
        pieces = list(engine.stream("1+1=", max_new_tokens=8, temperature=0))
        [[whole]] = engine.generate("1+1=", max_new_tokens=8, temperature=0)
        assert "".join(p.text for p in pieces) == whole.text
        assert [t for p in pieces for t in p.tokens] == whole.tokens


def test_what_cannot_work_is_refused_by_name(model: Any, engine: tidemill.Engine) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'temprature'.*did you mean temperature"):
        engine.generate([5], temprature=1.0)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        engine.generate("text")
    with pytest.raises(ModelError, match="prompt of 500 tokens"):
        engine.generate([5] * 500)
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.generate([5])


ALONE = """
import sys
for name in ("pydantic", "msgspec", "rich", "typer", "tensorboard", "ray", "gguf", "psutil"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from tidemill import Engine
config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, eos_token_id=1)
print(len(Engine(AutoModelForCausalLM.from_config(config)).generate([[5, 6]], n=3, max_new_tokens=4)[0]))
"""


def test_it_needs_nothing_beside_torch_and_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split()[-1:] == ["3"], done.stderr
