"""What the accelerator scripts of the learner share: a log, guarded sections, models of published shapes, the job."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

TABLE: list[tuple[str, str]] = []
FIGURES: dict[str, Any] = {}
LOG = Path(os.environ.get("OUT", ".")) / f"{Path(sys.argv[0]).stem}.log"
STARTED = time.perf_counter()
DATA_SHEET = 989e12
GIB = 2**30
PROMPT, RESPONSE, EACH = 256, 512, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_DEVICE = DEVICE.type != "cpu"
# vocabulary, hidden, intermediate, layers, heads, key/value heads, head dimension, tied head
SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "1.5b": (151936, 1536, 8960, 28, 12, 2, 128, True),
    "7b": (152064, 3584, 18944, 28, 28, 4, 128, False),
    "32b": (152064, 5120, 27648, 64, 40, 8, 128, False),
    "tiny": (500, 256, 512, 4, 4, 2, 64, True),
}


def without_pydantic() -> None:
    """A machine without pydantic gets classes that keep defaults and check nothing: enough to build settings here."""
    stand_in: Any = types.ModuleType("pydantic")

    class BaseModel:
        def __init__(self, **given: Any) -> None:
            for kind in reversed(type(self).__mro__):
                for name in vars(kind).get("__annotations__", {}):
                    if name in vars(kind):
                        setattr(self, name, vars(kind)[name])
            for name, value in given.items():
                setattr(self, name, value)

        def model_copy(self, update: dict[str, Any]) -> Any:
            return type(self)(**{**vars(self), **update})

    stand_in.BaseModel = BaseModel
    stand_in.ConfigDict = dict
    stand_in.Field = lambda default=None, **_: default
    stand_in.model_validator = stand_in.field_validator = lambda **_: lambda function: function
    sys.modules["pydantic"] = stand_in


def say(text: str) -> None:
    line = f"[{time.perf_counter() - STARTED:6.1f}s] {text}"
    print(line, flush=True)
    with LOG.open("a") as log:
        log.write(line + "\n")


def row(name: str, value: str) -> None:
    TABLE.append((name, value))
    say(f"{name}: {value}")


@contextmanager
def section(name: str) -> Iterator[None]:
    say(f"== {name}")
    try:
        yield
    except Exception:
        row(name, "FAILED")
        say(traceback.format_exc()[-3000:])
    empty()


def empty() -> None:
    gc.collect()
    if ON_DEVICE:
        torch.accelerator.empty_cache()


def wait() -> None:
    if ON_DEVICE:
        torch.accelerator.synchronize()


def peak_gib() -> float:
    return torch.accelerator.max_memory_allocated() / GIB if ON_DEVICE else 0.0


def is_late(name: str, limit_s: float) -> bool:
    late = time.perf_counter() - STARTED > limit_s
    if late:
        row(name, "skipped: out of time")
    return late


def seconds(work: Callable[[], Any], times: int = 3, warm: int = 1) -> float:
    for _ in range(warm):
        work()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - started) / times


def settings(
    micro: int, groups: int = 64, each: int = EACH, lengths: tuple[int, int] = (PROMPT, RESPONSE), **learn: Any
) -> Any:
    from tidemill.recipe.config import AlgorithmSettings, Config, Data, Learn, ModelSettings, Rollout, Train

    return Config(
        algorithm=AlgorithmSettings(name="grpo", aggregation="sample_mean"),
        data=Data(max_prompt_tokens=lengths[0]),
        rollout=Rollout(max_new_tokens=lengths[1]),
        train=Train(tokens_per_microbatch=micro, prompts_per_step=groups, samples_per_prompt=each),
        model=ModelSettings(dtype="bfloat16"),
        learn=Learn(lr=1e-6, **learn),
    )


def model_of(shape: str, window: int = 4096) -> Any:
    """Random bfloat16 weights, made on the device."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tidemill.models.attention import registry as attention

    vocabulary, hidden, intermediate, layers, heads, kv_heads, dim, tied = SIZES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, tie_word_embeddings=tied,
        max_position_embeddings=window,
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    model.config.use_cache = False
    return model.eval()


def predicted_gib(model: Any, config: Any, parameters: int) -> float:
    """What `tidemill doctor` would say, without the rollout's cache: there is none here."""
    from tidemill.estimate.memory import memory
    from tidemill.models.shape import parse

    shape = parse(model.config.to_dict())
    assert shape is not None
    needed = memory(config, shape, parameters, on_accelerator=True)
    assert needed is not None
    return (needed.total - needed.cache) / GIB


