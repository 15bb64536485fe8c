"""The process in which MindSpore learns: it answers what `learn.mindspore.learner` asks, over a line and shared memory.

    python -m tidemill.learn.mindspore.child.serve FILE_DESCRIPTOR

Nothing here imports torch: this interpreter has MindSpore and numpy.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from tidemill.interpreter import Answer, Message, serve
from tidemill.learn.mindspore.child.decoder import Decoder, Form, rotary
from tidemill.learn.mindspore.child.learner import Learner

NONE: Answer = ({}, {})


class Server:
    """`parts`: shared memory by kind (weights, first and second moments, gradients), each a mapping of name to view."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self.gradients: list[dict[str, Any]] = []  # of every process, where there are several
        self.learner: Learner

    def begin(self, request: Message) -> Answer:
        given = request.fields
        ms.set_device(given["target"], given["device"])
        if given["target"] == "CPU":
            ms.device_context.cpu.op_tuning.threads_num(given["threads"])
        self.parts = {kind: _mapped(given["file"], layout) for kind, layout in given["layout"].items()}
        self.gradients = [_mapped(file, given["layout"]["sum"]) for file in given["files"]]
        form = Form(**given["form"])
        weights = {name: np.array(view) for name, view in self.parts["weight"].items()}
        decoder = Decoder(form, weights, *rotary(request.arrays["cos"], request.arrays["sin"]))
        self.learner = Learner(decoder, tuple(given["betas"]), given["eps"], given["weight_decay"])
        return {"version": ms.__version__, "parameters": [p.name for p in self.learner.weights]}, {}

    def forward(self, request: Message) -> Answer:
        logprobs, entropy = self.learner.forward(*_row(request))  # graphs take no nested arguments but as constants
        return {}, {"logprobs": logprobs.asnumpy(), "entropy": entropy.asnumpy()}

    def backward(self, request: Message) -> Answer:
        of = [Tensor(request.arrays[name]) for name in ("of_logprobs", "of_entropy")]
        self.learner.backward(*of, *_row(request))
        return NONE

    def norm(self, request: Message) -> Answer:
        return {"norm": self.learner.norm(request.fields["divisor"])}, {}

    def step(self, request: Message) -> Answer:
        self.learner.step(request.fields["number"], request.fields["lr"], request.fields["scale"])
        return NONE

    def clear(self, _: Message) -> Answer:
        self.learner.clear()
        return NONE

    def not_finite(self, _: Message) -> Answer:
        return {"names": self.learner.not_finite()}, {}

    def give(self, request: Message) -> Answer:
        """Write what is asked for into shared memory."""
        for kind in request.fields["kinds"]:
            for parameter, view in zip(self.learner.held(kind), self.views(kind), strict=True):
                np.copyto(view, parameter.asnumpy())
        return NONE

    def take(self, request: Message) -> Answer:
        """Go on from what shared memory holds."""
        for kind in request.fields["kinds"]:
            self.learner.put(kind, [np.array(view) for view in self.views(kind)])
        return NONE

    def add(self, _: Message) -> Answer:
        """Add up the gradients that all processes left in their memories, everywhere in one order."""
        totals = [np.zeros(view.shape, np.float32) for view in self.views("sum")]
        for views in self.gradients:
            for total, parameter in zip(totals, self.learner.weights, strict=True):
                total += views[parameter.name]
        self.learner.put("sum", totals)
        return NONE

    def views(self, kind: str) -> list[Any]:
        return [self.parts[kind][parameter.name] for parameter in self.learner.weights]


def _mapped(file: str, layout: list[Any]) -> dict[str, Any]:
    """Tensors of shared memory by name."""
    whole = np.memmap(file, np.uint8, "r+")
    return {
        name: whole[at : at + 4 * int(np.prod(shape))].view(np.float32).reshape(shape) for name, shape, at in layout
    }


def _row(request: Message) -> list[Any]:
    names = ["tokens", "positions", "predicts", "targets", "back"]
    names += [f"{what}.{i}" for i in range(request.fields["tables"]) for what in ("queries", "keys")]
    return [Tensor(request.arrays[name]) for name in names]


def main() -> None:
    server = Server()
    names = ("begin", "forward", "backward", "norm", "step", "clear", "not_finite", "give", "take", "add")
    serve(socket.socket(fileno=int(sys.argv[1])), {name: getattr(server, name) for name in names})


if __name__ == "__main__":
    main()
