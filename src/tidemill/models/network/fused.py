"""The dense forms of a network in C (`network.c`): one call decides for many environments, one makes all gradient steps
of an update. Where there is no compiler, or a network is of another kind, torch does both; the tests compare the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tidemill.device.compiled import library
from tidemill.models.network.heads import Categorical, Gaussian
from tidemill.models.network.minibatches import Minibatch
from tidemill.models.network.running import LIMIT

SOURCE = Path(__file__).with_name("network.c")
MOST_LAYERS, MOST_PARTS, MOST_OUTPUTS = 9, 64, 256  # of network.c
LANES = 16
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
STATS = (
    "policy_loss", "value_loss", "entropy", "old_kl", "ratio_mean", "clip_share_low", "clip_share_high",
    "value_clip_share", "loss", "grad_norm", "count", "steps", "skipped", "ratio_max", "ratio_min",
)  # fmt: skip
OF_STEPS, OF_ALL = ("loss", "grad_norm"), ("ratio_max", "ratio_min", "skipped", "steps", "count")
OF_RATIO = ("old_kl", "ratio_mean", "clip_share_low", "clip_share_high", "ratio_max", "ratio_min")
_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Tower(ctypes.Structure):
    _fields_ = (
        ("layers", _int),
        ("relu", _int),
        ("sizes", _int * (MOST_LAYERS + 1)),
        ("weight", _pointer * MOST_LAYERS),
        ("bias", _pointer * MOST_LAYERS),
        ("moments", (_pointer * 4) * MOST_LAYERS),
    )


class _Learning(ctypes.Structure):
    _fields_ = (
        [("policy", _Tower), ("critic", _Tower)]  # type: ignore[assignment]  # lists of several types
        + [(n, _int) for n in ("has_critic", "is_gaussian", "parts", "is_masked", "is_ratio")]
        + [("choices", _pointer), ("log_std", _pointer), ("std_moments", _pointer * 2)]
        + [(n, _pointer) for n in ("x", "legal", "actions", "old", "advantages", "returns", "values", "chosen")]
        + [("order", _pointer), ("edges", _pointer)]
        + [(n, _int) for n in ("minibatches", "reported", "ldx", "steps")]
        + [(n, _float) for n in ("lr", "beta1", "beta2", "eps", "decay", "clip_norm", "clip_low", "clip_high")]
        + [(n, _float) for n in ("value_coef", "value_clip", "entropy_coef")]
        + [("stats", _pointer), ("threads", ctypes.c_int32)]
    )


@cache
def _code() -> ctypes.CDLL | None:
    found = library(SOURCE)
    if found is not None:
        found.tm_net_packed.restype = _int
        found.tm_net_packed.argtypes = [_pointer]
        found.tm_net_pack.argtypes = [_pointer, _pointer]
        found.tm_net_forward.argtypes = [_pointer] * 5 + [_int, _float, _int, _pointer, _pointer]
        found.tm_net_learn.argtypes = [_pointer]
    return found


def _at(array: Any) -> int:
    return int(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


def _linears(trunk: nn.Module, head: nn.Linear) -> list[nn.Linear]:
    return [*(layer for layer in trunk if isinstance(layer, nn.Linear)), head]  # type: ignore[attr-defined]


def fits(network: Any) -> bool:
    """Whether the network is of the form that is written here."""
    settings, spaces = network.settings, network.spaces
    if settings.kind != "mlp" or spaces.pixels or not isinstance(network.head, Categorical | Gaussian):
        return False
    is_small = network.head.width <= MOST_OUTPUTS and network.head.draws <= MOST_PARTS
    widths = all(w % LANES == 0 for w in settings.hidden) and len(settings.hidden) < MOST_LAYERS
    plain = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in network.parameters())
    return is_small and widths and plain and _code() is not None


class Served:
    """A tower laid out for deciding, with the weights that it had when it was made."""

    def __init__(self, layers: Sequence[nn.Linear], network: Any) -> None:
        code = _code()
        assert code is not None
        self._run, self._tower = code.tm_net_forward, _tower(layers, network)
        self._packed = np.zeros(code.tm_net_packed(ctypes.byref(self._tower)), np.float32)
        code.tm_net_pack(ctypes.byref(self._tower), self._packed.ctypes.data)
        seen = network.seen
        self._mean = None if seen is None else seen.mean.float().numpy().copy()
        self._scale = None if seen is None else seen.scale.float().numpy().copy()
        self.width, self._raw = layers[-1].out_features, network.mask_width
        wide = sum(-(-layer.out_features // LANES) * LANES for layer in layers)
        self._each = layers[0].in_features + wide
        self._scratch = np.empty(0, np.float32)

    def __call__(self, x: Floats) -> Floats:
        n = len(x)
        if len(self._scratch) < n * self._each + LANES:
            self._scratch = np.empty(n * self._each + LANES, np.float32)
        out = np.empty((n, self.width), np.float32)
        mean, scale = (None if a is None else a.ctypes.data for a in (self._mean, self._scale))
        where = (self._packed.ctypes.data, x.ctypes.data, mean, scale)
        self._run(ctypes.byref(self._tower), *where, self._raw, LIMIT, n, out.ctypes.data, self._scratch.ctypes.data)
        return out


class Serving:
    """Policy and critic, laid out for deciding. A copy of the network has weights of its own: it lays out its own."""

    def __init__(self, network: Any) -> None:
        self.policy = Served(_linears(network.trunk, network.out), network)
        self.critic: Served | None = None
        if network.value is not None:
            self.critic = Served(_linears(network.critic_trunk, network.value), network)

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _tower(
    layers: Sequence[nn.Linear], network: Any, moments: Mapping[Any, tuple[Tensor, Tensor]] | None = None
) -> _Tower:
    made = _Tower(layers=len(layers), relu=network.settings.activation == "relu")
    made.sizes[0] = layers[0].in_features
    for i, layer in enumerate(layers):
        made.sizes[i + 1] = layer.out_features
        made.weight[i], made.bias[i] = _at(layer.weight), _at(layer.bias)
        if moments is not None:
            found = (*moments[layer.weight], *moments[layer.bias])
            for k, tensor in enumerate(found):
                made.moments[i][k] = _at(tensor)
    return made


def update(
    network: Any, steps: Any, terms: Mapping[str, float], parts: Sequence[Minibatch], optimizer: torch.optim.Optimizer,
    clip_norm: float,
) -> dict[str, float]:  # fmt: skip
    """Make all gradient steps of an update, as the optimizer would; return metrics of the last pass. `terms`: the loss,
    as the algorithm gives it."""
    order = np.concatenate([part.units for part in parts])
    edges = np.cumsum([0, *(len(part.units) for part in parts)])
    states = {p: adam_state(optimizer, p) for p in network.parameters() if p.requires_grad}
    own, reported = optimizer.param_groups[0], next(i for i, part in enumerate(parts) if part.is_reported)
    (beta1, beta2), decay = own["betas"], max(group["weight_decay"] for group in optimizer.param_groups)
    settings = {
        "lr": own["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "eps": own["eps"],
        "decay": decay,
        "clip_norm": clip_norm,
    }
    moments = {p: (state["exp_avg"], state["exp_avg_sq"]) for p, state in states.items()}
    made = int(next(iter(states.values()))["step"])
    found, after = _learn(network, steps, terms, order, edges, reported, moments, made, settings)
    for state in states.values():
        state["step"].fill_(after)
    return found


def adam_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """AdamW's own state of a parameter, made as AdamW makes it before its first step."""
    if not optimizer.state[p]:
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    found: dict[str, Tensor] = optimizer.state[p]
    return found


