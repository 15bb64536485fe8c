"""Run folders written for the tests: as a run writes them, of any length, without training anything."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path

SAMPLES = 4  # of a step, two groups of two


def metrics(step: int, lr: float = 1e-5) -> dict[str, float]:
    return {
        "step": step,
        "reward": round(1 - math.exp(-step / 40), 4),
        "reward/exact": round(1 - math.exp(-step / 40), 4),
        "accuracy": round(1 - math.exp(-step / 30), 4),
        "response_tokens": 16.0,
        "entropy": 2.0,
        "old_kl": 1e-5,
        "clip_share_low": 0.0,
        "grad_norm": 0.5,
        "equal_reward_groups": 0.1,
        "mismatch/native/mean": 1e-6,
        "lr": lr,
        "version": step,
        "tokens_per_s": 1000.0,
        "time/rollout": 0.6,
        "time/learn": 0.3,
        "time/step": 1.0,
        "idle/rollout": 0.4,
        "machine/host_memory_peak": 1e9,
        "machine/host_memory_peak/actor": 9e8,
        "machine/host_memory_peak/rollout": 6e8,
        "machine/roofline/learn": 0.4,
        "machine/queue_s/learn": 0.05,
        "machine/weight_bytes": 5e6,
    }


def samples(step: int) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "id": step * SAMPLES + i,
            "group": step * 2 + i // 2,
            "prompt": f"{step}+{i // 2}=",
            "response": f'answer {step + i} of "step {step}"',
            "answer": str(step + i // 2),
            "reward": round((step * 7 + i * 3) % 11 / 10, 2),
            "rewards": {"exact": 1.0},
            "correct": i % 2 == 0,
            "finish": "stop",
            "versions": [step - 1],
            "tokens": [1, 2, 3, 4],
            **({"mask": [1, 0, 0, 1], "token_versions": [step - 1, step - 1, step, step]} if i % 2 else {}),
        }
        for i in range(SAMPLES)
    ]


def notes(step: int) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "id": step * SAMPLES + i,
            "logprobs": [-0.1, -1.0, -3.0, -0.5],
            "ratio": [1.0, 1.2, 0.8, 1.0],
            "advantages": [0.5 - i % 2] * 4,
            "images": [IMAGE],
        }
        for i in range(SAMPLES)
    ]


EPOCH = 1_790_000_000.0
SPANS = {  # of a step
    "driver": [("step", 0.0, 1.0)],
    "learner-0": [("learn", 0.62, 0.9), ("publish", 0.9, 0.95)],
    "reward-0": [("reward", 0.2, 0.61)],
    "rollout-0": [("rollout", 0.0, 0.6)],
    "rollout-1": [("rollout", 0.0, 0.4), ("rollout", 0.45, 0.5)],
}


def spans(worker: str, step: int) -> list[dict[str, object]]:
    at, more = EPOCH + step, {"step": step} if worker == "driver" else {}
    return [{"what": what, "start": at + begin, "end": at + end, **more} for what, begin, end in SPANS[worker]]


IMAGE = f"{7:032x}.png"
WORDS = ("<unk>", "one", "two", "three", "four")
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"},
}


def png(wide: int, high: int) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = zlib.compress((b"\0" + b"\x20\x90\xc0" * wide) * high)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def append(run: Path, first: int, last: int, lr: float = 1e-5) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(metrics(step, lr)) + "\n" for step in range(first, last + 1))
    for name, made in (("samples", samples), ("tokens", notes)):
        with (run / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(s) + "\n" for step in range(first, last + 1) for s in made(step))
    (run / "timeline").mkdir(exist_ok=True)
    for worker in SPANS:
        with (run / "timeline" / f"{worker}.jsonl").open("a") as file:
            file.writelines(json.dumps(s) + "\n" for step in range(first, last + 1) for s in spans(worker, step))


def run(root: Path, name: str = "one", steps: int = 50, *, lr: float = 1e-5, is_over: bool = True) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    config = f"name: {name}\nabout: sums\ntrain: {{steps: {steps}}}\nalgorithm: {{name: grpo}}\nlearn: {{lr: {lr}}}\n"
    (folder / "config.yaml").write_text(config)
    append(folder, 1, steps, lr)
    for name, data in ((f"images/{IMAGE}", png(24, 16)), ("model/tokenizer.json", json.dumps(TOKENIZER).encode())):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    if is_over:
        (folder / "summary.json").write_text(json.dumps({"steps": steps, "is_stopped": False}))
    checkpoint = folder / "checkpoints" / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    about = {"step": steps, "best": True, "metric": 0.5, "files": {"a": {"bytes": 1000}}}
    (checkpoint / "manifest.json").write_text(json.dumps(about))
    return folder
