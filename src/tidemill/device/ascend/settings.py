"""What an Ascend NPU's libraries are told through the environment, by what a process does: one table, a reason each.

What the user has set stands. Names and meanings are those of torch_npu's documentation
(docs/zh/api/environment_variable) and of CANN's (HCCL_…); `docs/ascend.md` shows the table.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tidemill.imports import WORKER

LEARNER, ROLLOUT = "learner", "rollout"
SCORERS = ("reference", "reward_model")
EVERY = (LEARNER, ROLLOUT, *SCORERS)


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: str
    roles: tuple[str, ...]
    reason: str
    only_deterministic: bool = False


TABLE = (
    Setting(
        "TASK_QUEUE_ENABLE", "2", (LEARNER, *SCORERS),
        "passes of many small operators are bound by launching them: level 2 moves their workspaces to a second thread",
    ),
    Setting(
        "TASK_QUEUE_ENABLE", "1", (ROLLOUT,),
        "torch_npu captures no graph at level 2 (NPUGraph.cpp refuses it), and decoding is captured",
    ),
    Setting(
        "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", (LEARNER, *SCORERS),
        "packed batches hardly ever have the same size twice: without it the allocator's blocks fall to pieces",
    ),
    Setting(
        "HCCL_OP_EXPANSION_MODE", "AIV", (ROLLOUT,),
        "a tensor-parallel engine adds up small tensors in every layer: vector cores start that sooner than the host",
    ),
    Setting(
        "HCCL_CONNECT_TIMEOUT", "1200", EVERY,
        "ranks reach their first collective minutes apart, while one reads a large model (HCCL by itself waits 120 s)",
    ),
    Setting(
        "P2P_HCCL_BUFFSIZE", "0", (ROLLOUT,),
        "an engine sends no messages between two ranks: twice 20 MB of buffers for each of its groups are for nothing",
    ),
    Setting(
        "CPU_AFFINITY_CONF", "1,npu_affine:1", EVERY,
        "processes of several devices otherwise wander between NUMA nodes and push each other's threads aside",
    ),
    Setting("HCCL_DETERMINISTIC", "true", EVERY, "sums over ranks in one order", only_deterministic=True),
    Setting("LCCL_DETERMINISTIC", "1", EVERY, "the same within a node", only_deterministic=True),
)  # fmt: skip


def environment(roles: Collection[str], is_deterministic: bool = False) -> dict[str, str]:
    """For a process that does all of `roles`. Where two want different values, the last of the table serves both."""
    return {
        setting.name: setting.value
        for setting in TABLE
        if set(roles) & set(setting.roles) and setting.only_deterministic <= is_deterministic
    }


def own_roles() -> tuple[str, ...]:
    """Return what this process does: a worker has one role; any other process may do everything."""
    role = os.environ.get(WORKER, "").rpartition("-")[0]
    return (role,) if role in EVERY else EVERY


def apply(is_deterministic: bool = False) -> None:
    """For this process, before its device is first used."""
    wanted = environment(own_roles(), is_deterministic)
    if "PYTORCH_ALLOC_CONF" in os.environ:  # newer packages refuse to find both
        wanted.pop("PYTORCH_NPU_ALLOC_CONF", None)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def unlike_wanted() -> Iterator[tuple[str, str, str]]:
    """What the environment has otherwise than the table would: (name, what it has, what the table says)."""
    for name, value in environment(own_roles()).items():
        if (given := os.environ.get(name)) is not None and given != value:
            yield name, given, value