def _learn(
    network: Any, steps: Any, terms: Mapping[str, float], order: Ints, edges: Ints, reported: int,
    moments: Mapping[Any, tuple[Tensor, Tensor]], made: int, settings: Mapping[str, float],
) -> tuple[dict[str, float], int]:  # fmt: skip
    """Minibatch b is `order[edges[b]:edges[b + 1]]`. `moments`: Adam's, of each parameter; `made`: steps so far. Gives
    metrics from minibatch `reported` on, and steps made."""
    code = _code()
    assert code is not None
    columns = {name: np.ascontiguousarray(c.numpy()) for name, c in steps.columns.items()}
    with torch.no_grad():
        x = network.prepared(steps.observations).numpy()
    ldx = -(-x.shape[1] // LANES) * LANES
    rows = np.zeros((len(x), ldx), np.float32)
    rows[:, : x.shape[1]] = x
    actions = steps.actions.numpy()
    is_gaussian = isinstance(network.head, Gaussian)
    chosen = np.ascontiguousarray(actions, np.float32 if is_gaussian else np.int64)
    legal = np.ascontiguousarray(x[:, x.shape[1] - network.mask_width :]) if network.mask_width else None
    stats, choices = np.zeros(len(STATS)), np.array(network.spaces.choices, np.int64)
    old = columns.get("old_logprobs", columns["logprobs"])
    task = _Learning(
        policy=_tower(_linears(network.trunk, network.out), network, moments),
        has_critic=network.value is not None,
        is_gaussian=is_gaussian, parts=network.head.draws, is_masked=legal is not None, choices=_at(choices),
        x=_at(rows), legal=None if legal is None else _at(legal), old=_at(old), advantages=_at(columns["advantages"]),
        actions=_at(chosen) if is_gaussian else None, chosen=None if is_gaussian else _at(chosen),
        order=_at(order), edges=_at(edges), minibatches=len(edges) - 1, reported=reported, ldx=ldx, steps=made,
        stats=_at(stats), threads=torch.get_num_threads(), **terms, **settings,
    )  # fmt: skip
    if network.value is not None:
        task.critic = _tower(_linears(network.critic_trunk, network.value), network, moments)
        task.returns, task.values = _at(columns["returns"]), _at(columns["values"])
    if is_gaussian:
        task.log_std = _at(network.head.log_std)
        task.std_moments[0], task.std_moments[1] = (_at(t) for t in moments[network.head.log_std])
    if not code.tm_net_learn(ctypes.byref(task)):
        raise MemoryError("no memory for a network's minibatches")
    found = _metrics(dict(zip(STATS, stats.tolist())), bool(terms["is_ratio"]), network.value is not None, terms)
    if network.value is not None:
        found |= _judged(columns["values"], columns["returns"])
    return found, int(task.steps)


def _metrics(
    sums: Mapping[str, float], is_ratio: bool, has_critic: bool, terms: Mapping[str, float]
) -> dict[str, float]:
    found = {}
    for name, value in sums.items():
        by = sums["steps"] if name in OF_STEPS else 1.0 if name in OF_ALL else sums["count"]
        found[name] = value / max(1.0, by)
    left_out = {"count", "steps"} | (set() if is_ratio else set(OF_RATIO)) | (set() if has_critic else {"value_loss"})
    if not has_critic or terms["value_clip"] < 0:
        left_out.add("value_clip_share")
    return {name: value for name, value in found.items() if name not in left_out}


def _judged(values: Floats, returns: Floats) -> dict[str, float]:
    """Means from which a critic's explained variance is made."""
    old, wanted = values.astype(np.float64), returns.astype(np.float64)
    error = wanted - old
    return {
        "return_mean": float(wanted.mean()),
        "return_square": float(np.square(wanted).mean()),
        "value_error_mean": float(error.mean()),
        "value_error_square": float(np.square(error).mean()),
        "value_mean": float(old.mean()),
        "value_tokens": float(len(old)),
    }
