"""Idefics3 and SmolVLM: an image is cut into squares of one size, with the whole of it as a last square."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.models.vision.views.view import HALF, LANCZOS, Image, Normal, Plan, Size, pixels, resized, too_few

LONGEST_SIDE = 4096


@dataclass(frozen=True, slots=True)
class IdeficsView:
    token: int
    mark: str
    normal: Normal
    square: int  # pixels along each side of a tile
    longest: int  # pixels along the longer side of an image, before it is cut
    each: int  # tokens of a tile
    splits: bool = True
    resample: int = LANCZOS
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def plan(self, height: int, width: int) -> Plan:
        square = (self.square, self.square)
        first = _shrunk(*_stretched(height, width, self.longest))
        if not self.splits:
            return Plan((square,), (self.each,), resized=(first, square))
        second = _rounded(*first, self.square)
        rows, columns = second[0] // self.square, second[1] // self.square
        if rows * columns == 1:
            return Plan((square,), (self.each,), resized=(first, second))
        count = rows * columns + 1
        return Plan((square,) * count, (self.each,) * count, rows, columns, (first, second))

    def written(self, plan: Plan) -> str:
        """Every tile with its place in the grid before it, the whole image last."""
        places = self.mark * self.each
        grid = "".join(
            "".join(f"{self.around}<row_{r + 1}_col_{c + 1}>{places}" for c in range(plan.columns)) + "\n"
            for r in range(plan.rows)
        )
        return f"{grid}{chr(10) if grid else ''}{self.around}{self.whole}{places}{self.around}"

    def cut(self, image: Image, plan: Plan) -> list[npt.NDArray[np.uint8]]:
        for size in plan.resized:
            image = resized(image, size, self.resample)
        if not plan.rows:
            return [pixels(image)]
        side, found = self.square, pixels(image)
        parts = [
            found[r * side : (r + 1) * side, c * side : (c + 1) * side]
            for r in range(plan.rows)
            for c in range(plan.columns)
        ]
        return [*parts, pixels(resized(image, (side, side), self.resample))]

    def grid(self, size: Size) -> Size:
        side = math.isqrt(self.each)
        return side, side

    def within(self, tokens: int) -> IdeficsView:
        """The longest side at which an image of any shape keeps within them: as many squares as that is long, squared,
        and the whole."""
        if tokens < self.each:
            raise too_few(tokens, self.each, "this model")
        count = math.isqrt(max(0, tokens // self.each - 1))
        if count < 2:
            return replace(self, longest=self.square)
        return replace(self, longest=min(self.longest, count * self.square))

    def processor(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Idefics3ImageProcessor",
            "image_mean": list(self.normal.mean),
            "image_std": list(self.normal.std),
            "size": {"longest_edge": self.longest},
            "max_image_size": {"longest_edge": self.square},
            "do_image_splitting": self.splits,
            "resample": self.resample,
        }


def _stretched(height: int, width: int, longest: int) -> Size:
    """The longer side as long as that, the shorter one an even number."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return max(1, other + other % 2), longest
    other = int(longest * ratio)
    return longest, max(1, other + other % 2)


def _shrunk(height: int, width: int) -> Size:
    """No side longer than the longest that is allowed."""
    ratio = width / height
    if width >= height and width > LONGEST_SIDE:
        return max(1, int(LONGEST_SIDE / ratio)), LONGEST_SIDE
    if height > width and height > LONGEST_SIDE:
        return LONGEST_SIDE, max(1, int(LONGEST_SIDE * ratio))
    return height, width


def _rounded(height: int, width: int, side: int) -> Size:
    """Up to multiples of a tile's side, the longer one first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side


def make(config: Mapping[str, Any], settings: Mapping[str, Any], words: Any) -> IdeficsView:
    vision, token = config["vision_config"], int(config["image_token_id"])
    scale = int(config.get("scale_factor") or 2)
    square = int((settings.get("max_image_size") or {}).get("longest_edge") or vision.get("image_size") or 224)
    patch = int(vision.get("patch_size") or 32)
    return IdeficsView(
        token=token,
        mark=words(token),
        normal=Normal(settings.get("image_mean") or HALF, settings.get("image_std") or HALF),
        square=square,
        longest=int((settings.get("size") or {}).get("longest_edge") or 4 * square),
        each=(square // patch) ** 2 // scale**2,
        splits=bool(settings.get("do_image_splitting", True)),
        resample=int(settings.get("resample", LANCZOS)),
    )
