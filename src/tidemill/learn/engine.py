"""The learner: log-probabilities of packed samples, gradients added up over micro-batches, one update.

One class for one device and for any product of ranks (`learn.parallel`). Over ranks every rank makes the same calls.
`accumulate` takes this rank's share of the same batches, `accumulate_own` samples that are this rank's alone; `update`
adds up what ranks hold in parts and steps on all of them, or skips on all of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tidemill.algorithms.api import Algorithm, Kept, Stat, Stats, total
from tidemill.algorithms.shared.aggregate import local_weights, whole
from tidemill.batch import Batch, Column
from tidemill.learn.checkpoint.folders import Saving
from tidemill.learn.checkpoint.pieces import save_whole
from tidemill.learn.checkpoint.reading import open_checkpoint, read_own, read_states
from tidemill.learn.checkpoint.saver import Saver, default_saver
from tidemill.learn.checkpoint.stored import HeldSource, StoredSource
from tidemill.learn.ema import Ema
from tidemill.learn.forward import Scores
from tidemill.learn.gradients import Gradients
from tidemill.learn.layers import kept_activations
from tidemill.learn.model import ALONE, MeshModel, Row, nothing, pieces_of
from tidemill.learn.notes import Noted, Notes
from tidemill.learn.optim.make import learning_rate, optimizer_of, plain_state, restored
from tidemill.learn.optim.muon import MatrixRanks
from tidemill.learn.parallel import adapters
from tidemill.learn.parallel.collectives import make_links
from tidemill.learn.parallel.cuts import local, renamed
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.pace import RankPace
from tidemill.learn.rows.packing import Ints, PackedBatch
from tidemill.learn.rows.tokens import mismatch, on_host, stats_from_plain, stats_to_plain, token_batch
from tidemill.models import lora
from tidemill.models.layers.narrow import narrow
from tidemill.models.parts import layers_of
from tidemill.recipe.config import Config
from tidemill.reshard.layouts.layout import merge
from tidemill.reshard.swap import learner_tensors

Show = Callable[[str, Mapping[str, Tensor]], None]
CRITIC = "critic."  # before its names in a checkpoint
REFERENCE = "reference."  # and of a reference that moves


class Learner(MeshModel):
    """Owns the policy's optimizer. `accumulate` any number of batches, then `update` once."""

    def __init__(
        self,
        model: Any,
        config: Config,
        algorithm: Algorithm,
        updates: int,
        meshes: Meshes = ALONE,
        source: StoredSource | None = None,
        device: torch.device | None = None,
        begins: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        if config.learn.lora_rank:
            begins = {**begins, **adapters.attach(model, config.learn, config.seed, source is not None)}
        super().__init__(model, config, meshes, source, device, begins)
        if source is not None:
            adapters.begin_magnitudes(model)
        self.algorithm, self.updates = algorithm, updates
        named = dict(model.named_parameters())
        is_wide = config.learn.master == "float32"
        self.gradients = Gradients(named, self.cuts, meshes, self.links, is_wide)
        # The optimizer works on plain tensors: the same arithmetic, and the same bits, on one rank as on many.
        self.own = {name: _plain(p) for name, p in named.items() if p.requires_grad}
        self.optimizer = self._optimizer(named)
        self.ema = Ema(self.own, config.learn.ema) if config.learn.ema else None
        self.version = 0  # updates made
        self.skipped = 0  # updates not made because a gradient was not finite
        self.show: Show | None = None  # told gradients and weights of every update, for dumps
        self.pace = RankPace(self.flight)
        self.notes = Notes(config.observe.samples_per_step)
        self._notes_here = all(link.rank == 0 for name, link in self.links.items() if name in ("tp", "cp"))
        self.saver: Saver | None = None
        if meshes.made is not None:
            self.saver = default_saver(config.learn.parallel.timeout_s)
        self._stats: list[Stats] = []
        self._whole = 0.0  # of samples that every rank was given
        self._own_whole = 0.0  # of samples that only ranks like this one were given

    def _optimizer(self, named: Mapping[str, Parameter]) -> torch.optim.Optimizer:
        learn = self.config.learn
        layers = {id(p) for layer in layers_of(self.model) for p in layer.parameters() if p.ndim == 2}
        inner = {name: self.own[name] for name, p in named.items() if id(p) in layers and name in self.own}
        shared = None
        if learn.optimizer == "muon":
            shared = MatrixRanks.of(self.meshes, self.flight, self.layout(), inner)
        held = {id(p): named[name] for name, p in self.own.items()}
        own, inner_ids = list(self.own.values()), {id(p) for p in inner.values()}
        return optimizer_of(own, inner_ids, learn, lambda p: self.gradients.of(held[id(p)]), shared, self.config.seed)

    def join(self, meshes: Meshes) -> None:
        """Become one of several copies, each with its own samples. Nothing of the model is cut."""
        assert meshes.computes_alone
        self.meshes, self.flight = meshes, Flight.of_world(self.config.learn.parallel.timeout_s, True)
        self.links = make_links(meshes, self.flight, 0)
        self.gradients.join(meshes, self.links)
        self.pace, self.saver = RankPace(self.flight), default_saver(self.config.learn.parallel.timeout_s)
        self.__dict__.pop("_layout", None)

    # Learning

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of these samples (complete groups, the same on every rank) to the update's."""
        self._whole += whole(batch, self.config)
        self._add(batch, self._dealt)

    def accumulate_own(self, batch: Batch | None) -> None:
        """The same where each data-parallel rank has samples (complete groups) of its own, or none at all.

        Every rank calls it as often as the others, unless it computes alone; ranks of one tensor, context or pipeline
        group give the same."""
        self._own_whole += 0.0 if batch is None else whole(batch, self.config)
        self._add(batch, self._own_rows)

    def _add(self, batch: Batch | None, deal: Callable[[Batch | None, bool], list[Ints]]) -> None:
        """`deal` gives the rows of this rank's micro-batches. Rows that cannot have a gradient are scored for the
        metrics and spared the backward pass."""
        if batch is not None:
            batch = batch.merge({"weight": local_weights(batch, self.config)})
        teaches = self._teaches(batch) if batch is not None else np.zeros(0, np.bool_)
        with self.pace.busy():
            for is_taught in (True, False):
                rows = np.flatnonzero(teaches == is_taught)
                own = batch.gather(rows) if batch is not None and len(rows) else None
                with torch.set_grad_enabled(is_taught):
                    self._play(own, deal(own, self.algorithm.input_kind == "pairs"))

    def _teaches(self, batch: Batch) -> Kept:
        return self.algorithm.teaches(batch, self.config)

    def _play(self, batch: Batch | None, dealt: list[Ints]) -> None:
        """Micro-batches one after another, or through the pipeline; one without rows is a filler."""
        parts = (batch.gather(rows) if batch is not None and len(rows) else None for rows in dealt)
        if self.pipeline is not None:
            made = [self._row(part) for part in parts]
            play = self.pipeline.learn if torch.is_grad_enabled() else self.pipeline.score
            if made:
                play([row.own for row in made], lambda i, scores: self._loss(made[i], scores))
            return
        for part in parts:
            row = self._row(part)
            with kept_activations(self.config.learn, self.model):
                loss = self._loss(row, self._scores(row))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

    def _loss(self, row: Row, scores: Scores) -> Tensor:
        if row.part is None or row.packed is None:
            return nothing(scores)
        loss, stats = self._loss_of(row.part, row.packed, row.whole(scores))
        self._stats.append({"loss": Stat(loss.detach(), reduce="sum"), **stats})
        return loss

    def _loss_of(self, part: Batch, packed: PackedBatch, scores: Scores) -> tuple[Tensor, Stats]:
        tokens = token_batch(part, packed, scores)
        if self._notes_here:
            self.notes.keep(part, tokens)
        loss, stats = self.algorithm.loss(tokens, self.config)
        return loss, stats | mismatch(part, tokens, self.version, self.config.rollout.engine)

    def noted(self, shown: list[int]) -> list[Noted]:
        """What the loss saw of some samples since the last call; of `shown` when they are learned from."""
        self.notes.ask(shown)
        return self.notes.drain()

    def update(self) -> dict[str, float]:
        """One optimizer step from what was accumulated; metrics of the whole update, the same on every rank."""
        learn = self.config.learn
        divisor = max(self._whole + self._summed(self._own_whole), 1.0)
        self.gradients.finish()
        norm = self.gradients.divide_and_clip(divisor, learn.clip_norm)
        lr = learning_rate(learn, self.version, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._tell("gradient")
        self._find_own()
        is_finite = math.isfinite(norm)
        if is_finite:
            self._step()
        else:
            self.skipped += 1
        fault = {} if is_finite else self._fault()
        if self.ema is not None:
            self.ema.update()
        self._tell("weight")
        self.gradients.clear()
        self.version += 1
        metrics = total(self._stats_of_all())
        metrics["loss"] = metrics.get("loss", 0.0) / divisor
        metrics |= self._loads()
        self._stats, self._whole, self._own_whole = [], 0.0, 0.0
        metrics |= self.pace.report(self.links["world"])
        if fault:
            fault["not_finite_loss"] = float(not math.isfinite(metrics["loss"]))
        return {**metrics, **fault, "grad_norm": norm, "lr": lr, "skipped_updates": float(self.skipped)}

    def _summed(self, own: float) -> float:
        """Over ranks with other samples."""
        over = self.links["dp"]
        if over.size == 1:
            return own
        return float(over.all_reduce(torch.tensor(own, dtype=torch.float64)))  # on the host: exact, and nobody waits

    def _step(self) -> None:
        """torch's own AdamW looks for a gradient where the parameter is."""
        apart = {name: p for name, p in self.own.items() if p is not self.gradients.named[name]}
        if not self.gradients.wide:
            for name, p in apart.items():
                p.grad = self.gradients.of(self.gradients.named[name])
        self.optimizer.step()
        for p in apart.values():
            p.grad = None

    def _find_own(self) -> None:
        """FSDP may have moved them."""
        if self.meshes.data is not None:
            named = dict(self.model.named_parameters())
            for name, p in self.own.items():
                p.data = local(named[name].data)

    def _stats_of_all(self) -> list[Stats]:
        """Ranks that share samples have the same numbers, so one of each is asked."""
        if self.links["world"].size == 1:
            return on_host(self._stats)
        found = [stats for part in self.links["dp"].gather_plain(stats_to_plain(self._stats)) for stats in part]
        if "pp" in self.links:
            found = self.links["pp"].gather_plain(found)[-1]  # the last stage has them
        return stats_from_plain(found)

    def _loads(self) -> dict[str, float]:
        """Of experts, over all ranks."""
        if self.routers is None:
            return {}
        for x in self.routers.sums():
            self.links["world"].all_reduce(x)
        return self.routers.finish()

    def _fault(self) -> dict[str, float]:
        """Where a gradient that is not finite began: backward passes go from the last layer to the first."""
        broken = self.gradients.not_finite()
        names = {id(p): name for name, p in self.model.named_parameters()}
        layers = [{names.get(id(p)) for p in layer.parameters()} for layer in layers_of(self.model)]
        found = [i for i, own in enumerate(layers) if own & set(broken)]
        last = max(self.links["world"].gather_plain(max(found, default=-1)))
        learned = {name for part in self.links["world"].gather_plain(list(self.gradients.named)) for name in part}
        return {
            "not_finite_tensors": float(len(broken)),
            "not_finite_layer": float(last),
            "learned_tensors": float(len(learned)),
        }

    def _tell(self, what: str) -> None:
        if self.show is None:
            return
        found = {n: p if what == "weight" else self.gradients.of(p) for n, p in self.model.named_parameters()}
        self.show(what, {n: t for n, t in found.items() if t is not None})

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights are their running mean, where one is kept."""
        if self.ema is None:
            yield
            return
        self._find_own()
        with self.ema.swapped():
            yield

    def forget(self) -> None:
        """Drop what was accumulated since the last update, on this rank; all ranks do so together."""
        self.gradients.clear()
        self._stats, self._whole, self._own_whole = [], 0.0, 0.0
        if self.routers is not None:
            self.routers.forget()

    def publish(self) -> None:
        """Nothing to do here: rollout in this process reads these very tensors."""

    # What lies where, and what is kept

    def held(self) -> list[Tensor]:
        return learner_tensors(self.model, self.optimizer)

    def optimizer_tensors(self) -> list[Tensor]:
        return [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]

    def tensors(self) -> dict[str, Tensor]:
        """This rank's pieces of what a resumed run needs, by name: weights, adapters, the optimizer's state beside
        them. What is frozen under adapters is in the model that the run started from, and is not kept again."""
        pieces, named = pieces_of(self.model), dict(self.model.named_parameters())
        found = {f"adapter.{name}": t for name, t in pieces.items() if adapters.is_adapter(name)}
        is_kept = {name: not found or name not in named or named[name].requires_grad for name in pieces}
        found |= {f"model.{n}": t for n, t in pieces.items() if is_kept[n] and not adapters.is_adapter(n)}
        for name, p in self.own.items():
            found |= {f"optimizer.{name}.{key}": t for key, t in plain_state(self.optimizer, p).items()}
        routers = self.routers.state() if self.routers is not None else {}
        return found | routers | (self.ema.state() if self.ema is not None else {})

    def counts(self) -> dict[str, int]:
        return {"version": self.version, "skipped": self.skipped}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed run needs: this rank's tensors, and plain values beside them."""
        return self.tensors(), self.counts()

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """What `state` gave, or `learn.checkpoint.load`: whole tensors."""
        self._take_up(HeldSource(tensors), state)

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        *,
        keep: int,
        best: bool = False,
        metric: float | None = None,
        more: Mapping[str, Tensor] | None = None,
        critic: Learner | None = None,
        reference: MeshModel | None = None,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint. Ranks begin to write it, and training may go on at once; with `wait`, or after `settle`,
        it is on disk.

        `more`: tensors that belong to it and are nobody's pieces, the same on every rank. `critic`, and a `reference`
        that moves, go with it."""
        tensors, layout = self.tensors() | dict(more or {}), self.layout()
        state = {**state, "learner": self.counts()}
        if critic is not None:
            tensors |= {f"{CRITIC}{name}": t for name, t in critic.tensors().items()}
            layout = merge([layout, renamed(critic.layout(), CRITIC)])
            state["critic"] = critic.counts()
        if reference is not None:
            tensors |= reference_pieces(reference)
            layout = merge([layout, renamed(reference.layout(), REFERENCE)])
        job = Saving(folder, step, state, keep, best, metric)
        if self.saver is None:
            save_whole(job, tensors)
            return
        self.saver.save(job, tensors, layout)
        if wait:
            self.saver.wait()

    def settle(self) -> None:
        """Wait until a checkpoint that is under way is on disk."""
        if self.saver is not None:
            self.saver.wait()

    def load(self, path: Path, critic: Learner | None = None, reference: MeshModel | None = None) -> dict[str, Any]:
        """Take up a checkpoint that any number of ranks wrote; gives its state."""
        source, state = open_checkpoint(path)
        with source:
            self._take_up(source, state["learner"])
            if critic is not None:
                critic._take_up(source, state["critic"], CRITIC)
            if reference is not None:
                layout = renamed(reference.layout(), REFERENCE)
                read_own(source, reference_pieces(reference), layout, self.meshes.rank)
        return state

    def _take_up(self, source: StoredSource, counts: Mapping[str, Any], role: str = "") -> None:
        """What is not learned stays as it was loaded."""
        layout, rank = renamed(self.layout(), role), self.meshes.rank
        named, targets = dict(self.model.named_parameters()), {}
        for name, piece in pieces_of(self.model).items():
            full = f"{role}{'adapter' if adapters.is_adapter(name) else 'model'}.{name}"
            if named[name].requires_grad if name in named else full in source:
                targets[full] = piece
        if self.ema is not None:
            targets |= {f"{role}{name}": mean for name, mean in self.ema.state().items()}
        read_own(source, targets, layout, rank)
        for name, kept in read_states(source, self.own, layout, rank, role):
            self.optimizer.state[self.own[name]] = restored(self.optimizer, self.own[name], kept)
        if self.routers is not None:
            found = [name for name in source.pieces if name.startswith(f"{role}routers.")]
            self.routers.restore({name.removeprefix(role): source.read(name) for name in found})
        self.version, self.skipped = int(counts["version"]), int(counts["skipped"])

    def close(self) -> None:
        self.settle()
        self.gradients.close()
        super().close()


def _plain(p: Parameter) -> Parameter:
    """Of a weight that lies in pieces this rank's, as a parameter of its own; any other is its own."""
    return Parameter(local(p).detach()) if isinstance(p, DTensor) else p


def reference_pieces(reference: MeshModel) -> dict[str, Tensor]:
    """What lies on this rank of a reference, as a checkpoint calls it."""
    return {f"{REFERENCE}{name}": piece for name, piece in pieces_of(reference.model).items()}


def freeze(model: Any, weights: Literal["same", "int8", "fp8"] = "same") -> Any:
    """Build the frozen reference: a copy of the model, or with low-rank adapters the same model without them."""
    if lora.is_attached(model):
        return lora.Reference(model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    return frozen if weights == "same" else narrow(frozen, weights)


def score(model: Any, batch: Batch, config: Config) -> Column:
    """Log-probabilities of every response token under a model of one device, as a jagged column."""
    return MeshModel(model, config, is_ready=True).logprobs(batch)
