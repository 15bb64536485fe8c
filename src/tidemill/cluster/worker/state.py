"""What a checkpoint holds that is not the policy's: the critic, and what changes about the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tidemill.cluster.start.ranked import RankedCritic
from tidemill.flow.reference import ReferenceKeeper
from tidemill.learn.critic import ValueLearner
from tidemill.learn.parallel.learner import CRITIC

Critic = ValueLearner | RankedCritic


def others(critic: Critic | None, keeper: ReferenceKeeper | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    if critic is not None:
        own, state["critic"] = critic.state()
        tensors |= {CRITIC + name: tensor for name, tensor in own.items()}
    if keeper is not None:
        moved, state["kl"] = keeper.state()
        tensors |= moved
    return tensors, state


def restore_others(
    critic: Critic | None, keeper: ReferenceKeeper | None, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    if critic is not None:
        own = {name.removeprefix(CRITIC): t for name, t in tensors.items() if name.startswith(CRITIC)}
        critic.restore(own, state["critic"])
    if keeper is not None:
        keeper.restore(tensors, state["kl"])