def job(groups: int, vocabulary: int, each: int = EACH, prompt: int = PROMPT, response: int = RESPONSE) -> Any:
    from tidemill.batch import Batch, Column

    rng = np.random.default_rng(0)
    tokens, count = [], groups * each
    for _ in range(groups):
        shared = rng.integers(3, vocabulary, prompt)
        tokens += [np.concatenate([shared, rng.integers(3, vocabulary, response)]) for _ in range(each)]
    return Batch(
        {
            "id": np.arange(count),
            "group": np.repeat(np.arange(groups), each),
            "tokens": Column.jagged(tokens, np.int32),
            "prompt_length": np.full(count, prompt, np.int32),
            "mask": Column.jagged([np.ones(response)] * count, np.uint8),
            "logprobs": Column.jagged([np.full(response, -np.log(vocabulary))] * count, np.float32),
            "advantages": rng.normal(size=count).astype(np.float32),
        }
    )


def work_of(model: Any, samples: int, groups: int, share: bool, parameters: int) -> tuple[int, float]:
    """Tokens computed, and the arithmetic that must be done for them: 6·N·T and causal attention, no recompute."""
    c = model.config
    width = c.num_attention_heads * c.head_dim
    whole, prompt = PROMPT + RESPONSE, PROMPT
    tokens = groups * prompt + samples * RESPONSE if share else samples * whole
    pairs = samples * (whole**2 - prompt**2) / 2 + (groups if share else samples) * prompt**2 / 2
    return tokens, 6 * parameters * tokens + 12 * c.num_hidden_layers * width * pairs


def parameters_of(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def as_loaded(model: Any) -> None:
    """Whatever the variant before did to the model, undone."""
    from tidemill.learn import layers
    from tidemill.models import lora

    layers.undo(model)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    lora.detach(model)
    for p in model.parameters():
        p.grad = None
    empty()


def time_update(model: Any, config: Any, batch: Any, warm: list[Any]) -> dict[str, float]:
    """Seconds and peak of one update of `batch`, after one update of each batch in `warm`."""
    from tidemill.algorithms.shared.registry import get
    from tidemill.learn.engine import Learner

    parameters = parameters_of(model)
    learner = Learner(model, config, get("grpo"), 100)
    try:
        before = time.perf_counter()
        for i, part in enumerate(warm):
            learner.accumulate(part)
            learner.update()
            wait()
            if i == 0:
                ready = time.perf_counter() - before
        if ON_DEVICE:
            torch.accelerator.reset_peak_memory_stats()
        started = time.perf_counter()
        learner.accumulate(batch)
        asked = time.perf_counter() - started
        wait()
        added = time.perf_counter() - started
        learner.update()
        wait()
        spent = time.perf_counter() - started
    finally:
        learner.gradients.close()
    return {
        "step_s": spent, "accumulate_s": added, "host_s": asked, "update_s": spent - added, "first_s": ready,
        "peak_gib": peak_gib(), "predicted_gib": predicted_gib(model, config, parameters),
        "samples_per_s": batch.rows / spent, "tokens_per_s": int(batch["tokens"].lengths.sum()) / spent,
    }  # fmt: skip


def report(name: str, figures: dict[str, float], flops: float | None = None) -> None:
    if flops is not None:
        rate = flops / figures["step_s"]
        figures["mfu_data_sheet"] = rate / DATA_SHEET
        figures["mfu_measured"] = rate / 1e12 / FIGURES.get("matmul_tflops", DATA_SHEET / 1e12)
    FIGURES[name] = {k: round(v, 4) for k, v in figures.items()}
    speed = f", MFU {figures['mfu_data_sheet']:.1%} ({figures['mfu_measured']:.1%} of measured)" if flops else ""
    peak = figures["peak_gib"]
    off = f" ({figures['predicted_gib'] / peak - 1:+.1%})" if peak else ""
    row(
        name,
        f"{figures['step_s']:.2f} s (update {figures['update_s'] * 1e3:.0f} ms, host {figures['host_s']:.2f} s, first "
        f"{figures['first_s']:.1f} s), {figures['tokens_per_s']:,.0f} tokens/s{speed}, peak {peak:.1f} GiB, "
        f"predicted {figures['predicted_gib']:.1f}{off}",
    )


def finish(bench: str, best: str = "") -> None:
    import json

    print("\n" + "\n".join(f"{name:60s} {value}" for name, value in TABLE))
    off = [
        abs(f["predicted_gib"] / f["peak_gib"] - 1)
        for f in FIGURES.values()
        if isinstance(f, dict) and f.get("peak_gib")
    ]
    if off:
        print(f"memory estimate: worst {max(off):.1%} off, mean {sum(off) / len(off):.1%}, {len(off)} cases")
    spent = time.perf_counter() - STARTED
    print(json.dumps({"bench": bench, **FIGURES.get(best, {}), "seconds": spent, "all": FIGURES}))


def begin() -> None:
    try:
        import pydantic  # noqa: F401
    except ImportError:
        without_pydantic()
    LOG.unlink(missing_ok=True)
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if ON_DEVICE else 'cpu'}")
