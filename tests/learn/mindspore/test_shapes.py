"""Tables and padding that MindSpore is given say the same as the packed row, in few shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.learn.grouped import grouped
from tidemill.learn.mindspore.shapes import DEAREST, Shape, Shapes, needed, padded, tables_of
from tidemill.learn.rows.packing import PackedBatch, pack
from tidemill.models.attention.packed import Packed
from tidemill.models.attention.registry import AttentionForm


def a_row(seed: int, shares: bool) -> PackedBatch:
    rng = np.random.default_rng(seed)
    return pack(grouped(rng, int(rng.integers(1, 5)), int(rng.integers(1, 5)), longest=20), torch.device("cpu"), shares)


def a_chooser() -> Shapes:
    return Shapes(per_token=100.0, per_pair=1.0, per_target=50.0)


def attended(arrays: dict[str, np.ndarray], count: int, x: torch.Tensor) -> torch.Tensor:
    """What the decoder computes of its tables, for queries, keys and values that are all `x` (tokens, dim)."""
    positions, out = torch.from_numpy(arrays["positions"]), []
    for i in range(count):
        queries, keys = (torch.from_numpy(arrays[f"{what}.{i}"]).long() for what in ("queries", "keys"))
        is_seen = positions[keys.relu()][:, None, :] <= positions[queries.relu()][:, :, None]
        is_seen &= (keys >= 0)[:, None, :]
        scores = x[queries.relu()] @ x[keys.relu()].transpose(1, 2) * x.shape[-1] ** -0.5
        weights = torch.softmax(torch.where(is_seen, scores, -1e30), -1)
        out.append((weights @ x[keys.relu()]).reshape(-1, x.shape[-1]))
    return torch.cat(out)[torch.from_numpy(arrays["back"]).long()]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_attends_to_what_it_attends_to_in_the_packed_row(seed: int, shares: bool) -> None:
    row = a_row(seed, shares)
    tables = tables_of(row)
    shape = a_chooser().choose(needed(row, tables))
    arrays = padded(row, tables, shape)
    x = torch.randn(shape.tokens, 6, generator=torch.Generator().manual_seed(seed))
    own = x[: len(row.tokens), None]
    want = row.context.attend(0, own, own, own, AttentionForm(scale=6**-0.5))
    found = attended(arrays, len(tables), x)[: len(row.tokens)]
    torch.testing.assert_close(found, want.squeeze(1))
    assert isinstance(row.context, Packed) or shares
    for name in ("tokens", "positions", "predicts", "targets"):
        np.testing.assert_array_equal(arrays[name][: len(getattr(row, name))], getattr(row, name).numpy())
        assert len(arrays[name]) == (shape.tokens if name in ("tokens", "positions") else shape.targets)


def test_a_shape_is_used_again_unless_it_is_much_dearer_than_the_tightest() -> None:
    chooser = a_chooser()
    large = Shape(4000, 3000, ((40, 100, 100),))
    first = chooser.choose(large)
    assert first.holds(large) and chooser.choose(Shape(3600, 2800, ((38, 95, 95),))) is first
    small = chooser.choose(Shape(40, 30, ((4, 10, 10),)))
    assert small.tokens < 100 and len(chooser.known) == 2
    assert chooser.choose(large) is first


def test_many_rows_need_few_shapes_and_little_padding() -> None:
    chooser, spent, tight = a_chooser(), 0.0, 0.0
    for seed in range(200):
        row = a_row(seed, True)
        wanted = needed(row, tables_of(row))
        shape = chooser.choose(wanted)
        assert shape.holds(wanted)
        spent, tight = spent + chooser.work(shape), tight + chooser.work(wanted)
    assert len(chooser.known) <= 40
    assert spent < 2 * DEAREST * tight
