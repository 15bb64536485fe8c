"""A GRPO step written out plainly: one unpacked sample at a time, through transformers' own attention."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tidemill.batch import Batch
from tidemill.models import lora


def written_out(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The clipped loss, the mean over samples of the mean over their tokens, and its gradient by name. Adapters are
    merged."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    plain.load_state_dict(lora.merged(model) if lora.is_attached(model) else model.state_dict(), strict=False)  # tied
    loss = torch.zeros(())
    for row in range(batch.rows):
        tokens = torch.from_numpy(batch["tokens"][row].astype(np.int64))
        start = int(batch.values("prompt_length")[row])
        logp = plain(tokens[None]).logits[0].log_softmax(-1)[start - 1 : -1].gather(1, tokens[start:, None])[:, 0]
        ratio = (logp - torch.from_numpy(batch["logprobs"][row].copy())).exp()
        advantage = float(batch.values("advantages")[row])
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() / batch.rows
    loss.backward()
    return loss.item(), {n: p.grad for n, p in plain.named_parameters()}


def by_the_chain_rule(m: lora.LoraLinear, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parameters of an adapter, each with what the gradient of the merged weight, m V / norm or V, gives it. The
    norm counts as a constant."""
    pairs = []
    if m.lora_m is not None:
        norms = m.row_norms()[:, None]
        pairs.append((m.lora_m, (whole * (m.weight + m.factor * m.lora_b @ m.lora_a) / norms).sum(1)))
        whole = whole * m.lora_m[:, None] / norms
    return [*pairs, (m.lora_a, m.factor * m.lora_b.t() @ whole), (m.lora_b, m.factor * whole @ m.lora_a.t())]
