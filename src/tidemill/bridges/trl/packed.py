"""Packed log-probs inside TRL's trainers: no padding is computed, and samples that stand one behind another with the
same prompt compute it once.

    trainer = GRPOTrainer(..., rollout_func=rollout())
    pack(trainer)

TRL asks one method of its trainers for log-probs, in the loss and for old and reference policies alike. That method is
replaced, and nothing else: the loss, its clipping and its metrics are TRL's. From then on the model has our attention,
which learns from packed rows and decodes, and is not called in any other way."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import GROUP, Batch, Column
from tidemill.bridges.trl.generation import is_taken_over, whole
from tidemill.errors import ConfigError
from tidemill.learn.logprob.tokens import token_logprobs
from tidemill.learn.rows.packing import PackedBatch
from tidemill.learn.rows.packing import pack as pack_rows
from tidemill.learn.values.model import decoded
from tidemill.models import logits
from tidemill.models.attention import contexts
from tidemill.models.attention import registry as attention

METHOD = "_get_per_token_logps_and_entropies"
Scores = tuple[Tensor, Tensor | None, Tensor | None]


def pack(trainer: Any, *, share_prompts: bool = True, chunk: int = 4096) -> None:
    """Let a GRPOTrainer or RLOOTrainer score packed rows. `chunk`: logits held at once, in tokens × vocabulary.

    Call it before `train()`. The trainer must roll out with our engine: `rollout_func=rollout()`, or `take_over`."""
    if not hasattr(trainer, METHOD):
        raise ConfigError(
            f"{type(trainer).__name__} has no {METHOD}: there is nothing to pack",
            "pack() serves trainers that score completions by themselves, such as GRPOTrainer and RLOOTrainer",
        )
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    bases = [whole(trainer.accelerator.unwrap_model(model)) for model in models]
    if getattr(trainer, "rollout_func", None) is None and not is_taken_over(bases[0]):
        raise ConfigError(
            "pack() gives the model an attention that transformers' generate cannot use",
            "roll out with our engine: rollout_func=rollout(), or take_over(model) before",
        )
    for base in bases:
        _teach(base, chunk)
    trainer.__dict__[METHOD] = _Packed(trainer, share_prompts)


def unpack(trainer: Any) -> None:
    """Let the trainer score padded rows again."""
    made = trainer.__dict__.pop(METHOD, None)
    if isinstance(made, _Packed):
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                _forget(whole(trainer.accelerator.unwrap_model(model)))


class _Packed:
    """Stands in place of the trainer's method, with its arguments and its result."""

    def __init__(self, trainer: Any, share_prompts: bool) -> None:
        self.trainer, self.share_prompts = trainer, share_prompts

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Scores:
        """Left-padded prompts and right-padded completions in; (batch, completion) log-probs and entropies out."""
        seen = [name for name, value in images.items() if value is not None]
        if compute_aux_loss or seen:
            what = f"images ({', '.join(seen)})" if seen else "the load-balancing loss of experts"
            raise ConfigError(f"pack() cannot compute {what}", "call unpack(trainer), or do without it")
        size = batch_size or len(input_ids)
        parts = [
            self._scores(model, input_ids[at : at + size], attention_mask[at : at + size], logits_to_keep)
            for at in range(0, len(input_ids), size)
        ]
        logprobs, entropies = (torch.cat(values) for values in zip(*parts))
        return logprobs, entropies if compute_entropy else None, None

    def _scores(self, model: Any, input_ids: Tensor, mask: Tensor, kept: int) -> tuple[Tensor, Tensor]:
        batch, places = rows_of(input_ids, mask, kept)
        kind = contexts.choose(whole(self.trainer.accelerator.unwrap_model(model)))
        packed = pack_rows(batch, input_ids.device, self.share_prompts, kind)
        with self.trainer.accelerator.autocast():
            logprobs, entropies = model(packed_rows=packed, temperature=float(self.trainer.temperature))
        empty = logprobs.new_zeros(len(input_ids) * kept)
        scores = (empty.index_copy(0, places, values.to(empty.dtype)) for values in (logprobs, entropies))
        first, second = (values.view(len(input_ids), kept) for values in scores)
        return first, second


def rows_of(input_ids: Tensor, mask: Tensor, kept: int) -> tuple[Batch, Tensor]:
    """Return padded rows as a batch without padding, and where each response token stands in (rows · kept)."""
    ids, has = input_ids.cpu().numpy(), mask.bool().cpu().numpy()
    split = ids.shape[1] - kept
    tokens = [row[here] for row, here in zip(ids, has)]
    prompts = has[:, :split].sum(1)
    group, groups = 0, []
    for i, row in enumerate(tokens):
        is_same = i and prompts[i] == prompts[i - 1] and np.array_equal(row[: prompts[i]], tokens[i - 1][: prompts[i]])
        group += 0 if is_same or not i else 1
        groups.append(group)
    columns = {
        "tokens": Column.jagged(tokens, np.int64),
        "prompt_length": Column(prompts.astype(np.int32)),
        GROUP: Column(np.array(groups, np.int64)),
    }
    places = np.flatnonzero(has[:, split:].reshape(-1))
    return Batch(columns), torch.from_numpy(places).to(input_ids.device)


def _teach(base: Any, chunk: int) -> None:
    """Let the model's own forward score packed rows, when it is called with some: what wraps it (DDP, adapters, mixed
    precision) then sees a forward pass like any other."""
    if hasattr(base, "_padded"):
        return
    usual: Callable[..., Any] = base.forward
    base.__dict__["_padded"] = usual, base.config._attn_implementation
    base.set_attn_implementation(attention.ours(base.config))

    @wraps(usual)
    def forward(*args: Any, packed_rows: PackedBatch | None = None, temperature: float = 1.0, **kwargs: Any) -> Any:
        if packed_rows is None:
            return usual(*args, **kwargs)
        hidden = decoded(base, packed_rows).index_select(0, packed_rows.predicts)
        head = base.get_output_embeddings()
        how = {**logits.shape(base, temperature), "bias": getattr(head, "bias", None), "chunk": chunk}
        return token_logprobs(hidden, head.weight, packed_rows.targets, **how)

    base.forward = forward


def _forget(base: Any) -> None:
    usual, implementation = base.__dict__.pop("_padded")
    base.forward = usual
    base.set_attn_implementation(implementation)
