"""A learner whose model computes in MindSpore, in an interpreter of its own, behind the seam of every learner.

Losses stay where they are: this process asks for the log-probabilities and entropies of a micro-batch, computes the
algorithm's loss and its gradients towards them, and sends those back. So every algorithm over a policy works, a step's
metrics are computed by the same lines, and MindSpore knows no algorithm. Checkpoints have the form of every other
learner's: a run goes on under either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tidemill.algorithms.api import Algorithm
from tidemill.batch import Batch
from tidemill.device import host
from tidemill.device.ascend import settings as npu_settings
from tidemill.errors import ConfigError, ModelError
from tidemill.interpreter import find_python
from tidemill.learn.checkpoint.stored import StoredSource
from tidemill.learn.engine import Learner
from tidemill.learn.mindspore.fleet import FIRST, SECOND, WEIGHT, Fleet
from tidemill.learn.mindspore.shapes import Shapes
from tidemill.learn.model import Row
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.rows.packing import Ints, PackedBatch
from tidemill.models import logits
from tidemill.models.attention.contexts import KINDS, Attention
from tidemill.models.attention.registry import attention_window
from tidemill.recipe.config import Config

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # tables that depend on nothing but the position
USUAL, REMEDY = ".venv-mindspore", "`make mindspore` makes one; or set learn.mindspore.python"
TARGETS = {"cpu": "CPU", "npu": "Ascend"}

Scores = tuple[Tensor, Tensor]


class MindSporeLearner(Learner):
    """`model` is this process's, on its device or in host memory: it is given the weights at `publish`."""

    def __init__(self, model: Any, config: Config, algorithm: Algorithm, updates: int, log: Path) -> None:
        check(model, config, next(model.parameters()))
        self.fleet: Fleet | None = None
        super().__init__(model, config, algorithm, updates)
        named = dict(self.model.named_parameters())
        shapes = {name: tuple(p.shape) for name, p in named.items()}
        settings = config.learn.mindspore
        self.fleet = Fleet(
            find_python("learn.mindspore.python", settings.python, USUAL, REMEDY), settings.processes, shapes, log,
            _environment(config, self.device), _shapes(model),
        )  # fmt: skip
        try:
            self._share(named)
            self.mindspore = self.fleet.begin(self._settings(), *_rotary(model))
        except BaseException:
            self.fleet.close()
            raise
        self.gradients = RemoteGradients(self.fleet, named)  # type: ignore[assignment]

    def _attention(self) -> Attention:
        return KINDS["blocks"]  # whose tables of places are what MindSpore is given

    def _optimizer(self, named: Mapping[str, Parameter]) -> torch.optim.Optimizer:
        """Made for what it keeps: MindSpore takes the steps."""
        learn = self.config.learn
        return torch.optim.AdamW(self.own.values(), lr=learn.lr, betas=learn.betas, eps=learn.eps)

    @torch.no_grad()
    def _share(self, named: Mapping[str, Parameter]) -> None:
        """Put the weights where both sides see them, and say where the optimizer's state is to be found."""
        assert self.fleet is not None
        own = self.fleet.own
        for name, p in named.items():
            own[WEIGHT][name].copy_(p)
            if p.device.type == "cpu":
                p.data = own[WEIGHT][name]
        for name, p in self.own.items():
            state = {"step": torch.zeros(()), "exp_avg": own[FIRST][name], "exp_avg_sq": own[SECOND][name]}
            self.optimizer.state[p] = state

    def _settings(self) -> dict[str, Any]:
        model, learn = self.model.config, self.config.learn
        layer = self.model.get_decoder().layers[0]
        attention, padding = layer.self_attn, self.model.get_input_embeddings().padding_idx
        form = {
            "layers": model.num_hidden_layers,
            "heads": model.num_attention_heads,
            "kv_heads": model.num_key_value_heads,
            "dim": attention.head_dim,
            "eps": model.rms_norm_eps,
            "has_bias": attention.q_proj.bias is not None,
            "has_out_bias": attention.o_proj.bias is not None,
            "has_norms": hasattr(attention, "q_norm"),
            "is_tied": self.model.lm_head.weight is self.model.get_input_embeddings().weight,
            "padding": -1 if padding is None else int(padding),
            "temperature": float(logits.shape(self.model, self.config.rollout.temperature)["temperature"]),
            "chunk": learn.logprob_chunk,
            "recompute": learn.recompute == "full",
        }
        target = TARGETS[self.device.type]
        adam = {"betas": list(learn.betas), "eps": learn.eps, "weight_decay": learn.weight_decay}
        at = {"target": target, "device": self.device.index or 0, "threads": _threads(self.config)}
        return {"form": form, **at, **adam}

    # Computing

    def _scores(self, row: Row) -> Scores:
        assert self.fleet is not None
        return self.fleet.forward([row.own])[0]

    def _play(self, batch: Batch | None, dealt: list[Ints]) -> None:
        """As many micro-batches at once as there are processes."""
        assert self.fleet is not None
        at_once = len(self.fleet.members)
        for start in range(0, len(dealt), at_once):
            parts = [batch.gather(rows) for rows in dealt[start : start + at_once] if batch is not None and len(rows)]
            rows = [self._row(part) for part in parts]
            learned: list[tuple[PackedBatch, Scores]] = []
            for row, scores in zip(rows, self.fleet.forward([row.own for row in rows])):
                if (gradients := self._gradients_of(row, scores)) is not None:
                    learned.append((row.own, gradients))
            if learned:
                self.fleet.backward([row for row, _ in learned], [gradients for _, gradients in learned])

    def _gradients_of(self, row: Row, scores: Scores) -> Scores | None:
        """Of the loss, towards log-probabilities and entropies; None where it has none."""
        leaves = tuple(x.requires_grad_(torch.is_grad_enabled()) for x in scores)
        loss = self._loss(row, (leaves[0], leaves[1]))
        if not loss.requires_grad:
            return None
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        first, second = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found))
        return first.detach(), second.detach()

    def _step(self) -> None:
        assert self.fleet is not None and isinstance(self.gradients, RemoteGradients)
        done = next(iter(self.optimizer.state.values()))["step"]
        number = int(done) + 1
        self.fleet.step(number, self.optimizer.param_groups[0]["lr"], self.gradients.scale)
        for state in self.optimizer.state.values():
            state["step"].fill_(number)

    # Weights and checkpoints

    @torch.no_grad()
    def publish(self) -> None:
        """Bring MindSpore's weights into this process's model."""
        assert self.fleet is not None
        self.fleet.give(WEIGHT)
        for name, p in self.model.named_parameters():
            if p.data_ptr() != self.fleet.own[WEIGHT][name].data_ptr():
                p.copy_(self.fleet.own[WEIGHT][name])

    def pieces(self) -> dict[str, Tensor]:
        self.publish()
        return super().pieces()

    def tensors(self) -> dict[str, Tensor]:
        assert self.fleet is not None
        self.publish()
        self.fleet.give(FIRST, SECOND)
        return super().tensors()

    def _take_up(self, source: StoredSource, counts: Mapping[str, Any], role: str = "") -> None:
        super()._take_up(source, counts, role)
        if self.fleet is None:
            return
        for name, p in self.model.named_parameters():
            self.fleet.own[WEIGHT][name].copy_(p.detach())
        for name, p in self.own.items():
            state = self.optimizer.state[p]
            for kind in (FIRST, SECOND):
                self.fleet.own[kind][name].copy_(state[kind])
                state[kind] = self.fleet.own[kind][name]
            state["step"] = torch.as_tensor(float(state["step"]))
        self.fleet.take(WEIGHT, FIRST, SECOND)

    def held(self) -> list[Tensor]:
        """Nothing: what learning keeps is in the other processes."""
        return []

    def join(self, meshes: Meshes) -> None:
        raise ConfigError(
            "learn.backend=mindspore learns in one worker", "set learn.mindspore.processes instead of cluster.learners"
        )

    def close(self) -> None:
        super().close()
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None


