"""Samples that show images, for tests of learners, and what transformers itself makes of each alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.vision.tiny import prompt_of, tile_of
from tidemill import tiles
from tidemill.batch import Batch, Column
from tidemill.models import lora
from tidemill.models.load import LoadedModel
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.eyes import TilePixels
from tidemill.models.vision.eyes.find import give_eyes


def grouped(loaded: LoadedModel, groups: int = 3, each: int = 2, seed: int = 0, turns: bool = True) -> Batch:
    """All that GRPO's loss reads. Prompts show 0 to 2 images; with `turns` some responses one more, in an answer of an
    environment."""
    rng = np.random.default_rng(seed)
    token = eyes.of(loaded.model).view.token  # type: ignore[union-attr]
    prompts = [prompt_of(rng, loaded, (g + 1) % 3, 5) for g in range(groups)]
    place = np.repeat(np.arange(groups), each)
    tokens, masks, later = [], [], []
    for g in place:
        prompt, _ = prompts[g]
        said = rng.integers(3, 38, rng.integers(1, 6)).tolist()
        made, mask, shown = list(said), [1] * len(said), []
        if turns and rng.random() < 0.6:
            tile = tile_of(rng, loaded, len(prompt) + len(made) + 1)
            shown.append(tile)
            made += [5, *[token] * tile.tokens, 6]
            mask += [0] * (tile.tokens + 2)
            again = rng.integers(3, 38, rng.integers(1, 4)).tolist()
            made, mask = [*made, *again], [*mask, *[1] * len(again)]
        tokens.append([*prompt, *made])
        masks.append(mask)
        later.append(shown)
    columns: dict[str, Any] = {
        "id": np.arange(len(place)),
        "group": place,
        "tokens": Column.jagged(tokens, np.int32),
        "prompt_length": np.array([len(prompts[g][0]) for g in place], np.int32),
        "mask": Column.jagged(masks, np.uint8),
        "logprobs": Column.jagged([-4.0 + rng.normal(size=len(m)) for m in masks], np.float32),
        "advantages": rng.normal(size=len(place)).astype(np.float32),
    }
    shown = tiles.columns([own for _, own in prompts])
    columns |= {name: column.grouped(place) for name, column in shown.items()}
    return Batch(columns | tiles.columns(later, tiles.TURN_COLUMNS))


def transformers_own(model: Any) -> Any:
    """The same model as transformers makes it, with attention of its own."""
    plain: Any = AutoModelForImageTextToText.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    state = lora.merged(model) if lora.is_attached(model) else model.state_dict()
    plain.load_state_dict(state, strict=False)  # tied
    give_eyes(plain, model.eyes.view)
    return plain.eval()


def alone(plain: Any, batch: Batch, row: int) -> Tensor:
    """Log-probabilities of a sample's response, as transformers computes them of it alone."""
    tokens = torch.from_numpy(batch["tokens"][row].astype(np.int64))[None]
    first = int(batch.values("prompt_length")[row])
    shown = tiles.of_batch(batch)[row]
    given = {}
    if shown:
        given = plain.eyes.foreign(TilePixels.of(shown, tokens.device), tokens)
    if hasattr(plain.model, "rope_deltas"):
        plain.model.rope_deltas = None
    logp = plain(input_ids=tokens, use_cache=False, **given).logits[0].log_softmax(-1)
    return logp[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]


def written_out(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """GRPO's clipped loss, the mean over samples of the mean over the tokens that the model made, and its gradient."""
    plain = transformers_own(model)
    loss = torch.zeros(())
    for row in range(batch.rows):
        ratio = (alone(plain, batch, row) - torch.from_numpy(batch["logprobs"][row].copy())).exp()
        advantage = float(batch.values("advantages")[row])
        per_token = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        is_made = torch.from_numpy(batch["mask"][row].copy()) != 0
        loss = loss - per_token[is_made].mean() / batch.rows
    loss.backward()
    return loss.item(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
