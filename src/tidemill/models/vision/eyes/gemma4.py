"""The tower of Gemma 4: tiles keep their shapes, and are filled up to the longest of a batch. Its decoder takes a
second embedding of each token beside the first, which for an image is that of padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes.eyes import Ahead, Eyes, Features, Seen, TilePixels
from tidemill.models.vision.views.gemma4 import Gemma4View


class Gemma4Eyes(Eyes):
    has_axes, levels = False, 0

    def __init__(self, model: Any, view: Gemma4View) -> None:
        self.model, self.view = model, view
        is_ahead = getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
        self.ahead: Ahead = "windows" if is_ahead else "never"

    def parts(self) -> list[nn.Module]:
        return [self.model.model.vision_tower, self.model.model.embed_vision]

    def layers(self) -> list[nn.Module]:
        return list(self.model.model.vision_tower.encoder.layers)

    def features(self, tiles: TilePixels) -> Features:
        made = self.model.model.get_image_features(*self._filled(tiles), return_dict=True).pooler_output
        return Features(torch.cat(list(made)))

    def foreign(self, tiles: TilePixels, ids: Tensor) -> dict[str, Any]:
        pixels, where = self._filled(tiles)
        kinds = (ids == self.view.token).int()
        return {"pixel_values": pixels, "image_position_ids": where, "mm_token_type_ids": kinds}

    def _filled(self, tiles: TilePixels) -> tuple[Tensor, Tensor]:
        """(tiles, longest, …) patches and where they lie, filled up with zeros and -1."""
        patches, places = zip(*self._patches(tiles))
        longest = max(len(one) for one in patches)
        pixels = torch.stack([F.pad(one, (0, 0, 0, longest - len(one))) for one in patches])
        return pixels, torch.stack([F.pad(one, (0, 0, 0, longest - len(one)), value=-1) for one in places])

    def _patches(self, tiles: TilePixels) -> list[tuple[Tensor, Tensor]]:
        """Of each tile (patches, patch² · 3), and (patches, 2) column and row of each."""
        view: Any = self.view
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for which, pixels in tiles.by_size():
            n, h, w, _ = pixels.shape
            rows, columns = h // view.patch, w // view.patch
            x = self.normalised(pixels).view(n, rows, view.patch, columns, view.patch, 3)
            x = x.permute(0, 1, 3, 2, 4, 5).reshape(n, rows * columns, -1)
            across, down = torch.arange(columns, device=x.device), torch.arange(rows, device=x.device)
            at = torch.stack([across.repeat(rows), down.repeat_interleave(columns)], -1)
            found |= {i: (one, at) for i, one in zip(which, x)}
        return [found[i] for i in range(len(tiles.sizes))]

    def readable(self, ids: Tensor) -> Tensor:
        return ids.masked_fill(ids == self.view.token, self.model.config.get_text_config().pad_token_id)

    def inputs(self, ids: Tensor, positions: Tensor, seen: Seen | None) -> dict[str, Any]:
        found = super().inputs(ids, positions, seen)
        decoder = decoder_of(self.model)
        if getattr(decoder, "hidden_size_per_layer_input", 0):
            read = ids if seen is None else ids.clone()
            if seen is not None:
                read[seen.at] = self.model.config.get_text_config().pad_token_id
            found["per_layer_inputs"] = decoder.get_per_layer_inputs(read[None], None)
        return found
