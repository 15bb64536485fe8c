"""Rollout's own copy of the weights, for a rollout that works while the learner does.

A new version is written aside while the old one serves, checked, and taken up between two tokens. A transfer that fails
raises in the learner's thread and leaves the old version serving.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

from tidemill.models import lora
from tidemill.models.buffers import carried, persistent
from tidemill.reshard.dtensor import from_tensors
from tidemill.reshard.move import Job, Verify
from tidemill.reshard.one import OneProcessWire
from tidemill.reshard.pack import BlockMerge
from tidemill.reshard.plan import plan
from tidemill.reshard.serve import Aside, Serving
from tidemill.rollout.engine import RolloutEngine

Unfinished = Literal["recompute_kv", "keep_kv"]


class OwnCopy:
    """`publish` is the learner's, `take_up` the rollout thread's."""

    def __init__(
        self,
        learner: Any,
        served: Any,
        engine: RolloutEngine,
        unfinished: Unfinished = "recompute_kv",
        verify: Verify = "off",
    ) -> None:
        self.learner, self.engine, self.unfinished, self.verify = learner, engine, unfinished, verify
        tensors = carried(served)
        on_host = next(iter(tensors.values())).device.type == "cpu"
        # An accelerator's engine has its tensors' addresses in captured graphs: there they are written, not exchanged.
        aside: Aside = "device" if on_host else "copy"
        self.serving = Serving({**dict(served.named_parameters()), **persistent(served)}, version=0, aside=aside)
        self.plan = plan(from_tensors(self._sources(), 0), from_tensors(tensors, 0))
        self.wire = OneProcessWire()
        self._lock = threading.Lock()

    def _sources(self) -> dict[str, Any]:
        own = lora.adapters(self.learner)
        return {name: tensor for name, tensor in carried(self.learner).items() if name not in own}

    def publish(self, version: int) -> None:
        """Bring the learner's weights over; rollout serves them from its next token on."""
        if version <= self.serving.version or version == self.serving.arrived:
            return  # a step in which only the critic learned
        merges = {
            f"{name}.weight": adapter_of(m)
            for name, m in self.learner.named_modules()
            if isinstance(m, lora.LoraLinear)
        }
        for name, m, stack in lora.adapted_stacks(self.learner):
            a, b = (getattr(m, f"{stack}_lora_{side}").detach() for side in "ab")
            merges[name] = BlockMerge(a, b, m.lora_factor)
        job = Job(self.plan, 0, self._sources(), {}, version, self.verify, merges or None)
        with self._lock:
            self.serving.receive(job, self.wire)

    def take_up(self) -> int:
        """Between two tokens: serve what arrived. Gives how many half-made samples go on under it."""
        if self.serving.arrived is None:
            return 0
        partials = self.engine.pause() if self.unfinished == "recompute_kv" else []
        with self._lock:
            version = self.serving.flip()
        self.engine.load(None, version)
        self.engine.resume(partials)
        return sum(bool(p.tokens) for p in partials)


def adapter_of(linear: lora.LoraLinear) -> BlockMerge:
    """What makes of a frozen weight the one that the learner computes with."""
    rows = None if linear.lora_m is None else linear.lora_m.detach() / linear.row_norms().to(linear.lora_m.dtype)
    return BlockMerge(linear.lora_a.detach(), linear.lora_b.detach(), linear.factor, rows)
