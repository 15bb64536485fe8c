"""Experts in plain torch for vLLM on a CPU, whose own kernel takes no part of them: it looks them up by their numbers
in the whole model (0.32). vLLM imports the class below in each of its workers, before it loads the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tidemill.rollout.vllm.worker import WeightLoader


class Loader(WeightLoader):
    def held_experts(self) -> list[tuple[int, ...]]:
        """Shapes of this worker's stacks of experts."""
        named = self.model_runner.get_model().named_parameters()
        return [tuple(p.shape) for name, p in named if name.endswith("w13_weight")]


def _apply(
    self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
    global_num_experts: int, expert_map: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    output.zero_()
    for expert in range(global_num_experts):
        held = expert if expert_map is None else int(expert_map[expert])
        if held >= 0:
            gate, up = (hidden_states @ w1[held].T).chunk(2, -1)
            share = (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True).to(hidden_states)
            output += share * ((torch.nn.functional.silu(gate) * up) @ w2[held].T)


CPUUnquantizedExperts.apply = _apply
CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: setattr(self, "_use_zentorch", False)
