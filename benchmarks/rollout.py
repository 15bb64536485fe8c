"""How fast each rollout engine makes tokens: `fixed` and `tail` workloads, several model shapes, peers beside us.

Both workloads have 64 prompts of 256 tokens with 8 samples each. `fixed` makes 512 tokens per sample; `tail` draws
lengths from a log-normal with median 330, at most 2048. A case that ends in `fp8` or `int8` serves 8-bit weights and
inputs (vLLM too: its own fp8). On a CPU one thread works and tokens are counted per
CPU-second, so that a busy machine does not decide; sizes are cut down as `SIZES` says.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._rollout_engines import ENGINES, VLLM, Roll, Shape, Work, native, vllm_job
from tidemill.bench import peer_environment
from tidemill.device import mapped
from tidemill.errors import ConfigError

ABOUT = "tokens per second of the native engine; peers: hf (generate), hf_batching (generate_batch), vllm"
OPTIONS = {"cases": "auto", "device": "auto", "deadline_s": 0}
# Who runs vLLM: this interpreter, or that of an environment of its own.
VLLM_PYTHON = os.environ.get("TIDEMILL_VLLM_PYTHON", "")
PEERS = {"hf": "transformers", "hf_batching": "transformers"} | dict.fromkeys(VLLM, "torch" if VLLM_PYTHON else "vllm")

# hidden, layers, heads, kv heads, head dim, intermediate, vocabulary, tied
SHAPES = {
    "quickstart": (128, 4, 4, 2, 32, 384, 96, True),
    "60m": (640, 10, 10, 2, 64, 1728, 32000, True),
    "0.5b": (896, 24, 14, 2, 64, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 128, 8960, 151936, True),
    "7b": (3584, 28, 28, 4, 128, 18944, 152064, False),
    "moe64": (2048, 12, 16, 4, 128, 768, 151936, True),
    "a3b": (2048, 12, 32, 4, 128, 768, 151936, False),  # Qwen3-30B-A3B with a quarter of its layers
    "moe": (256, 4, 4, 2, 64, 128, 8192, True),
    "q35": (2048, 24, 8, 2, 256, 6144, 248320, True),  # Qwen3.5-2B: three of four layers are gated delta nets
    "states": (256, 4, 4, 2, 64, 512, 8192, True),  # the same, small
    "dsv3": (7168, 3, 128, 128, 128, 2048, 129280, False),  # DeepSeek-V3 with one dense layer and two mixtures
}
# Of mixtures: how many experts a layer has, and how many a token uses; "intermediate" above is that of one expert.
EXPERTS = {"moe64": (64, 8), "a3b": (128, 8), "moe": (16, 4), "dsv3": (256, 8)}


@dataclass(frozen=True)
class Size:
    prompts: int = 64
    samples: int = 8
    prompt: int = 256
    response: int = 512
    median: int = 330
    longest: int = 2048


DELTA_NETS = {"q35": (16, 128), "states": (4, 32)}  # heads and their width
SIZES = {
    "quickstart": Size(prompts=32, prompt=128, response=128, median=82, longest=512),
    "60m": Size(prompts=8, prompt=128, response=64, median=41, longest=256),
    "moe": Size(prompts=8, prompt=128, response=64, median=41, longest=256),
    "states": Size(prompts=8, prompt=128, response=64, median=41, longest=256),
}
CPU_CASES = (
    "fixed-quickstart", "tail-quickstart", "fixed-60m", "tail-60m", "fixed-moe", "tail-moe", "fixed-states",
    "fixed-60m-int8",
)  # fmt: skip
GPU_CASES = (
    "fixed-0.5b", "tail-0.5b", "fixed-1.5b", "tail-1.5b", "fixed-7b", "tail-7b", "fixed-7b-fp8", "tail-7b-fp8",
    "fixed-moe64", "tail-moe64", "fixed-a3b", "tail-a3b", "fixed-dsv3", "tail-dsv3", "fixed-q35", "tail-q35",
)  # fmt: skip
TAIL_SIGMA = 0.8


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    device = _device(options["device"])
    names = options["cases"]
    names = (CPU_CASES if device == "cpu" else GPU_CASES) if names == "auto" else names
    names = list(names.split(",") if isinstance(names, str) else names)
    unknown = [name for name in names if name not in CPU_CASES + GPU_CASES]
    if unknown:
        raise ConfigError(f"there is no case {unknown[0]!r}", f"cases are {', '.join(CPU_CASES + GPU_CASES)}")
    apart = Apart(device, int(options["repeats"]), float(options["deadline_s"] or 0))
    cases: dict[str, Any] = {name: {"peers": {}} for name in names}
    with _asked_to_stop_politely(), suppress(KeyboardInterrupt):
        for engine in ("native", *options["peers"]):
            for shape, together in _by_shape(engine, names).items():
                for name, row in apart.measure(engine, shape, together).items():
                    (cases[name] if engine == "native" else cases[name]["peers"].setdefault(engine, {})).update(row)
    for case in cases.values():
        _add_floor(case)
    return {"cases": cases, "device": device, "clock": "cpu seconds" if device == "cpu" else "wall seconds"}


@contextmanager
def _asked_to_stop_politely() -> Iterator[None]:
    """SIGTERM is Ctrl-C: what was started is ended, and what was measured is shown."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = None
    with suppress(ValueError):  # only the main thread may
        before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _age_s() -> float:
    """How long this process has lived: starting and importing take their share of a deadline."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def _device(name: str) -> str:
    if name != "auto":
        return name
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _by_shape(engine: str, names: list[str]) -> dict[str, list[str]]:
    """Cases that one process measures."""
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(name.partition("-")[2] if engine in VLLM else name, []).append(name)
    return together


@dataclass
class Apart:
    """Measures in a process of its own, so that memory and warm-up are its own and a crash or a hang is one row."""

    device: str
    repeats: int
    deadline_s: float  # for everything since this process began; 0: none
    started: float = field(default_factory=lambda: time.perf_counter() - _age_s())
    is_stopped: bool = False  # from outside

    def measure(self, engine: str, shape: str, names: list[str]) -> dict[str, Any]:
        out = Path(os.environ.get("OUT") or tempfile.mkdtemp())
        result, log = out / f"rollout-{engine}-{shape}.json", out / f"rollout-{engine}-{shape}.log"
        result.unlink(missing_ok=True)
        spent = time.perf_counter() - self.started
        error = self._start(engine, names, result, log, self.deadline_s - spent if self.deadline_s else None)
        rows: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if engine in VLLM:
            rows = {name: _vllm_row(_work(name), row) for name, row in rows.items()}
        took = time.perf_counter() - self.started - spent
        for name in names:
            rows.setdefault(name, {"error": error})
            _say(f"{name:16} {engine:12} {_line(rows[name])}  (process {took:.0f} s)")
        if error and log.exists():
            _say(f"{error}; {log} ends with:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return rows

    def _start(self, engine: str, names: list[str], result: Path, log: Path, limit_s: float | None) -> str | None:
        """Run to the end or the limit; what went wrong, or None."""
        if self.is_stopped or (limit_s is not None and limit_s <= 0):
            return f"{engine} was not started: {'stopped before' if self.is_stopped else 'the deadline was over'}"
        words, env = self._command(engine, names, result)
        with log.open("w") as text:
            child = subprocess.Popen(words, stdout=text, stderr=subprocess.STDOUT, start_new_session=True, env=env)
        watch = None
        try:
            # Should this process be killed, its end of the pipe closes, and all that the child started ends too.
            watch = subprocess.Popen(
                ["sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "watch", str(child.pid)], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            code = child.wait(limit_s)
            return None if code == 0 else f"{engine} ended with exit status {code}"
        except subprocess.TimeoutExpired:
            return f"{engine} was stopped at the deadline"
        except KeyboardInterrupt:
            self.is_stopped = True
            return f"{engine} was stopped from outside"
        finally:
            with suppress(ProcessLookupError):  # processes it started too
                os.killpg(child.pid, signal.SIGKILL)
            if watch is not None:
                watch.kill()
                watch.communicate()
            child.wait()

    def _command(self, engine: str, names: list[str], result: Path) -> tuple[list[str], dict[str, str]]:
        if engine not in VLLM:
            words = ["--measure", engine, "--cases", ",".join(names), "--device", self.device]
            words += ["--repeats", str(self.repeats), "--result", str(result)]
            return [sys.executable, __file__, *words], dict(os.environ)
        works = {name: _work(name) for name in names}
        shape = _shape(names[0].split("-")[1], self.device, max(work.window for work in works.values()))
        job = result.with_suffix(".job")
        job.write_text(json.dumps(vllm_job(shape, works, self.repeats, _rounding(names[0]))))
        words = [VLLM_PYTHON or sys.executable, str(Path(__file__).with_name("_vllm_peer.py")), str(job), str(result)]
        return words, _vllm_environment(self.device) | VLLM[engine]


def _vllm_environment(device: str) -> dict[str, str]:
    """As vLLM is run alone: without what importing Tidemill set here for itself."""
    env = peer_environment()
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its just-in-time build needs a CUDA compiler
    if device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    return env


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _line(row: Mapping[str, Any]) -> str:
    if "tokens_per_s" not in row:
        return f"failed: {row['error']}"
    return f"{row['tokens_per_s']:,.0f} tokens/s, step {row['step_ms']:.2f} ms, start {row['start_s']:.1f} s"


def _add_floor(case: dict[str, Any]) -> None:
    """The floor is the machine's and the model's, so it is measured once, beside us."""
    for row in case["peers"].values():
        if "step_ms" in row and "floor_ms" in case:
            row["floor_ms"] = case["floor_ms"]
            row["share_of_floor"] = case["share_of_floor"] * row["tokens_per_s"] / case["tokens_per_s"]


def _rounding(name: str) -> str:
    """What a case serves its weights in."""
    return name.split("-")[2] if name.count("-") > 1 else "same"


def _work(name: str) -> Work:
    workload, shape = name.split("-")[:2]
    size, vocabulary = SIZES.get(shape, Size()), SHAPES[shape][6]
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, vocabulary, (size.prompts, size.prompt)).tolist()
    samples = (size.prompts, size.samples)
    if workload == "fixed":
        return Work(prompts, np.full(samples, size.response))
    drawn = np.exp(rng.normal(math.log(size.median), TAIL_SIGMA, samples))
    return Work(prompts, np.clip(drawn, 1, size.longest).astype(int))


def measure(engine: str, names: list[str], device: str, repeats: int, result: Path) -> None:
    """In this process; what is done is written down after each case."""
    if device == "cpu":
        torch.set_num_threads(1)
    works = {name: _work(name) for name in names}
    shape = _shape(names[0].split("-")[1], device, max(work.window for work in works.values()))
    # What 8 bits would take at best is not worked out.
    has_floor = engine == "native" and _rounding(names[0]) == "same"
    floors = {name: _floor_ms(shape, work) for name, work in works.items()} if has_floor else {}
    shape.model  # noqa: B018  before the clock starts
    started = time.perf_counter()
    make = partial(native, weights=_rounding(names[0])) if engine == "native" else ENGINES[engine]
    roll = make(shape, list(works.values()))
    start_s = time.perf_counter() - started
    rows: dict[str, Any] = {}
    for name, work in works.items():
        roll(work, True)  # warm up on a few tokens
        seconds, steps = zip(*(_timed(roll, work, device) for _ in range(repeats)))
        rows[name] = _row(work, np.array(seconds), np.array(steps))
        rows[name] |= {"start_s": start_s, "peak_gib": _peak_gib(device)}
        if name in floors:
            rows[name]["floor_ms"] = floors[name] / float(np.median(steps))
            rows[name]["share_of_floor"] = floors[name] / (float(np.median(seconds)) * 1e3)
        result.write_text(json.dumps(rows))


def _vllm_row(work: Work, row: dict[str, Any]) -> dict[str, Any]:
    seconds = np.array(row.pop("seconds"))
    return _row(work, seconds, np.full(len(seconds), work.lengths.max())) | row


def _row(work: Work, seconds: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
    tokens = work.tokens / seconds
    return {
        "tokens_per_s": float(np.median(tokens)),
        "spread": float((tokens.max() - tokens.min()) / np.median(tokens)),
        "step_ms": float(np.median(seconds / steps * 1e3)),
    }


def _timed(roll: Roll, work: Work, device: str) -> tuple[float, int]:
    # What was there before the run is not looked at again by the collector: an engine that makes many objects per token
    # would pay for everything this process has imported.
    gc.collect()
    gc.freeze()
    if device == "cpu":
        started = time.process_time()
        steps = roll(work, False)
        return time.process_time() - started, steps
    torch.accelerator.synchronize()
    started = time.perf_counter()
    steps = roll(work, False)
    torch.accelerator.synchronize()
    return time.perf_counter() - started, steps


def _peak_gib(device: str) -> float:
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # Of this process; where another holds the memory, what is taken of the device.
    free, everything = torch.accelerator.get_memory_info()
    own = torch.accelerator.max_memory_allocated() + mapped.most_bytes()
    return (own or everything - free) / 2**30


def _shape(name: str, device: str, window: int) -> Shape:
    from transformers import DeepseekV3Config, Qwen2Config, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

    if name == "dsv3":
        special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        hidden, layers, _, _, _, _, vocabulary, _ = SHAPES[name]
        window = max(window, 4096)
        config = DeepseekV3Config(
            num_hidden_layers=layers, first_k_dense_replace=1, max_position_embeddings=window, **special
        )
        assert (config.hidden_size, config.vocab_size) == (hidden, vocabulary)  # all else is the published model's
        return Shape(config, device)
    hidden, layers, heads, kv_heads, dim, inside, vocabulary, tied = SHAPES[name]
    kind: Any = Qwen3Config if name in SIZES else Qwen2Config
    more: dict[str, Any] = {}
    if name in DELTA_NETS:
        count, wide = DELTA_NETS[name]
        kind = Qwen3_5TextConfig
        more = {"linear_num_key_heads": count, "linear_num_value_heads": count}
        more |= {"linear_key_head_dim": wide, "linear_value_head_dim": wide}
    if name in EXPERTS:
        experts, used = EXPERTS[name]
        kind = Qwen3MoeConfig
        more = {"num_experts": experts, "num_experts_per_tok": used, "norm_topk_prob": True}
        more["moe_intermediate_size"] = inside
    config = kind(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, intermediate_size=inside, tie_word_embeddings=tied,
        max_position_embeddings=max(window, 4096), bos_token_id=None, eos_token_id=None, pad_token_id=0,
        **more,
    )  # fmt: skip
    return Shape(config, device)


# The floor: what bytes and arithmetic alone would take, summed over the steps of a perfect schedule.


def _floor_ms(shape: Shape, work: Work) -> float:
    config = shape.config
    layers, heads, kv_heads, dim = (
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )  # fmt: skip
    state = 0  # bytes that a sequence's delta nets read and write for one token
    if hasattr(config, "linear_num_value_heads"):
        nets = list(config.layer_types).count("linear_attention")
        layers -= nets
        state = 2 * 4 * nets * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    if hasattr(config, "kv_lora_rank"):  # a latent and a rotary key that all heads share
        kv_heads, dim = 1, (config.kv_lora_rank + config.qk_rope_head_dim) / 2
    named = dict(Shape(config, "meta").model.named_parameters())
    weights = sum(p.numel() for p in named.values())
    in_experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    used = weights - in_experts  # of the experts a token computes with some, but a step reads all
    if in_experts:
        used += (
            in_experts * config.num_experts_per_tok // (getattr(config, "num_experts", 0) or config.n_routed_experts)
        )
    width = shape.dtype.itemsize
    flops_per_s, bytes_per_s = _rates(shape.device, shape.dtype)
    prompt = len(work.prompts[0])
    total = 2 * used * prompt * len(work.prompts) / flops_per_s
    per_token = 2 * layers * kv_heads * dim * width
    lengths = work.lengths
    for step in range(int(lengths.max())):
        running = lengths > step
        rows = int(running.sum())
        # A group's prompt is read once; each sample reads what it made itself.
        cached = int(running.any(1).sum()) * prompt + rows * step
        flops = 2 * used * rows + 4 * layers * heads * dim * rows * (prompt + step)
        total += max(flops / flops_per_s, (weights * width + cached * per_token + rows * state) / bytes_per_s)
    return total * 1e3


def _rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Arithmetic and memory rates of this machine, measured."""
    n = 1024 if device == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    # Three times what the last cache level holds, or it would be measured instead of the memory.
    big = torch.zeros(2**27 if device == "cpu" else 2**31, dtype=torch.uint8, device=device)
    other = torch.zeros_like(big)

    clock = time.process_time if device == "cpu" else time.perf_counter

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            started = clock()
            work()
            if device != "cpu":
                torch.accelerator.synchronize()
            times.append(clock() - started)
        return min(times)

    return 2 * n**3 / best(lambda: a @ a), 2 * big.nbytes / best(lambda: other.copy_(big))


