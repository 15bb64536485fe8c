"""`tidemill serve` on an accelerator under 512 streaming clients, beside the engine alone and `vllm serve`.

    PYTHONPATH=src python benchmarks/gpu_serve.py                # about two minutes on an H200; most is vLLM's start
    PYTHONPATH=src python benchmarks/gpu_serve.py --no-vllm      # about 50 s
    PYTHONPATH=src python benchmarks/gpu_serve.py --shape tiny --clients 32 --tokens 32 --no-vllm    # on a CPU

The model has the 1.5 B shape with random weights and a tokenizer that has a text for every token. Both servers start
at the same time and are measured one after the other, while the other one is idle; both are asked for the same tokens
at the same address by the same clients, which have processes of their own. A table and one JSON object come last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._gpu import DEVICE, FIGURES, LOG, ON_DEVICE, SIZES, TABLE, empty, model_of, row, say, section
from benchmarks._serve_load import ServerProcess, put_on

WINDOW = 1024
PROMPT = 64
PATH = "/v1/completions"
START_S = 300.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1.5b", choices=sorted(SIZES))
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers that each client asks for, one after the other")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--processes", type=int, default=8, help="of the clients")
    parser.add_argument("--no-vllm", action="store_true")
    return parser.parse_args()


def make_folder(shape: str, folder: Path) -> None:
    """Weights and a tokenizer, as both servers open them."""
    model = model_of(shape, WINDOW)
    model.config.use_cache = True
    model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id = 0, None, None
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer_of(SIZES[shape][0]).save_pretrained(folder)
    del model
    empty()


def tokenizer_of(vocabulary: int) -> Any:
    """Bytes, and made-up words for the rest: decoding a token costs what it costs with a real vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<eos>", *letters, *(f"Ġw{i}" for i in range(vocabulary - len(letters) - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def bodies(count: int, vocabulary: int) -> list[dict[str, Any]]:
    """Prompts that have nothing in common."""
    generator = torch.Generator().manual_seed(0)
    return [{"prompt": torch.randint(300, vocabulary, (PROMPT,), generator=generator).tolist()} for _ in range(count)]


def engine_alone(folder: Path, asked: list[dict[str, Any]], options: argparse.Namespace) -> list[float]:
    """The engine's own rate for what the clients ask, with each question asked in the step that its client's last
    answer came: no HTTP, no text, no sockets."""
    from tidemill.rollout.engine import Completion, Request, Sampling
    from tidemill.run.serving import make_engine
    from tidemill.run.trained import open_trained

    trained = open_trained(str(folder), str(DEVICE))
    engine = make_engine(trained.loaded, WINDOW, options.clients, options.clients * (PROMPT + options.tokens + 64))

    def play(rounds: int) -> float:
        left, number = options.clients * (rounds - 1), 0

        def ask() -> None:
            nonlocal number
            how = Sampling(max_tokens=options.tokens, ignore_eos=True, seed=number)
            engine.submit(Request(number, asked[number % len(asked)]["prompt"], how, on_done=again))
            number += 1

        def again(_: Completion) -> None:
            nonlocal left
            if left > 0:
                left -= 1
                ask()

        for _ in range(options.clients):
            ask()
        made, began = 0, time.perf_counter()
        while engine.has_work:
            made += sum(len(c.tokens) for c in engine.step())
        return made / (time.perf_counter() - began)

    play(1)
    return [play(options.rounds) for _ in range(options.repeats)]


def our_server(folder: Path, options: argparse.Namespace) -> ServerProcess:
    room = str(options.clients * (PROMPT + options.tokens + 64))
    words = [sys.executable, "-m", "tidemill", "serve", str(folder), "--name", "served", "--port", "0"]
    words += ["--device", str(DEVICE), "--concurrent", str(options.clients), "--cache-tokens", room]
    return ServerProcess(
        words, os.environ | {"PYTHONUNBUFFERED": "1"}, folder / "ours.log", says=r"(http://\S+)/v1 serves"
    )


def vllm_server(folder: Path, options: argparse.Namespace) -> ServerProcess:
    """Its defaults, with room for all clients at once, and without the statistics and the log that cost it time."""
    from tidemill import bench

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    words += ["--max-model-len", str(WINDOW), "--max-num-seqs", str(options.clients), "--disable-log-stats"]
    words += ["--gpu-memory-utilization", "0.4", "--disable-uvicorn-access-log"]
    environment = bench.peer_environment() | {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return ServerProcess(words, environment, folder / "vllm.log", asks=f"http://127.0.0.1:{port}")


def under_load(
    server: ServerProcess, asked: list[dict[str, Any]], options: argparse.Namespace
) -> list[dict[str, float]]:
    body = {
        "model": "served", "max_tokens": options.tokens, "ignore_eos": True, "stream": True, "temperature": 1.0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip

    def load(rounds: int) -> dict[str, float]:
        return put_on(
            server.address, body, asked, path=PATH, clients=options.clients, tokens=options.tokens, rounds=rounds,
            processes=options.processes,
        )  # fmt: skip

    load(1)
    return [load(options.rounds) for _ in range(options.repeats)]


def main() -> None:
    options = parsed()
    LOG.unlink(missing_ok=True)
    place = "/dev/shm" if ON_DEVICE else None
    with tempfile.TemporaryDirectory(prefix="tidemill-serve-", dir=place) as name:
        folder = Path(name)
        say(f"a model of shape {options.shape} is made")
        make_folder(options.shape, folder)
        asked = bodies(options.clients * options.rounds, SIZES[options.shape][0])
        servers = {"tidemill": our_server(folder, options)}
        if not options.no_vllm:
            servers["vllm"] = vllm_server(folder, options)
        try:
            for who in list(servers):
                with section(f"{who} starts"):
                    servers[who].wait(START_S)
                    say(f"{who} is ready")
            with section("the engine alone"):
                FIGURES["engine"] = engine_alone(folder, asked, options)
                empty()
                row("the engine alone, tokens/s", ", ".join(f"{rate:,.0f}" for rate in FIGURES["engine"]))
            for who, server in servers.items():
                with section(f"{who} under load"):
                    FIGURES[who] = under_load(server, asked, options)
                    for name_of in FIGURES[who][0]:
                        row(f"{who}: {name_of}", ", ".join(f"{one[name_of]:,.3g}" for one in FIGURES[who]))
        finally:
            for server in servers.values():
                server.end()
    tell(options)


def tell(options: argparse.Namespace) -> None:
    best = {who: max(one["tokens_per_s"] for one in FIGURES[who]) for who in ("tidemill", "vllm") if who in FIGURES}
    if "tidemill" in best and "engine" in FIGURES:
        row("share of the engine's rate", f"{best['tidemill'] / max(FIGURES['engine']):.3f} (wanted: 0.9)")
    if len(best) == 2:
        row("times vLLM", f"{best['tidemill'] / best['vllm']:.2f} (wanted: 2)")
    print("\n".join(f"{name:45} {value}" for name, value in TABLE))
    print(json.dumps({"clients": options.clients, "shape": options.shape, "figures": FIGURES}))


if __name__ == "__main__":
    main()