class RemoteGradients:
    """What the update asks of gradients, which lie with MindSpore."""

    def __init__(self, fleet: Fleet, named: Mapping[str, Parameter]) -> None:
        self.fleet, self.named, self.wide = fleet, dict(named), False
        self.scale = 1.0

    def finish(self) -> None:
        self.fleet.add_up()

    def divide_and_clip(self, divisor: float, largest_norm: float | None) -> float:
        norm = self.fleet.norm(divisor)
        share = 1.0
        if largest_norm is not None and math.isfinite(largest_norm) and math.isfinite(norm):
            share = min(1.0, largest_norm / (norm + 1e-6))
        self.scale = share / divisor
        return norm

    def of(self, p: Parameter) -> None:
        return None

    def not_finite(self) -> list[str]:
        return sorted(self.fleet.not_finite())

    def clear(self) -> None:
        self.fleet.clear()

    def close(self) -> None:
        """They end with their processes."""


def check(model: Any, config: Config, weight: Tensor) -> None:
    """Refuse a model that MindSpore's decoder does not compute, and devices that it cannot have."""
    name, settings = type(model).__name__, model.config
    remedy = "set learn.backend=torch"
    kind = weight.device.type
    if kind not in TARGETS:
        raise ConfigError(f"learn.backend=mindspore does not compute on {kind}", f"set device=cpu, or {remedy[4:]}")
    if kind == "npu" and config.learn.mindspore.processes > 1:
        raise ConfigError("several processes of MindSpore's cannot share an NPU", "set learn.mindspore.processes=1")
    if name not in FAMILIES:
        raise ModelError(f"learn.backend=mindspore knows {', '.join(FAMILIES)}, not {name}", remedy)
    layers, rope = model.get_decoder().layers, model.get_decoder().rotary_emb.rope_type
    odd = [
        what
        for what, is_so in (
            (f"activation {settings.hidden_act}", settings.hidden_act != "silu"),
            (f"rotary positions of kind {rope}", rope not in STATIC_ROPE),
            ("layers with a window", any(attention_window(layer.self_attn) is not None for layer in layers)),
            ("a bias in the MLP", layers[0].mlp.gate_proj.bias is not None),
            ("a bias in the output layer", model.lm_head.bias is not None),
            ("bounded logits", logits.shape(model, 1.0).get("softcap") is not None),
        )
        if is_so
    ]
    if odd:
        raise ModelError(f"learn.backend=mindspore does not compute {', '.join(odd)}", remedy)