def ratio_table(result: Mapping[str, Any]) -> str:
    """Ours, each peer's, and how many times faster we are."""
    peers = sorted({peer for case in result["cases"].values() for peer in case["peers"]})
    lines = [f"{'tokens per second':18}{'native':>12}" + "".join(f"{peer:>14}{'ratio':>8}" for peer in peers)]
    for name, case in result["cases"].items():
        cells = [f"{name:18}{case.get('tokens_per_s', math.nan):>12,.0f}"]
        for peer in peers:
            theirs = case["peers"].get(peer, {}).get("tokens_per_s", math.nan)
            cells.append(f"{theirs:>14,.0f}{case.get('tokens_per_s', math.nan) / theirs:>7.2f}x")
        lines.append("".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object, last on standard output")
    parser.add_argument("--cases", default="auto", help=f"some of {', '.join(CPU_CASES + GPU_CASES)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline-s", type=float, default=0, help="stop what still runs after this long")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    if options["measure"]:
        measure(
            options["measure"], options["cases"].split(","), options["device"], options["repeats"],
            Path(options["result"]),
        )  # fmt: skip
        return
    options["peers"] = [peer for peer in options["peers"].split(",") if peer]
    result = run(options)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "rollout.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options["json"] else ratio_table(result))


if __name__ == "__main__":
    main()
