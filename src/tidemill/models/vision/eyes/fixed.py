"""The towers of SmolVLM, Idefics3, LLaVA and Gemma 3: tiles are of one size, so they are one dense batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes.eyes import Ahead, Eyes, Features, TilePixels
from tidemill.models.vision.views.view import View


class FixedEyes(Eyes):
    has_axes, levels = False, 0
    ahead: Ahead = "never"

    def __init__(self, model: Any, view: View) -> None:
        self.model, self.view = model, view

    def features(self, tiles: TilePixels) -> Features:
        made: list[Tensor | None] = [None] * len(tiles.sizes)
        for which, pixels in tiles.by_size():
            for i, rows in zip(which, self.look(self.normalised(pixels).permute(0, 3, 1, 2).contiguous())):
                made[i] = rows
        return Features(torch.cat([rows for rows in made if rows is not None]))

    def look(self, pixels: Tensor) -> Tensor:
        """(tiles, 3, height, width) → (tiles, tokens, width)"""
        raise NotImplementedError

    def foreign(self, tiles: TilePixels, ids: Tensor) -> dict[str, Any]:
        ((_, pixels),) = tiles.by_size()  # of one size all of them
        return {"pixel_values": self.normalised(pixels).permute(0, 3, 1, 2).contiguous()}


class IdeficsEyes(FixedEyes):
    def parts(self) -> list[nn.Module]:
        return [self.model.model.vision_model, self.model.model.connector]

    def layers(self) -> list[nn.Module]:
        return list(self.model.model.vision_model.encoder.layers)

    def look(self, pixels: Tensor) -> Tensor:
        body = self.model.model
        made: Tensor = body.connector(body.vision_model(pixel_values=pixels, return_dict=True).last_hidden_state)
        return made

    def foreign(self, tiles: TilePixels, ids: Tensor) -> dict[str, Any]:
        return {"pixel_values": super().foreign(tiles, ids)["pixel_values"][None]}


class ProjectedEyes(FixedEyes):
    """A tower and a projector, under the names that LLaVA gave them."""

    def parts(self) -> list[nn.Module]:
        return [self.model.model.vision_tower, self.model.model.multi_modal_projector]

    def layers(self) -> list[nn.Module]:
        return list(self.model.model.vision_tower.encoder.layers)


class LlavaEyes(ProjectedEyes):
    def look(self, pixels: Tensor) -> Tensor:
        config = self.model.config
        made = self.model.model.get_image_features(
            pixel_values=pixels,
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            return_dict=True,
        ).pooler_output
        return torch.stack(list(made))


class Gemma3Eyes(ProjectedEyes):
    ahead: Ahead = "always"

    def look(self, pixels: Tensor) -> Tensor:
        made: Tensor = self.model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        return made

    def foreign(self, tiles: TilePixels, ids: Tensor) -> dict[str, Any]:
        return super().foreign(tiles, ids) | {"token_type_ids": (ids == self.view.token).int()}

    def readable(self, ids: Tensor) -> Tensor:
        words = decoder_of(self.model).get_input_embeddings().num_embeddings
        return ids if self.view.token < words else ids.masked_fill(ids == self.view.token, 0)
