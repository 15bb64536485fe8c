"""Value models: a decoder with one number per token in stead of words. A critic of PPO, or a reward model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.api import Algorithm, Kept, Stats
from tidemill.algorithms.ppo import explained_variance
from tidemill.batch import Batch, Column
from tidemill.learn.engine import Learner, token_batch
from tidemill.learn.packing import PackedBatch, microbatches, pack, response_column
from tidemill.recipe.config import Config, Mixture

SUMS = ("return_square", "value_error_mean", "value_error_square", "value_tokens")  # only to work others out


class ValueModel(torch.nn.Module):
    """The policy's decoder, copied, and a head that starts at 0 everywhere.

    With a shared trunk the decoder is the policy's own: the head alone is learned, from states it does not change, and
    no second model is kept.
    """

    def __init__(self, policy: Any, shares_trunk: bool = False) -> None:
        super().__init__()
        self.config, self.shares_trunk = policy.config, shares_trunk
        decoder = policy.get_decoder()
        if shares_trunk:
            self._shared = (decoder,)  # in a tuple, so that its parameters are not this model's
        else:
            self.decoder = copy.deepcopy(decoder).requires_grad_(True)
        width = policy.get_output_embeddings().weight.shape[1]
        self.head = torch.nn.Linear(width, 1).to(next(policy.parameters()))
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def get_decoder(self) -> Any:
        return self._shared[0] if self.shares_trunk else self.decoder

    def states(self, packed: PackedBatch) -> Tensor:
        """(targets, width) the decoder's states in which each response token is chosen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.shares_trunk):
            hidden: Tensor = self.get_decoder()(
                input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, tide=packed.context
            ).last_hidden_state[0]
            return hidden.index_select(0, packed.predicts)

    def starts_from_nothing(self) -> list[torch.nn.Module]:
        """What low-rank adapters cannot stand in for."""
        return [self.head]

    def get_input_embeddings(self) -> Any:
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """There are no words to give."""

    def gradient_checkpointing_enable(self, settings: dict[str, Any]) -> None:
        self.decoder.gradient_checkpointing_enable(settings)


class ValueLearner(Learner):
    """Learns a value model with `value_loss`, or with `loss` where the value model is all there is to learn."""

    def __init__(self, model: ValueModel, config: Config, algorithm: Algorithm, updates: int) -> None:
        rate = config.algorithm.critic.lr
        if rate is not None:
            config = config.model_copy(update={"learn": config.learn.model_copy(update={"lr": rate})})
        if model.shares_trunk:  # the policy's learner has the trunk's settings
            plain: dict[str, Any] = {"lora_rank": 0, "recompute": "none", "compile": "off", "fp8": "none"}
            plain |= {"offload": "none", "moe": Mixture()}
            config = config.model_copy(update={"learn": config.learn.model_copy(update=plain)})
        super().__init__(model, of_value(config, algorithm), algorithm, value_updates(algorithm, config, updates))

    def _teaches(self, batch: Batch) -> Kept:
        return np.ones(batch.rows, np.bool_)  # a value of no advantage is still a value to learn

    def _loss(self, part: Batch) -> tuple[Tensor, Stats]:
        packed = pack(part, self.device, self.config.learn.share_prompts, self.attention)
        new = values_at(self.model, packed)
        tokens = token_batch(part, packed, (torch.zeros_like(new), torch.zeros_like(new)), new)
        learn = self.algorithm.loss if self.algorithm.learns_values else self.algorithm.value_loss
        return learn(tokens, self.config)

    def update(self) -> dict[str, float]:
        return value_metrics(super().update())

    @torch.no_grad()
    def values(self, batch: Batch) -> Column:
        """The value before each response token, as a jagged column."""
        share = self.config.learn.share_prompts
        count = int((batch["tokens"].lengths - batch.values("prompt_length")).sum())
        out = response_column(np.empty(count, np.float32), batch)
        assert out.offsets is not None
        for rows in microbatches(batch, self.config.train.tokens_per_microbatch, share):
            found = values_at(self.model, pack(batch.gather(rows), self.device, share, self.attention)).cpu().numpy()
            cuts = np.cumsum(np.diff(out.offsets)[rows])[:-1]
            for row, part in zip(rows, np.split(found, cuts)):
                out.values[out.offsets[row] : out.offsets[row + 1]] = part
        return out


def of_value(config: Config, algorithm: Algorithm) -> Config:
    """Nobody evaluates a critic: it has no running mean."""
    if algorithm.learns_values or not config.learn.ema:
        return config
    return config.model_copy(update={"learn": config.learn.model_copy(update={"ema": 0.0})})


def critic_passes(config: Config) -> int:
    return config.algorithm.critic.passes or config.train.passes_per_step


def value_updates(algorithm: Algorithm, config: Config, updates: int) -> int:
    """Of the whole run, where the policy makes `updates`: a critic may learn more often from each sample."""
    return updates // config.train.passes_per_step * critic_passes(config) if algorithm.has_critic else updates


def value_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """An update's metrics with what its sums come to, in their place."""
    if "return_square" not in metrics:
        return metrics
    spread = max(0.0, metrics["return_square"] - metrics["return_mean"] ** 2) ** 0.5
    kept = {name: value for name, value in metrics.items() if name not in SUMS}
    return {**kept, "explained_variance": explained_variance(metrics), "return_std": spread}


def values_at(model: ValueModel, packed: PackedBatch) -> Tensor:
    """(targets,) the value of the state in which each response token is chosen.

    The last token of a sample is never an input, for nothing follows it. So a reward model judges where the end token
    is about to come: it has seen the whole response but for that token.
    """
    values: Tensor = model.head(model.states(packed))[:, 0].float()
    return values
