"""How fast each rollout engine makes tokens: `fixed` and `tail` workloads, several model shapes, peers beside us.

Both workloads have 64 prompts of 256 tokens with 8 samples each. `fixed` makes 512 tokens per sample; `tail` draws
lengths from a log-normal with median 330, at most 2048. On a CPU one thread works and tokens are counted per
CPU-second, so that a busy machine does not decide; sizes are cut down as `SIZES` says.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ABOUT = "tokens per second of the native engine; peers: hf (generate), hf_batching (generate_batch), vllm"
OPTIONS = {"cases": "auto", "device": "auto"}
PEERS = {"hf": "transformers", "hf_batching": "transformers", "vllm": "vllm"}

# hidden, layers, heads, kv heads, head dim, intermediate, vocabulary, tied
SHAPES = {
    "quickstart": (128, 4, 4, 2, 32, 384, 96, True),
    "60m": (640, 10, 10, 2, 64, 1728, 32000, True),
    "0.5b": (896, 24, 14, 2, 64, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 128, 8960, 151936, True),
    "7b": (3584, 28, 28, 4, 128, 18944, 152064, False),
}


@dataclass(frozen=True)
class Size:
    prompts: int = 64
    samples: int = 8
    prompt: int = 256
    response: int = 512
    median: int = 330
    longest: int = 2048


SIZES = {
    "quickstart": Size(prompts=32, prompt=128, response=128, median=82, longest=512),
    "60m": Size(prompts=8, prompt=128, response=64, median=41, longest=256),
}
CPU_CASES = ("fixed-quickstart", "tail-quickstart", "fixed-60m", "tail-60m")
GPU_CASES = ("fixed-0.5b", "tail-0.5b", "fixed-1.5b", "tail-1.5b", "fixed-7b", "tail-7b")
TAIL_SIGMA = 0.8


@dataclass(frozen=True)
class Work:
    """What is asked: prompts, samples of each, and how long every response is."""

    prompts: list[list[int]]
    lengths: np.ndarray  # (prompts, samples)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def window(self) -> int:
        return len(self.prompts[0]) + int(self.lengths.max())


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    device = _device(options["device"])
    names = options["cases"]
    names = (CPU_CASES if device == "cpu" else GPU_CASES) if names == "auto" else names
    names = names.split(",") if isinstance(names, str) else names
    cases = {name: _case(name, device, options["peers"], int(options["repeats"])) for name in names}
    return {"cases": cases, "device": device, "clock": "cpu seconds" if device == "cpu" else "wall seconds"}


def _device(name: str) -> str:
    if name != "auto":
        return name
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _case(name: str, device: str, peers: list[str], repeats: int) -> dict[str, Any]:
    workload, shape = name.split("-")
    size = SIZES.get(shape, Size())
    work = _work(workload, size, SHAPES[shape][6])
    result = _apart(_measure, "native", shape, work, device, repeats)
    measured = {peer: _apart(_measure, peer, shape, work, device, repeats) for peer in peers}
    return {**result, "peers": measured}


def _work(workload: str, size: Size, vocabulary: int) -> Work:
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, vocabulary, (size.prompts, size.prompt)).tolist()
    shape = (size.prompts, size.samples)
    if workload == "fixed":
        return Work(prompts, np.full(shape, size.response))
    drawn = np.exp(rng.normal(math.log(size.median), TAIL_SIGMA, shape))
    return Work(prompts, np.clip(drawn, 1, size.longest).astype(int))


def _apart(function: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own, so that memory and warm-up are its own. An accelerator's context cannot be forked."""
    if args[3] != "cpu":
        return function(*args)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function(*args)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{args[0]} ended without a result; what it said is above") from None
    finally:
        process.join()


def _measure(engine: str, shape: str, work: Work, device: str, repeats: int) -> dict[str, Any]:
    if device == "cpu":
        torch.set_num_threads(1)
    model = _model(shape, device, work.window)
    floor = _floor_ms(model, shape, work, device)
    started = time.perf_counter()
    roll = ENGINES[engine](model, work)
    start_s = time.perf_counter() - started
    roll(True)  # warm up on a few tokens
    seconds, steps = zip(*(_timed(roll, device) for _ in range(repeats)))
    tokens = work.tokens / np.array(seconds)
    step_ms = float(np.median(np.array(seconds) / np.array(steps) * 1e3))
    return {
        "tokens_per_s": float(np.median(tokens)),
        "spread": float((tokens.max() - tokens.min()) / np.median(tokens)),
        "step_ms": step_ms,
        "floor_ms": floor / np.median(steps),
        "share_of_floor": floor / (float(np.median(seconds)) * 1e3),
        "start_s": start_s,
        "peak_gib": _peak_gib(device),
    }


def _timed(roll: Callable[[bool], int], device: str) -> tuple[float, int]:
    if device == "cpu":
        started = time.process_time()
        steps = roll(False)
        return time.process_time() - started, steps
    torch.accelerator.synchronize()
    started = time.perf_counter()
    steps = roll(False)
    torch.accelerator.synchronize()
    return time.perf_counter() - started, steps


def _peak_gib(device: str) -> float:
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.accelerator.max_memory_allocated() / 2**30


