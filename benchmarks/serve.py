"""`tidemill serve` under load: many streaming clients, none starved, and how much of the engine's own rate is left.

The model has the quickstart's shape, with random weights: what it says has no end, so every answer has as many tokens
as it was asked for. The server has a process of its own, and so have the clients. On a GPU, with vLLM beside:
`benchmarks/gpu_serve.py`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._serve_load import ServerProcess, put_on
from tidemill import bench

ABOUT = "tidemill serve: streaming clients, the slowest client's share, and the engine's rate that is left"
OPTIONS = {"clients": 512, "overhead_clients": 256, "tokens": 48, "rounds": 12, "threads": 1}
START_S = 120.0
PATH = "/v1/chat/completions"


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    clients, few = int(options["clients"]), int(options["overhead_clients"])
    tokens, rounds, repeats = int(options["tokens"]), int(options["rounds"]), int(options["repeats"])
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    with tempfile.TemporaryDirectory(prefix="tidemill-serve-") as place:
        folder = Path(place)
        make_model(folder / "model")
        command = [sys.executable, "-m", "tidemill", "serve", str(folder / "model"), "--port", "0"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        server = ServerProcess(command, environment, folder / "log", says=r"(http://\S+)/v1 serves")
        try:
            address = server.wait(START_S)
            body = {"model": "model", "max_tokens": tokens, "ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True}
            bodies = [{"messages": [{"role": "user", "content": content(i)}]} for i in range(4096)]

            def loaded(count: int, often: int) -> dict[str, float]:
                return put_on(address, body, bodies, path=PATH, clients=count, tokens=tokens, rounds=often)

            loaded(few, 1)  # warm
            pairs = [(engine_rate(folder / "model", few, tokens, rounds), loaded(few, rounds)) for _ in range(repeats)]
            many = [loaded(clients, rounds) for _ in range(repeats)]
        finally:
            server.end()
    return {
        "clients": clients,
        "errors": sum(one["errors"] for one in many) + sum(one["errors"] for _, one in pairs),
        "slowest_share": bench.summary([one["slowest_share"] for one in many]),
        "tokens_per_s": bench.summary([one["tokens_per_s"] for one in many]),
        "first_byte_s": bench.summary([one["first_byte_s"] for one in many]),
        "first_byte_worst_s": max(one["first_byte_worst_s"] for one in many),
        "overhead_clients": few,
        "engine_tokens_per_s": bench.summary([engine for engine, _ in pairs]),
        "served_tokens_per_s": bench.summary([one["tokens_per_s"] for _, one in pairs]),
        "overhead": statistics.median(1 - one["tokens_per_s"] / engine for engine, one in pairs),
        "overheads": [round(1 - one["tokens_per_s"] / engine, 4) for engine, one in pairs],
    }


def content(number: int) -> str:
    """A sum, as the quickstart asks them."""
    return f"{number % 10}+{number // 10 % 10}+{number // 100 % 10}="


def make_model(folder: Path) -> None:
    """The quickstart's decoder and tokenizer, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from tidemill.models.tiny import make_config, make_tokenizer
    from tidemill.recipe import load as recipes

    tiny = recipes.load("quickstart-worked").config.model.tiny
    assert tiny is not None
    tokenizer = make_tokenizer(tiny)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make_config(tiny, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def engine_rate(folder: Path, clients: int, tokens: int, rounds: int) -> float:
    """The engine's own tokens per second, in a process like the server's: the same requests, without HTTP, text or
    sockets. A client asks again in the step in which it was answered, so the batch is as full as it can be."""
    import json
    import subprocess

    words = [sys.executable, "-m", "benchmarks.serve", str(folder), str(clients), str(tokens), str(rounds)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def alone(folder: Path, clients: int, tokens: int, rounds: int) -> float:
    from tidemill.rollout.engine import Completion, Request, Sampling
    from tidemill.run.serving import ServeOptions, make_engine
    from tidemill.run.trained import open_trained

    trained = open_trained(str(folder), "cpu")
    engine = make_engine(trained.loaded, trained.loaded.window, ServeOptions("").concurrent, None)
    encode = trained.loaded.tokenizer.encode

    def play(count: int) -> float:
        left, number = clients * (count - 1), 0

        def ask() -> None:
            nonlocal number
            how = Sampling(max_tokens=tokens, ignore_eos=True, seed=number)
            engine.submit(Request(number, encode(content(number)), how, on_done=again))
            number += 1

        def again(_: Completion) -> None:
            nonlocal left
            if left > 0:
                left -= 1
                ask()

        for _ in range(clients):
            ask()
        made, began = 0, time.perf_counter()
        while engine.has_work:
            made += sum(len(c.tokens) for c in engine.step())
        return made / (time.perf_counter() - began)

    play(1)
    return play(rounds)


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    print(alone(Path(folder), *map(int, numbers)))
