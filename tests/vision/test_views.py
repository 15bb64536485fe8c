"""Images become the pixels and the tokens that transformers' own processors make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil, convert_image_to_patches
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tidemill.models.vision.views import gemma4, idefics, qwen, square
from tidemill.models.vision.views.view import CannotPlan

SIZES = [(40, 60), (333, 500), (1000, 30), (64, 64), (7, 9), (600, 1200), (1, 50)]
AS_BYTES: dict[str, Any] = {"do_rescale": False, "do_normalize": False}


def image(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height + width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def words(token: int) -> str:
    return f"<{token}>"


@pytest.mark.parametrize("size", SIZES)
def test_qwen(size: tuple[int, int]) -> None:
    view = qwen.make(
        {"model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 5}, {"max_pixels": 200_000}, words
    )
    theirs = Qwen2VLImageProcessorPil(min_pixels=view.least, max_pixels=view.most, **AS_BYTES)
    made, plan = theirs(image(*size), return_tensors="np"), view.plan(*size)
    rows, columns = made["image_grid_thw"][0][1:] // 2
    assert (view.grid(plan.tiles[0]), plan.tokens) == ((rows, columns), (rows * columns,))
    patches, *_ = theirs.patchify(view.cut(image(*size), plan)[0].transpose(2, 0, 1), 14, 2, 2)
    np.testing.assert_array_equal(patches, made["pixel_values"])
    assert view.written(plan) == "<5>" * (rows * columns)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_smolvlm(size: tuple[int, int], splits: bool) -> None:
    config = {"vision_config": {"image_size": 64, "patch_size": 8}, "scale_factor": 2, "image_token_id": 5}
    view = idefics.make(config, {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}, words)
    view = replace(view, splits=splits)
    theirs = SmolVLMImageProcessorPil(
        size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, do_image_splitting=splits,
        return_row_col_info=True, **AS_BYTES,
    )  # fmt: skip
    made, plan = theirs(image(*size), return_tensors="np"), view.plan(*size)
    assert (made["rows"][0][0], made["cols"][0][0]) == (plan.rows, plan.columns)
    tiles = view.cut(image(*size), plan)
    np.testing.assert_array_equal(made["pixel_values"][0].transpose(0, 2, 3, 1), np.stack(tiles))
    text = view.written(plan)
    assert text.count("<5>") == plan.total == 16 * len(tiles)
    assert text.endswith(f"<fake_token_around_image><global-img>{'<5>' * 16}<fake_token_around_image>")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shortest", [48, 32])
def test_llava(size: tuple[int, int], shortest: int) -> None:
    settings = {
        "size": {"shortest_edge": shortest}, "crop_size": {"height": 48, "width": 48}, "do_center_crop": True
    }  # fmt: skip
    config = {"vision_config": {"image_size": 48, "patch_size": 8, "model_type": "clip_vision_model"}}
    view = square.make_llava({**config, "image_token_index": 5}, settings, words)
    made = CLIPImageProcessorPil(**settings, **AS_BYTES)(image(*size), return_tensors="np")
    (tile,) = view.cut(image(*size), view.plan(*size))
    np.testing.assert_array_equal(made["pixel_values"][0].transpose(1, 2, 0), tile)
    assert view.tokens == 36


@pytest.mark.parametrize("size", SIZES)
def test_gemma3(size: tuple[int, int]) -> None:
    settings = {"size": {"height": 56, "width": 56}}
    config = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7, "mm_tokens_per_image": 4}
    view = square.make_gemma3({**config, "vision_config": {"image_size": 56}}, settings, words)
    made = Gemma3ImageProcessorPil(**settings, **AS_BYTES)(image(*size), return_tensors="np")
    (tile,) = view.cut(image(*size), view.plan(*size))
    np.testing.assert_array_equal(made["pixel_values"][0].transpose(1, 2, 0), tile)
    assert view.written(view.plan(*size)) == "\n\n<6><5><5><5><5><7>\n\n"


@pytest.mark.parametrize("size", SIZES)
def test_gemma4(size: tuple[int, int]) -> None:
    config = {"vision_config": {}, "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7}
    view = gemma4.make(config, {"max_soft_tokens": 70}, words)
    made = Gemma4ImageProcessorPil(max_soft_tokens=70, do_rescale=False)(image(*size), return_tensors="np")
    plan = view.plan(*size)
    patches = convert_image_to_patches(view.cut(image(*size), plan)[0].transpose(2, 0, 1), 16)
    np.testing.assert_array_equal(made["pixel_values"][0][: len(patches)], patches)
    assert made["num_soft_tokens_per_image"][0] == plan.total


def test_a_budget_of_tokens_holds_for_images_of_any_shape() -> None:
    config = {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4, "image_token_id": 5}
    views = [
        qwen.make({"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 5}, {}, words),
        idefics.make(config, {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, words),
        gemma4.make({"vision_config": {}, "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7}, {}, words),
    ]
    for view in views:
        for budget in (70, 100, 300, 900):
            for size in [(30, 5000), (5000, 30), (2000, 2000), (3000, 1000), (64, 64)]:
                try:
                    assert 0 < view.within(budget).plan(*size).total <= budget, (view, budget, size)
                except CannotPlan as why:
                    assert "200 times" in str(why)


def test_a_budget_below_what_the_model_takes_is_refused() -> None:
    view = square.make_llava(
        {"vision_config": {"image_size": 336, "patch_size": 14}, "image_token_index": 5}, {}, words
    )
    with pytest.raises(CannotPlan, match="576"):
        view.within(100)


@pytest.mark.parametrize("grid", [(4, 6), (2, 2), (8, 2), (12, 10)])
@pytest.mark.parametrize("side", [3, 8])
def test_learnt_positions_are_stretched_as_transformers_does(grid: tuple[int, int], side: int) -> None:
    theirs = pytest.importorskip("transformers.vision_utils", reason="an older transformers")
    if not hasattr(theirs, "get_vision_interpolation_indices_and_weights"):
        pytest.skip("an older transformers")
    import torch

    from tidemill.models.vision.eyes.qwen import _interpolated

    table = torch.randn(side * side, 5)
    index, weight = _interpolated(grid, side, 2)
    own, wanted = theirs.get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *grid]]), num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    ours = (table[index] * weight[..., None]).sum(1)
    torch.testing.assert_close(ours, (table[own] * wanted[..., None]).sum(1), rtol=1e-5, atol=1e-5)
