"""What the learner made of samples is kept for people: the right tokens, of the right samples, and few of them."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import tidemill
from tidemill import tiles
from tidemill.algorithms.api import TokenBatch
from tidemill.batch import ID, Batch, Column
from tidemill.learn.notes import Notes
from tidemill.observe import pictures

RECIPE = {
    "name": "run",
    "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 32}},
    "data": {"source": "arithmetic", "held_out": 8, "max_prompt_tokens": 16},
    "train": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4},
    "rollout": {"max_new_tokens": 4},
    "algorithm": "grpo",
    "eval": {"size": 4, "before": False, "after": False},
    "observe": {"tensorboard": False, "progress": "off"},
    "checkpoint": {"every": 0},
    "threads": 1,
}


def batch(ids: list[int]) -> tuple[Batch, TokenBatch]:
    """Each sample has two tokens, whose log-probability is its id."""
    values = torch.tensor([float(id) for id in ids for _ in range(2)])
    rows = {ID: np.array(ids, np.int64), "mask": Column.jagged([np.ones(2) for _ in ids], np.uint8)}
    tokens = TokenBatch(
        logprobs=values, old_logprobs=values - 0.5, advantages=-values, weights=values, mask=values,
        row=torch.arange(len(ids)).repeat_interleave(2), rows=len(ids), rollout_logprobs=values,
    )  # fmt: skip
    return Batch(rows), tokens


def test_the_samples_with_the_smallest_ids_are_kept_whatever_their_order():
    notes = Notes(2)
    for ids in ([7, 3], [9, 1], [4]):
        notes.keep(*batch(ids))
    found = [record for record, _ in notes.drain()]
    assert found == [
        {"id": id, "logprobs": [float(id)] * 2, "ratio": [1.6487] * 2, "advantages": [-float(id)] * 2} for id in (1, 3)
    ]
    assert notes.drain() == []


def test_a_sample_that_was_shown_first_is_kept_when_it_is_learned_from():
    notes = Notes(1)
    notes.ask([8])
    notes.keep(*batch([2, 8, 5]))
    assert [record["id"] for record, _ in notes.drain()] == [2, 8]


def test_a_run_that_shows_no_samples_keeps_none():
    notes = Notes(0)
    notes.keep(*batch([1]))
    assert notes.drain() == []


def test_the_images_that_a_sample_shows_are_kept_with_it():
    rows, tokens = batch([1, 2])
    tile = tiles.Tile(np.full((4, 6, 3), 9, np.uint8), at=0, tokens=1)
    notes = Notes(2)
    notes.keep(Batch({**dict(rows.items()), **tiles.columns([[tile], []])}), tokens)
    (_, images), (_, none) = notes.drain()
    assert len(images) == 1 and (images[0] == tile.pixels).all() and none == []


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"cluster": {"executor": "processes"}, "flow": {"schedule": "async"}}, marks=pytest.mark.slow),
        pytest.param({"learn": {"parallel": {"fsdp": 2}}}, marks=pytest.mark.slow),
    ],
    ids=["local", "async", "ranks"],
)
def test_a_run_writes_them_for_the_samples_that_it_shows(tmp_path, more):
    tidemill.train({**RECIPE, **more, "folder": str(tmp_path)})
    samples, notes = lines(tmp_path / "run" / "samples.jsonl"), lines(tmp_path / "run" / "tokens.jsonl")
    noted = {note["id"]: note for note in notes}
    first = [sample for sample in samples if sample["step"] == 1]
    assert len(first) == 8 and {sample["id"] for sample in first} <= set(noted)
    for sample in first:
        note = noted[sample["id"]]
        assert len(note["logprobs"]) == len(note["ratio"]) == len(sample["tokens"])
        assert note["ratio"] == pytest.approx(
            [1.0] * len(note["ratio"]), abs=1e-3
        )  # the weights that made it learn from it
        assert len(set(note["advantages"])) == 1


def test_a_picture_is_a_png_that_is_written_once(tmp_path):
    pixels = np.arange(600 * 300 * 3, dtype=np.uint32).reshape(600, 300, 3).astype(np.uint8)
    name = pictures.kept(tmp_path, pixels)
    file = tmp_path / "images" / name
    data, written = file.read_bytes(), file.stat().st_mtime_ns
    assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20]) == 100 and int.from_bytes(data[20:24]) == 200
    rows = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
    shown = np.frombuffer(rows, np.uint8).reshape(200, 301)[:, 1:].reshape(200, 100, 3)
    assert (shown == pictures.smaller(pixels)).all()
    assert pictures.kept(tmp_path, pixels) == name and file.stat().st_mtime_ns == written