def _shapes(model: Any) -> Shapes:
    """Weighs shapes by their products: of a token in all layers, a pair in attention, a target in the last."""
    config, decoder = model.config, model.get_decoder()
    inner = sum(p.numel() for p in decoder.layers.parameters())
    width = config.num_attention_heads * decoder.layers[0].self_attn.head_dim
    return Shapes(
        per_token=float(inner),
        per_pair=float(2 * width * config.num_hidden_layers),
        per_target=float(model.lm_head.weight.numel()),
    )


@torch.no_grad()
def _rotary(model: Any) -> Scores:
    """cos and sin of every position (window, dim), as the model's own module makes them."""
    window = int(model.config.max_position_embeddings)
    places = torch.arange(window, device=next(model.parameters()).device).unsqueeze(0)
    like = torch.zeros(1, dtype=torch.float32, device=places.device)
    cos, sin = model.get_decoder().rotary_emb(like, places)
    return cos[0].float().cpu(), sin[0].float().cpu()


def _threads(config: Config) -> int:
    """Of each process."""
    return max(1, (config.threads or host.cores()) // config.learn.mindspore.processes)


def _environment(config: Config, device: torch.device) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": str(_threads(config)), "GLOG_v": "3"}  # errors alone
    if device.type == "npu":
        own |= npu_settings.environment([npu_settings.LEARNER], config.deterministic)
    return own
