"""What MindSpore computes of a learner: scores, gradients of what they are weighed by, and AdamW's step, as graphs."""

# mypy: disable-error-code="untyped-decorator"
# MindSpore has no types that can be read here.
from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from tidemill.learn.mindspore.child.decoder import Decoder

add_up = ops.MultitypeFuncGraph("add_up")
square = ops.MultitypeFuncGraph("square")
many = ops.HyperMap()


@add_up.register("Tensor", "Tensor")
def _add_up(total: Any, more: Any) -> Any:
    return ops.assign_add(total, more.astype(ms.float32))


@square.register("Tensor")
def _square(gradient: Any) -> Any:
    return ops.reduce_sum(gradient * gradient)


class Learner:
    def __init__(self, decoder: Decoder, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.decoder, self.weights = decoder, decoder.trainable_params()
        self.betas = betas

        def zeros(kind: str) -> Any:
            made = [Parameter(Tensor(np.zeros(p.shape, np.float32)), name=f"{kind}.{p.name}") for p in self.weights]
            return ms.ParameterTuple(made)

        self.sums, self.first, self.second = zeros("sum"), zeros("m"), zeros("v")
        self.decays = tuple(decay if p.ndim >= 2 else 0.0 for p in self.weights)  # of vectors, nothing
        weights, sums, first, second = ms.ParameterTuple(self.weights), self.sums, self.first, self.second
        decays, (b1, b2) = self.decays, betas

        def weighed(of_logprobs: Any, of_entropy: Any, *row: Any) -> Any:
            """A number whose gradient is that of a loss, of which the gradients towards the scores are known."""
            logprobs, entropy = decoder(*row)
            return ops.reduce_sum(logprobs * of_logprobs) + ops.reduce_sum(entropy * of_entropy)

        gradient = ms.grad(weighed, None, weights)

        @ms.jit
        def forward(*row: Any) -> Any:
            return decoder(*row)

        @ms.jit
        def backward(of_logprobs: Any, of_entropy: Any, *row: Any) -> Any:
            return many(add_up, sums, gradient(of_logprobs, of_entropy, *row))

        @ms.jit
        def squares() -> Any:
            return many(square, sums)

        @ms.jit
        def step(how: Any, scale: Any) -> Any:
            """Loshchilov and Hutter 2019, algorithm 2. how: learning rate, and both corrections for a late start."""
            for p, g, m, v, lost in zip(weights, sums, first, second, decays):
                g = g * scale
                ops.assign(m, m * b1 + g * (1 - b1))
                ops.assign(v, v * b2 + g * g * (1 - b2))
                root = ops.sqrt(v / how[2]) + eps
                ops.assign(p, p * (1 - how[0] * lost) - how[0] / how[1] * m / root)
            return scale

        @ms.jit
        def clear() -> Any:
            for total in sums:
                ops.assign(total, ops.zeros_like(total))
            return sums[0].shape[0]

        self.forward, self.backward, self._squares, self._step, self.clear = forward, backward, squares, step, clear

    def norm(self, divisor: float) -> float:
        found = sum(float(x.asnumpy()) for x in self._squares())
        return float(np.sqrt(found)) / divisor if np.isfinite(found) and found >= 0 else float("nan")

    def step(self, number: int, lr: float, scale: float) -> None:
        b1, b2 = self.betas
        how = Tensor(np.array([lr, 1 - b1**number, 1 - b2**number], np.float32))
        self._step(how, Tensor(scale, ms.float32))

    def not_finite(self) -> list[str]:
        return [p.name for p, g in zip(self.weights, self.sums) if not np.isfinite(g.asnumpy()).all()]

    def held(self, kind: str) -> Any:
        return {"weight": self.weights, "exp_avg": self.first, "exp_avg_sq": self.second, "sum": self.sums}[kind]

    def put(self, kind: str, values: list[Any]) -> None:
        """Write into what graphs hold: a parameter that is given other data is not theirs any more."""
        for parameter, value in zip(self.held(kind), values, strict=True):
            ops.assign(parameter, Tensor(value))
