"""The learner looks as transformers does: log-probabilities and gradients, towers included, of packed samples equal
those of each sample alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.vision.samples import alone, grouped, transformers_own, written_out
from tests.vision.tiny import FAMILIES, tiny_model
from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch
from tidemill.errors import DataError, ModelError
from tidemill.learn.engine import Learner, score
from tidemill.learn.rows.packing import pack
from tidemill.models.vision.eyes import eyes
from tidemill.recipe.config import Config


def config(**learn: Any) -> Config:
    return Config.model_validate({"algorithm": "grpo", "train": {"tokens_per_microbatch": 400}, "learn": learn})


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logprobs_are_transformers_own(name: str, share: bool) -> None:
    loaded = tiny_model(name)
    batch = grouped(loaded)
    ours = score(loaded.model, batch, config(share_prompts=share))
    plain = transformers_own(loaded.model)
    for row in range(batch.rows):
        with torch.no_grad():
            wanted = alone(plain, batch, row)
        np.testing.assert_allclose(ours[row], wanted.numpy(), atol=2e-5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_gradients_are_transformers_own(name: str, share: bool) -> None:
    loaded = tiny_model(name, scale=2.0)
    batch = grouped(loaded)
    settings = config(share_prompts=share, clip_norm=None)
    loss, wanted = written_out(loaded.model, batch)
    learner = Learner(loaded.model, settings, get("grpo"), updates=1)
    found: dict[str, torch.Tensor] = {}
    learner.show = lambda what, tensors: found.update(
        {n: t.clone() for n, t in tensors.items()} if what == "gradient" else {}
    )
    learner.accumulate(batch)
    metrics = learner.update()
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    towers = {id(p) for part in loaded.model.eyes.parts() for p in part.parameters()}
    names = {n for n, p in loaded.model.named_parameters() if id(p) in towers}
    assert names & found.keys(), "no gradient reached the tower"
    for parameter, gradient in found.items():
        if parameter in wanted:
            torch.testing.assert_close(
                gradient, wanted[parameter], atol=1e-5, rtol=1e-4, msg=lambda m, name=parameter: f"{name}: {m}"
            )
    assert set(wanted) - set(found) == set()


def test_an_image_that_was_lost_on_the_way_is_an_error() -> None:
    loaded = tiny_model("qwen2_5_vl")
    batch = grouped(loaded)
    for name in ("tiles", "tile_places"):
        assert name in batch
    blind = Batch({name: column for name, column in batch.items() if "tile" not in name})
    with pytest.raises(DataError, match="places for images"):
        score(loaded.model, blind, config())
    moved = batch["tile_places"].base.values.copy()
    moved[0] += 1
    other = replace(batch["tile_places"].base, values=moved).grouped(batch["tile_places"].index)
    with pytest.raises(DataError, match="places for images"):
        score(loaded.model, batch.merge({"tile_places": other}), config())


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_positions_of_fewer_than_four_rows_are_an_error(rows: int) -> None:
    loaded = tiny_model("qwen3_vl")
    looks = eyes.of(loaded.model)
    assert looks is not None
    packed = pack(grouped(loaded), torch.device("cpu"), True, eyes=looks)
    assert packed.positions.shape[0] == 4 and packed.look is not None
    seen = eyes.see(looks, packed.look.tiles, packed.look.at, packed.look.which)
    looks.inputs(packed.tokens, packed.positions, seen)
    few = packed.positions[1 : 1 + rows] if rows > 1 else packed.positions[1]
    with pytest.raises(ModelError, match="time, height"):
        looks.inputs(packed.tokens, few, seen)


def test_a_tile_that_several_samples_show_is_looked_at_once() -> None:
    loaded = tiny_model("smolvlm")
    batch = grouped(loaded, groups=2, each=3, turns=False)
    packed = pack(batch, torch.device("cpu"), False, eyes=eyes.of(loaded.model))
    assert packed.look is not None
    shown = 1 + 2  # images of the two prompts
    assert len(packed.look.tiles.sizes) == shown
    assert len(packed.look.at) == 3 * shown * 16
