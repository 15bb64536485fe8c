"""A safety scorer: a role with workers of its own. Whatever says a digit too often is worth less."""

from dataclasses import replace

import numpy as np

from tidemill.algorithms.grpo import GRPO
from tidemill.batch import Batch
from tidemill.cluster.wiring import ROLES, Role
from tidemill.cluster.worker.stages import STAGES
from tidemill.dock import Counts, Want
from tidemill.flow.stages.stage import committed
from tidemill.graph import Graph, Stage

ROLES["safety"] = Role("safety", takes=lambda stage, config: stage.role == "safety")  # one worker, on a device
STAGES["safety"] = lambda state: SafetyWorker(state.dock)


class SafetyWorker:
    name, waits = "safety", False

    def __init__(self, dock):
        self.dock = dock

    def begin(self, first_group, tag):
        """Judges samples of whatever step."""

    def poll(self):
        lease = self.dock.take(self.name, Want(rows=256))
        if lease is None:
            return False
        found = np.array([len(np.unique(tokens)) / len(tokens) for tokens in lease.batch["tokens"]], np.float32)
        counts = Counts.of_rows([{}] * len(found), [{"safety": float(each)} for each in found])
        return committed(lease, Batch({"safety": found}), counts=counts)


class SafeGRPO(GRPO):
    name = "safe_grpo"

    def graph(self, config):
        plain = super().graph(config)
        judged = Stage("safety", "safety", ("tokens",), ("safety",))
        stages = [replace(s, reads=(*s.reads, "safety")) if s.name == "advantage" else s for s in plain.stages]
        at = [s.name for s in stages].index("advantage")
        return Graph(self.name, plain.source, (*stages[:at], judged, *stages[at:]))

    def advantages(self, batch, config):
        return super().advantages(batch.merge({"reward": batch.values("reward") + batch.values("safety")}), config)