def _model(shape: str, device: str, window: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    import tidemill.models.attention  # noqa: F401  registers the attention

    hidden, layers, heads, kv_heads, dim, inside, vocabulary, tied = SHAPES[shape]
    kind = Qwen3Config if shape in SIZES else Qwen2Config
    config = kind(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, intermediate_size=inside, tie_word_embeddings=tied,
        max_position_embeddings=max(window, 4096), bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="tidemill", dtype=torch.float32 if device == "cpu" else torch.bfloat16
        )
    return model.eval()


# Engines: each gives a function that does the work (or a little of it) and says how many steps it took.


def _native(model: Any, work: Work) -> Callable[[bool], int]:
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.engine import NativeEngine

    engine = NativeEngine(model, eos_ids=[], max_seqs=work.lengths.size, max_len=work.window)

    def roll(brief: bool) -> int:
        for i, prompt in enumerate(work.prompts):
            limits = np.minimum(work.lengths[i], 3 if brief else 1 << 30).tolist()
            engine.submit(Request(i, prompt, Sampling(), n=len(limits), limits=limits))
        steps = made = 0
        while engine.has_work:
            made += sum(len(completion.tokens) for completion in engine.step())
            steps += 1
        assert brief or made == work.tokens
        return steps

    return roll


def _hf(model: Any, work: Work) -> Callable[[bool], int]:
    from transformers import StoppingCriteria, StoppingCriteriaList

    samples = work.lengths.shape[1]
    device = next(model.parameters()).device
    ids = torch.tensor(work.prompts, device=device).repeat_interleave(samples, 0)
    ends = torch.tensor(work.lengths.ravel() + ids.shape[1], device=device)

    class AtItsLength(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] >= ends

    def roll(brief: bool) -> int:
        model.set_attn_implementation("sdpa")
        longest = 3 if brief else int(work.lengths.max())
        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=longest,
                stopping_criteria=StoppingCriteriaList([AtItsLength()]), pad_token_id=0,
            )  # fmt: skip
        return longest

    return roll


def _hf_batching(model: Any, work: Work) -> Callable[[bool], int]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation("paged|sdpa")
    blocks = -(-(work.window + 32) // 32) * work.lengths.size
    settings = ContinuousBatchingConfig(num_blocks=blocks, block_size=32, max_batch_tokens=1024)

    def roll(brief: bool) -> int:
        generation = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings, block=True
        ) as manager:
            left = 0
            for i, prompt in enumerate(work.prompts):
                for length in work.lengths[i].tolist():
                    manager.add_request(prompt, max_new_tokens=min(length, 3) if brief else length)
                    left += 1
            while left:
                result = manager.get_result(timeout=1)
                left -= result is not None and result.is_finished()
        return 3 if brief else int(work.lengths.max())

    return roll


def _vllm(model: Any, work: Work) -> Callable[[bool], int]:
    import tempfile

    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=work.window + 1, max_num_seqs=work.lengths.size, seed=0)

    def roll(brief: bool) -> int:
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in work.prompts for _ in work.lengths[0]]
        lengths = np.minimum(work.lengths.ravel(), 3 if brief else 1 << 30).tolist()
        how = [SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0) for length in lengths]
        llm.generate(prompts, how, use_tqdm=False)
        return 3 if brief else int(work.lengths.max())

    return roll


ENGINES = {"native": _native, "hf": _hf, "hf_batching": _hf_batching, "vllm": _vllm}


# The floor: what bytes and arithmetic alone would take, summed over the steps of a perfect schedule.


def _floor_ms(model: Any, shape: str, work: Work, device: str) -> float:
    _, layers, heads, kv_heads, dim, *_ = SHAPES[shape]
    weights = sum(p.numel() for p in model.parameters())
    width = next(model.parameters()).element_size()
    flops_per_s, bytes_per_s = _rates(device, next(model.parameters()).dtype)
    prompt = len(work.prompts[0])
    total = 2 * weights * prompt * len(work.prompts) / flops_per_s
    per_token = 2 * layers * kv_heads * dim * width
    lengths = work.lengths
    for step in range(int(lengths.max())):
        running = lengths > step
        rows = int(running.sum())
        # A group's prompt is read once; each sample reads what it made itself.
        cached = int(running.any(1).sum()) * prompt + rows * step
        flops = 2 * weights * rows + 4 * layers * heads * dim * rows * (prompt + step)
        total += max(flops / flops_per_s, (weights * width + cached * per_token) / bytes_per_s)
    return total * 1e3


def _rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Arithmetic and memory rates of this machine, measured."""
    n = 1024 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    # Three times what the last cache level holds, or it would be measured instead of the memory.
    big = torch.zeros(2**27 if device == "cpu" else 2**31, dtype=torch.uint8, device=device)
    other = torch.zeros_like(big)

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            work()
            if device != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    return 2 * n**3 / best(lambda: a @ a), 2 * big.nbytes / best(lambda: other.copy_(big))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object, last on standard output")
    parser.add_argument("--cases", default="auto", help=f"some of {', '.join(CPU_CASES + GPU_CASES)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=3)
    options = vars(parser.parse_args())
    options["peers"] = [peer for peer in options["peers"].split(",") if peer]
    result = run(options)
    if options["json"]:
        print(json.dumps(result))
        return
    for name, case in result["cases"].items():
        for who, row in {"native": case, **case["peers"]}.items():
            print(f"{name:18} {who:12} " + " ".join(f"{k} {v:.3g}" for k, v in row.items() if k != "peers"))


if __name__ == "__main__":
    sys.exit(main())
