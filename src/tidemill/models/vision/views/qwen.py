"""Qwen2.5-VL and Qwen3-VL: an image keeps its shape, and has as many tokens as it has pixels for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.models.vision.views.view import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    CannotPlan,
    Image,
    Normal,
    Plan,
    Size,
    pixels,
    resized,
    too_few,
)

LONGEST_RATIO = 200  # of the sides of an image, beyond which the models' own processors refuse it


@dataclass(frozen=True, slots=True)
class QwenView:
    token: int
    mark: str
    normal: Normal
    patch: int
    merge: int  # patches along each side of what one token stands for
    least: int  # pixels
    most: int
    resample: int = BICUBIC
    is_strict: bool = False  # `most` holds for long and narrow images too, where transformers goes over it

    @property
    def side(self) -> int:
        """Pixels along each side of what one token stands for."""
        return self.patch * self.merge

    def plan(self, height: int, width: int) -> Plan:
        if max(height, width) > LONGEST_RATIO * min(height, width):
            raise CannotPlan(f"is {width} × {height} pixels: one side is over {LONGEST_RATIO} times the other")
        size = self._fitted(height, width)
        rows, columns = self.grid(size)
        return Plan((size,), (rows * columns,), resized=(size,))

    def _fitted(self, height: int, width: int) -> Size:
        """Both sides multiples of `side`, their product within the limits, the shape kept as far as that goes."""
        side = self.side
        h, w = round(height / side) * side, round(width / side) * side
        if h * w > self.most:
            shrink = math.sqrt(height * width / self.most)
            h, w = (max(side, math.floor(n / shrink / side) * side) for n in (height, width))
            longest = self.most // (min(h, w) * side) * side
            return (min(h, longest), min(w, longest)) if self.is_strict else (h, w)
        if h * w < self.least:
            grow = math.sqrt(self.least / (height * width))
            return math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        return h, w

    def written(self, plan: Plan) -> str:
        return self.mark * plan.total

    def cut(self, image: Image, plan: Plan) -> list[npt.NDArray[np.uint8]]:
        return [pixels(resized(image, plan.tiles[0], self.resample))]

    def grid(self, size: Size) -> Size:
        return size[0] // self.side, size[1] // self.side

    def within(self, tokens: int) -> QwenView:
        most = min(self.most, tokens * self.side**2)
        if most < self.side**2:
            raise too_few(tokens, 1, "this model")
        return replace(self, most=most, least=min(self.least, most // 4), is_strict=True)

    def processor(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_mean": list(self.normal.mean),
            "image_std": list(self.normal.std),
            "patch_size": self.patch,
            "temporal_patch_size": 2,
            "merge_size": self.merge,
            "size": {"shortest_edge": self.least, "longest_edge": self.most},
            "resample": self.resample,
        }


def make(config: Mapping[str, Any], settings: Mapping[str, Any], words: Any) -> QwenView:
    """`config`: the model's config.json; `settings`: its preprocessor_config.json; `words`: from a token's number to
    its text."""
    vision, token = config["vision_config"], int(config["image_token_id"])
    size = settings.get("size") or {}
    patch = int(
        settings.get("patch_size") or vision.get("patch_size") or (16 if "qwen3" in config["model_type"] else 14)
    )
    merge = int(settings.get("merge_size") or vision.get("spatial_merge_size") or 2)
    return QwenView(
        token=token,
        mark=words(token),
        normal=Normal(settings.get("image_mean") or CLIP_MEAN, settings.get("image_std") or CLIP_STD),
        patch=patch,
        merge=merge,
        least=int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
        most=int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
        resample=int(settings.get("resample", BICUBIC)),
    )
