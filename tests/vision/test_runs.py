"""Images through the whole flow: data, dock, rollout, turns, learner, checkpoint, export."""

import json

import numpy as np
import pytest

import tidemill
from tidemill.run import trained

pytest.importorskip("PIL")

EYES = {"size": 24, "patch": 4, "hidden": 32, "layers": 2, "heads": 2, "intermediate": 48}
SHAPE = {"hidden": 48, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 128}
ALPHABET = "abcdefghijklmnopqrstuvwxyzH?0123456789 "
COUNTING = {"source": "shapes", "args": {"tasks": ["count"], "size": 24, "most": 3, "cells": 3}}


def recipe(folder, **more) -> dict:
    return {
        "folder": str(folder),
        "name": "run",
        "threads": 1,
        "model": {"tiny": {**SHAPE, "architecture": "qwen2_5_vl", "alphabet": ALPHABET, "vision": EYES}},
        "data": {**COUNTING, "max_prompt_tokens": 64},
        "rewards": "exact",
        "rollout": {"max_new_tokens": 3},
        "train": {"steps": 2, "prompts_per_step": 8, "samples_per_prompt": 4},
        "learn": {"lr": 1e-3},
        "eval": {"size": 4, "before": False},
        "observe": {"tensorboard": False},
        **more,
    }


def metrics(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [m for m in lines if "loss" in m]


def is_on_policy(steps: list[dict]) -> None:
    for step in steps:
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["ratio_min"] == pytest.approx(1.0, abs=1e-4)


FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm", "llava", "gemma3"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rollout_and_learner_see_the_same(architecture: str, tmp_path) -> None:
    tiny = {**SHAPE, "architecture": architecture, "alphabet": ALPHABET, "vision": EYES}
    tidemill.train(recipe(tmp_path, model={"tiny": tiny}))
    steps = metrics(tmp_path)
    assert len(steps) == 2
    is_on_policy(steps)


@pytest.mark.parametrize("executor", ["processes"])
def test_processes_compute_the_steps_of_one_process(executor: str, tmp_path) -> None:
    tidemill.train(recipe(tmp_path / "one"))
    tidemill.train(recipe(tmp_path / "many", cluster={"executor": executor}))
    one, many = metrics(tmp_path / "one"), metrics(tmp_path / "many")
    for a, b in zip(one, many, strict=True):
        for key in ("loss", "grad_norm", "reward"):
            assert a[key] == pytest.approx(b[key], abs=1e-5), key


GAME = {
    "data": {"source": "seen_grid", "args": {"cells": 3, "size": 24}, "max_prompt_tokens": 64},
    "environment": {"name": "seen_grid", "max_turn_tokens": 6},
    "rewards": "environment",
    "rollout": {"max_new_tokens": 100},
}


@pytest.mark.parametrize("schedule", ["sync", "streamed"])
def test_a_game_that_is_seen_turn_by_turn(schedule: str, tmp_path) -> None:
    """A model that knows the moves and nothing else: games go on over several pictures."""
    tiny = {**SHAPE, "architecture": "qwen2_5_vl", "alphabet": "downleftrighup", "vision": EYES}
    taught = recipe(
        tmp_path / "taught",
        model={"tiny": tiny},
        data=GAME["data"],
        algorithm="sft",
        rollout={"max_new_tokens": 8},
        train={"steps": 60, "prompts_per_step": 16, "samples_per_prompt": 1},
        learn={"lr": 1e-2},
        eval={"before": False, "after": False, "size": 0},
    )
    tiny["window"] = 200
    warm = tmp_path / "warm.json"
    warm.write_text(json.dumps(taught))
    tidemill.train(recipe(tmp_path, model={"warm_start": str(warm)}, flow={"schedule": schedule}, **GAME))
    steps = metrics(tmp_path)
    assert max(step["turns"] for step in steps) > 1.5
    is_on_policy(steps)


def test_blank_images_are_another_run(tmp_path) -> None:
    for name, images in (("seen", {}), ("blank", {"blank": True})):
        data = {**COUNTING, "max_prompt_tokens": 64, "images": images}
        tidemill.train(recipe(tmp_path / name, data=data, algorithm="sft", eval={"size": 0}))
    assert metrics(tmp_path / "seen")[0]["loss"] != metrics(tmp_path / "blank")[0]["loss"]


def test_an_export_opens_in_transformers_and_looks_as_before(tmp_path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tidemill.train(recipe(tmp_path))
    trained.export(tmp_path / "run", tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "out")
    own = trained.open_trained(str(tmp_path / "run"), device="cpu")
    picture = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    seen = processor(images=[picture], return_tensors="pt")
    assert seen["pixel_values"].shape[0] == 36 and own.loaded.model.eyes is not None
    theirs, ours = model.state_dict(), own.loaded.model.state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_model_that_reads_text_alone_is_refused_before_it_starts(tmp_path) -> None:
    text = {**SHAPE, "alphabet": ALPHABET}
    with pytest.raises(tidemill.errors.ConfigError, match="the model reads only text"):
        tidemill.train(recipe(tmp_path, model={"tiny": text}))
    assert not list(tmp_path.glob("run/*.jsonl"))


def test_rows_of_a_file_with_images_are_learned_from(tmp_path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    rows = []
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (30, 20 + i, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        rows.append({"prompt": "how many? ", "answer": str(i % 3), "images": [f"{i}.png", f"{(i + 1) % 12}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "rows.jsonl"), "held_out": 4, "max_prompt_tokens": 64}
    tidemill.train(recipe(tmp_path, data=data))
    is_on_policy(metrics(tmp_path))


def looks(samples) -> list[float]:
    """As good as the prompt's images are many and bright."""
    return [float(len(s.images)) + float(np.mean([image.mean() for image in s.images])) / 255 for s in samples]


looks.is_batched = True


@pytest.mark.parametrize("executor", ["local", "processes"])
def test_a_reward_may_see_the_images(executor: str, tmp_path) -> None:
    rewards = {"functions": [{"function": "tests.vision.test_runs:looks"}], "images": True}
    tidemill.train(
        recipe(
            tmp_path,
            rewards=rewards,
            cluster={"executor": executor},
            train={"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2},
        )
    )
    (step,) = metrics(tmp_path)
    assert 1.5 < step["reward"] < 2.0  # one image each, mostly paper
