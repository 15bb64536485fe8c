"""LLaVA and Gemma 3: every image is one square of one size, resized to it or cut out of its middle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.errors import ModelError
from tidemill.models.vision.views.view import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Image,
    Normal,
    Plan,
    Size,
    pixels,
    resized,
    too_few,
)


@dataclass(frozen=True, slots=True)
class SquareView:
    token: int
    mark: str
    normal: Normal
    size: Size
    tokens: int  # of an image
    shortest: int | None = (
        None  # an image's shorter side is made so long, and `size` cut out of the middle; None: resized
    )
    resample: int = BICUBIC
    before: str = ""
    after: str = ""
    word: str = ""  # of the token; "": the mark is its word
    kind: str = "CLIPImageProcessor"

    def plan(self, height: int, width: int) -> Plan:
        if self.shortest is None:
            return Plan((self.size,), (self.tokens,), resized=(self.size,))
        long = int(self.shortest * max(height, width) / min(height, width))
        first = (long, self.shortest) if width <= height else (self.shortest, long)
        return Plan((self.size,), (self.tokens,), resized=(first,))

    def written(self, plan: Plan) -> str:
        return f"{self.before}{(self.word or self.mark) * self.tokens}{self.after}"

    def cut(self, image: Image, plan: Plan) -> list[npt.NDArray[np.uint8]]:
        found = pixels(resized(image, plan.resized[0], self.resample))
        (height, width), (h, w) = self.size, found.shape[:2]
        if h < height or w < width:  # transformers fills with black
            wide = np.zeros((max(h, height), max(w, width), 3), np.uint8)
            top, left = (math.ceil(n / 2) for n in (wide.shape[0] - h, wide.shape[1] - w))
            wide[top : top + h, left : left + w] = found
            found, (h, w) = wide, wide.shape[:2]
        top, left = (h - height) // 2, (w - width) // 2
        return [found[top : top + height, left : left + width]]

    def grid(self, size: Size) -> Size:
        side = math.isqrt(self.tokens)
        return side, side

    def within(self, tokens: int) -> SquareView:
        if tokens < self.tokens:
            raise too_few(tokens, self.tokens, "this model")
        return self

    def processor(self) -> dict[str, Any]:
        size = {"height": self.size[0], "width": self.size[1]}
        made: dict[str, Any] = {
            "image_processor_type": self.kind,
            "image_mean": list(self.normal.mean),
            "image_std": list(self.normal.std),
            "resample": self.resample,
            "size": size,
        }
        if self.shortest is not None:
            made |= {"size": {"shortest_edge": self.shortest}, "crop_size": size, "do_center_crop": True}
        return made


def make_llava(config: Mapping[str, Any], settings: Mapping[str, Any], words: Any) -> SquareView:
    vision = config["vision_config"]
    token = int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])
    if settings.get("do_pad"):
        raise ModelError(
            "its preprocessor_config.json pads images to squares, which is not known here", "set do_pad: false"
        )
    size, crop = settings.get("size") or {}, settings.get("crop_size") or {}
    side = int(vision.get("image_size") or 336)
    is_cut = settings.get("do_center_crop", "shortest_edge" in size) and bool(settings)
    height = int((crop if is_cut else size).get("height") or side)
    width = int((crop if is_cut else size).get("width") or side)
    patch, is_clip = (
        int(vision.get("patch_size") or 14),
        vision.get("model_type", "clip_vision_model").startswith("clip"),
    )
    patches = (height // patch) * (width // patch)
    drops_first = config.get("vision_feature_select_strategy", "default") == "default"
    return SquareView(
        token=token,
        mark=words(token),
        normal=Normal(settings.get("image_mean") or CLIP_MEAN, settings.get("image_std") or CLIP_STD),
        size=(height, width),
        tokens=patches + is_clip - drops_first,
        shortest=int(size["shortest_edge"]) if is_cut and "shortest_edge" in size else None,
        resample=int(settings.get("resample", BICUBIC)),
    )


def make_gemma3(config: Mapping[str, Any], settings: Mapping[str, Any], words: Any) -> SquareView:
    vision = config["vision_config"]
    if settings.get("do_pan_and_scan"):
        raise ModelError(
            "its preprocessor_config.json cuts wide images into crops, which is not known here",
            "set do_pan_and_scan: false there",
        )
    token = int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])
    size = settings.get("size") or {}
    side = int(vision.get("image_size") or 896)
    begins, ends = words(int(config["boi_token_index"])), words(int(config["eoi_token_index"]))
    return SquareView(
        token=token,
        mark=begins,
        normal=Normal(settings.get("image_mean") or HALF, settings.get("image_std") or HALF),
        size=(int(size.get("height") or side), int(size.get("width") or side)),
        tokens=int(config.get("mm_tokens_per_image") or 256),
        resample=int(settings.get("resample", BILINEAR)),
        before=f"\n\n{begins}",
        after=f"{ends}\n\n",
        word=words(token),
        kind="Gemma3ImageProcessor",
    )
