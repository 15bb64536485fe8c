"""MindSpore's processes, as the learner calls them: rows dealt out over them, gradients added up over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.interpreter import Interpreter
from tidemill.learn.mindspore.shapes import Shapes, needed, padded, tables_of
from tidemill.learn.rows.packing import PackedBatch
from tidemill.shared_tensors import SharedTensors

MODULE = "tidemill.learn.mindspore.child.serve"
WEIGHT, FIRST, SECOND, SUM = "weight", "exp_avg", "exp_avg_sq", "sum"

Scores = tuple[Tensor, Tensor]


class Fleet:
    def __init__(
        self,
        python: Path,
        count: int,
        shapes: Mapping[str, Sequence[int]],
        log: Path,
        environment: Mapping[str, str],
        chooser: Shapes,
    ) -> None:
        self.shapes, self.chooser = shapes, chooser
        kinds = (WEIGHT, FIRST, SECOND, *((SUM,) if count > 1 else ()))
        # The first has what is published and kept; the others hold copies of all but the gradients.
        self.memories = [SharedTensors(shapes, kinds) for _ in range(count)]
        self.members = [
            Interpreter(python, MODULE, f"MindSpore's process {i}", log.with_suffix(f".{i}.log"), environment)
            for i in range(count)
        ]
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="mindspore")
        self._tables: dict[int, Any] = {}

    @property
    def own(self) -> dict[str, dict[str, Tensor]]:
        """The first process's tensors by kind and name."""
        return self.memories[0].views

    def begin(self, settings: Mapping[str, Any], cos: Tensor, sin: Tensor) -> str:
        """Build the model everywhere, from the weights in the first one's memory; return MindSpore's version."""
        for memory in self.memories[1:]:
            for name, view in memory.views[WEIGHT].items():
                view.copy_(self.own[WEIGHT][name])
        arrays = {"cos": cos.numpy(), "sin": sin.numpy()}
        files = [memory.file for memory in self.memories]
        given = [
            {**settings, "file": file, "layout": memory.layout, "files": files if len(files) > 1 else []}
            for i, (file, memory) in enumerate(zip(files, self.memories))
        ]
        answers = self._all(lambda i: self.members[i].call("begin", given[i], **arrays))
        names = set(answers[0].fields["parameters"])
        if names != set(self.shapes):
            raise AssertionError(f"MindSpore's model has other parameters: {sorted(names ^ set(self.shapes))}")
        for memory in self.memories:
            memory.close_file()
        return str(answers[0].fields["version"])

    def forward(self, rows: Sequence[PackedBatch]) -> list[Scores]:
        """At most one row for each process."""

        def one(i: int) -> Scores:
            fields, arrays = self._prepared(rows[i])
            found, count = self.members[i].call("forward", fields, **arrays), len(rows[i].targets)
            logprobs, entropy = (torch.from_numpy(found.arrays[n][:count]) for n in ("logprobs", "entropy"))
            return logprobs, entropy

        return self._all(one, len(rows))

    def backward(self, rows: Sequence[PackedBatch], gradients: Sequence[Scores]) -> None:
        """Add up the gradients of rows whose scores have these."""

        def one(i: int) -> None:
            fields, arrays = self._prepared(rows[i])
            size = len(arrays["targets"])
            for name, given in zip(("of_logprobs", "of_entropy"), gradients[i]):
                arrays[name] = np.zeros(size, np.float32)
                arrays[name][: len(given)] = given.numpy()
            self.members[i].call("backward", fields, **arrays)

        self._all(one, len(rows))

    def _prepared(self, row: PackedBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        tables = tables_of(row)
        shape = self.chooser.choose(needed(row, tables))
        return {"tables": len(tables)}, dict(padded(row, tables, shape))

    def add_up(self) -> None:
        """Give every process the gradients of all."""
        if len(self.members) == 1:
            return
        self._all(lambda i: self.members[i].call("give", {"kinds": [SUM]}))
        self._every("add")

    def norm(self, divisor: float) -> float:
        return float(self.members[0].call("norm", {"divisor": divisor}).fields["norm"])

    def step(self, number: int, lr: float, scale: float) -> None:
        self._every("step", {"number": number, "lr": lr, "scale": scale})

    def clear(self) -> None:
        self._every("clear")

    def not_finite(self) -> list[str]:
        names: list[str] = self.members[0].call("not_finite").fields["names"]
        return names

    def give(self, *kinds: str) -> None:
        """Bring the first process's tensors into its shared memory."""
        self.members[0].call("give", {"kinds": list(kinds)})

    def take(self, *kinds: str) -> None:
        """Make every process go on from what the first one's memory holds."""
        for memory in self.memories[1:]:
            for kind in kinds:
                for name, view in memory.views[kind].items():
                    view.copy_(self.own[kind][name])
        self._every("take", {"kinds": list(kinds)})

    def _every(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        self._all(lambda i: self.members[i].call(kind, fields))

    def _all(self, work: Any, count: int | None = None) -> list[Any]:
        return list(self._pool.map(work, range(len(self.members) if count is None else count)))

    def close(self) -> None:
        for member in self.members:
            member.close()
        for memory in self.memories:
            memory.close_file()
        self._pool.shutdown(wait=False)
