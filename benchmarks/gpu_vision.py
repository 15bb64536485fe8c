"""Rolls out and learns a model of Qwen2.5-VL-3B's shape: 64 prompts × 8 samples, each prompt with a 448 × 448 image.

    PYTHONPATH=SITE:src python benchmarks/gpu_vision.py                      # about 90 s on an H200
    PYTHONPATH=src python benchmarks/gpu_vision.py --shape tiny --groups 2   # tries it on a CPU

Random bfloat16 weights. Prompts are 256 tokens of image and 64 of text, responses 256. Work is counted as it must
be done: 6 operations for each parameter and token of the decoder, the same of the tower and its patches, and attention.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._gpu import DEVICE, FIGURES, begin, finish, report, row, section, settings, time_update, wait

IMAGE_TOKEN = {"3b": 151655, "tiny": 499}
TEXT: dict[str, dict[str, Any]] = {
    "3b": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2},
    "tiny": {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
TOWER: dict[str, dict[str, Any]] = {
    "3b": {"hidden_size": 1280, "depth": 32, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 2048,
           "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    "tiny": {"hidden_size": 32, "depth": 2, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 64,
             "window_size": 56, "fullatt_block_indexes": [1]},
}  # fmt: skip
SECTIONS = {"3b": [16, 24, 24], "tiny": [2, 3, 3]}
SIDE, PATCH, WORDS = 448, 14, 64


def model_of(shape: str) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tidemill.models.attention import registry as attention
    from tidemill.models.vision.eyes.find import give_eyes
    from tidemill.models.vision.views.find import view_of

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS[shape]}
    text = {**TEXT[shape], "rope_parameters": rope, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    vision = {**TOWER[shape], "patch_size": PATCH, "spatial_merge_size": 2}
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN[shape],
        video_token_id=-1, vision_start_token_id=-1, vision_end_token_id=-1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForImageTextToText.from_config(
            config, attn_implementation=attention.ours(config), dtype=torch.bfloat16
        )
    words = SimpleNamespace(convert_ids_to_tokens=lambda _: "<image>")
    give_eyes(model, view_of(config.to_dict(), words, {}))
    return model.eval()


def prompts_of(shape: str, groups: int, side: int) -> list[tuple[list[int], Any]]:
    from tidemill.tiles import Tile

    rng = np.random.default_rng(0)
    count = (side // PATCH // 2) ** 2
    found = []
    for _ in range(groups):
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        words = rng.integers(3, min(TEXT[shape]["vocab_size"], IMAGE_TOKEN[shape]), WORDS).tolist()
        found.append(([IMAGE_TOKEN[shape]] * count + words, (Tile(pixels, 0, count),)))
    return found


def rollout(model: Any, prompts: list[Any], each: int, response: int) -> tuple[list[Any], float]:
    """What was made, and the seconds of the second of two rounds. Graphs are captured before."""
    from benchmarks._rollout_engines import captured
    from tidemill.rollout.engine import Request, Sampling

    engine = captured(model, max_seqs=len(prompts) * each, max_len=len(prompts[0][0]) + response)
    done: list[Any] = []
    for which in range(2):
        engine.load(None, which)  # other weights, as far as kept features know
        wait()
        began, done = time.perf_counter(), []
        for i, (tokens, tiles) in enumerate(prompts):
            how = Sampling(max_tokens=response, ignore_eos=True)
            engine.submit(Request(which * 1000 + i, tokens, how, n=each, tiles=tiles))
        while engine.has_work:
            done += engine.step()
        wait()
        spent = time.perf_counter() - began
    wrong = next((c for c in done if c.finish == "error"), None)
    assert wrong is None, wrong
    return sorted(done, key=lambda c: (c.request.id, c.index)), spent


def batch_of(done: list[Any], each: int) -> Any:
    from tidemill import tiles
    from tidemill.batch import Batch, Column

    rng = np.random.default_rng(1)
    shown = tiles.columns([done[i].request.tiles for i in range(0, len(done), each)])
    rows = np.repeat(np.arange(len(done) // each), each)
    return Batch(
        {
            "id": np.arange(len(done)),
            "group": rows,
            "tokens": Column.jagged([[*c.request.prompt, *c.tokens] for c in done], np.int32),
            "prompt_length": np.array([len(c.request.prompt) for c in done], np.int32),
            "mask": Column.jagged([np.ones(len(c.tokens)) for c in done], np.uint8),
            "logprobs": Column.jagged([c.logprobs for c in done], np.float32),
            "advantages": rng.normal(size=len(done)).astype(np.float32),
            **{name: column.grouped(rows) for name, column in shown.items()},
        }
    )


def work_of(model: Any, groups: int, each: int, prompt: int, response: int, side: int) -> float:
    """Operations of forward and backward that must be done: a group's prompt and image once."""
    text, tower = model.config.text_config, model.model.visual
    seen = sum(p.numel() for p in tower.parameters())
    parameters = sum(p.numel() for p in model.parameters()) - seen
    samples, patches = groups * each, (side // PATCH) ** 2
    tokens = groups * prompt + samples * response
    pairs = samples * ((prompt + response) ** 2 - prompt**2) / 2 + groups * prompt**2 / 2
    decoder = 6 * parameters * tokens + 12 * text.num_hidden_layers * text.hidden_size * pairs
    return decoder + groups * patches * 6 * seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="3b", choices=list(TEXT))
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--response", type=int, default=256)
    chosen = parser.parse_args()
    begin()
    groups, each, response = chosen.groups, chosen.each, chosen.response
    side = SIDE if chosen.shape == "3b" else 56
    if chosen.shape == "tiny":
        torch.set_num_threads(1)
        response = 8
    model = model_of(chosen.shape)
    prompts = prompts_of(chosen.shape, groups, side)
    done: list[Any] = []
    spent = 0.0
    with section("rollout"):
        done, spent = rollout(model, prompts, each, response)
        made = sum(len(c.tokens) for c in done)
        FIGURES["rollout"] = {"tokens_per_s": made / spent, "seconds": spent}
        row("rollout", f"{made / spent:,.0f} tokens/s, {spent:.2f} s")
    with section("learn"):
        if chosen.shape == "tiny":
            model = model.float()
        batch = batch_of(done, each)
        lengths = (len(prompts[0][0]), response)
        config = settings(16384, groups, each, lengths)
        config = config.model_copy(update={"data": config.data.model_copy(update={"images": None})})
        part = batch.gather(np.arange(min(len(done), 4 * each)))
        figures = time_update(model, config, batch, [part, batch])
        report("learn", figures, work_of(model, groups, each, *lengths, side))
        whole = spent + figures["step_s"]
        tokens = batch.rows * sum(lengths) / whole
        FIGURES["step"] = {"seconds": whole, "tokens_per_s": tokens}
        row("whole GRPO step", f"{whole:.2f} s, {tokens:,.0f} tokens/s")
    finish("vision", "learn")


if __name__ == "__main__":
    main()
