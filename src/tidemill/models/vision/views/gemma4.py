"""Gemma 4: an image keeps its shape, and has as many tokens as fit into its budget, one of five."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.models.vision.views.view import (
    BICUBIC,
    CannotPlan,
    Image,
    Normal,
    Plan,
    Size,
    pixels,
    resized,
    too_few,
)

PLAIN = Normal((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, slots=True)
class Gemma4View:
    token: int
    mark: str
    patch: int
    pool: int  # patches along each side of what one token stands for
    budget: int
    begins: str = ""
    ends: str = ""
    resample: int = BICUBIC
    normal: Normal = PLAIN

    @property
    def side(self) -> int:
        return self.patch * self.pool

    def plan(self, height: int, width: int) -> Plan:
        size = self._fitted(height, width)
        rows, columns = self.grid(size)
        return Plan((size,), (rows * columns,), resized=(size,))

    def _fitted(self, height: int, width: int) -> Size:
        side, most = self.side, self.budget * self.side**2
        factor = math.sqrt(most / (height * width))
        h, w = math.floor(factor * height / side) * side, math.floor(factor * width / side) * side
        if not h and not w:
            raise CannotPlan(f"is {width} × {height} pixels, which is too few")
        if not h:
            h, w = side, min(math.floor(width / height) * side, self.budget * side)
        elif not w:
            h, w = min(math.floor(height / width) * side, self.budget * side), side
        return h, w

    def written(self, plan: Plan) -> str:
        return f"{self.begins}{self.mark * plan.total}{self.ends}"

    def cut(self, image: Image, plan: Plan) -> list[npt.NDArray[np.uint8]]:
        size = plan.tiles[0]
        return [pixels(image if (image.height, image.width) == size else resized(image, size, self.resample))]

    def grid(self, size: Size) -> Size:
        return size[0] // self.side, size[1] // self.side

    def within(self, tokens: int) -> Gemma4View:
        fitting = [budget for budget in BUDGETS if budget <= min(tokens, self.budget)]
        if not fitting:
            raise too_few(tokens, BUDGETS[0], "this model")
        return replace(self, budget=fitting[-1])

    def processor(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": self.patch,
            "pooling_kernel_size": self.pool,
            "max_soft_tokens": self.budget,
            "resample": self.resample,
        }


def make(config: Mapping[str, Any], settings: Mapping[str, Any], words: Any) -> Gemma4View:
    vision, token = config["vision_config"], int(config["image_token_id"])
    return Gemma4View(
        token=token,
        mark=words(token),
        patch=int(settings.get("patch_size") or vision.get("patch_size") or 16),
        pool=int(settings.get("pooling_kernel_size") or vision.get("pooling_kernel_size") or 3),
        budget=int(settings.get("max_soft_tokens") or 280),
        begins=words(int(config["boi_token_id"])),
        ends=words(int(config["eoi_token_id"])),
        resample=int(settings.get("resample", BICUBIC)),
    )
