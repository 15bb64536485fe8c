"""Checks products of parallel sizes by arithmetic alone, against the ranks that exist and against the model. Every
refusal names the key, its value, and sizes that would do. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.check.sizes import undivided, unfit
from tidemill.errors import either
from tidemill.models import families
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe.config import Config, ModelSettings, ParallelSettings
from tidemill.recipe.ranks import divisors, folding_problem


def problems(config: Config, model: ModelSettings) -> Iterator[str]:
    """Check all sizes. `model` is the one that will be trained."""
    parallel, shape = config.learn.parallel, shape_of(model)
    yield from _sequence(config)
    yield from size_problems(parallel, shape)
    for key, sizes in (("kl", config.algorithm.kl.parallel), ("critic", config.algorithm.critic.parallel)):
        if sizes is not None:
            yield from _beside(f"algorithm.{key}.parallel", sizes, parallel, shape)
    if config.rollout.tp > 1:
        yield from _engine(config, shape)


def _beside(key: str, sizes: ParallelSettings, learners: ParallelSettings, shape: ModelShape | None) -> Iterator[str]:
    """Check another model that is cut over the learner's ranks by sizes of its own."""
    if sizes.ranks != learners.ranks:
        what = f"it runs on the learner's {learners.ranks}"
        yield unfit(key, f"{sizes.ranks} ranks", what, "sizes with the same product would do")
    yield from (problem.replace("learn.parallel", key) for problem in size_problems(sizes, shape))


def size_problems(parallel: ParallelSettings, shape: ModelShape | None) -> Iterator[str]:
    """Check the sizes themselves, and against the model where it is known."""
    if folding := folding_problem(parallel):
        yield folding
    if shape is None:
        return
    if not shape.is_latent:
        yield from _heads(parallel, shape)
    yield from _widths(parallel, shape)
    stages = parallel.pp * parallel.pp_chunks
    if stages > shape.layers:
        what = f"it is more than the model's {shape.layers} layers"
        yield unfit("learn.parallel.pp × pp_chunks", stages, what, f"at most {shape.layers} would do")


def _heads(parallel: ParallelSettings, shape: ModelShape) -> Iterator[str]:
    tp, cp = parallel.tp, parallel.cp
    if shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        what = f"the model's {shape.heads} heads and {shape.kv_heads} key/value heads"
        yield undivided("learn.parallel.tp", tp, what, head_cuts(shape))
    left = max(1, shape.heads // tp)
    if parallel.cp_form == "ulysses" and left % cp:
        fit = f"{either(divisors(left))} would do, or cp_form=ring"
        yield undivided("learn.parallel.cp", cp, f"the {left} heads that tp {tp} leaves cp_form ulysses", fit)


def _widths(parallel: ParallelSettings, shape: ModelShape) -> Iterator[str]:
    tp, ep = parallel.tp, parallel.ep
    if shape.intermediate % tp:
        fit = [n for n in head_cuts(shape) if shape.intermediate % n == 0]
        yield undivided("learn.parallel.tp", tp, f"the MLP's width {shape.intermediate}", fit)
    if shape.experts and shape.experts % (ep * tp):
        cuts = [n for n in divisors(shape.experts) if shape.experts % (n * ep) == 0]
        fit_words = f"with ep {ep}, tp {either(cuts)} would do" if cuts else "lower ep"
        yield undivided("learn.parallel.tp × ep", tp * ep, f"the model's {shape.experts} experts", fit_words)
    if ep > 1 and not shape.experts:
        yield unfit("learn.parallel.ep", ep, "the model has no experts", "1 would do")


def _engine(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """Check a rollout engine over several ranks."""
    tp, ranks = config.rollout.tp, config.learn.parallel.ranks
    if config.cluster.placement.rollout == "colocated" and ranks % tp:
        yield undivided("rollout.tp", tp, f"the {ranks} ranks of learn.parallel that engines share", divisors(ranks))
    if shape is not None:
        yield from engine_problems(tp, shape)


def engine_problems(tp: int, shape: ModelShape) -> Iterator[str]:
    """Check that each rank of an engine gets whole key/value heads, and an equal share of the MLP and of the
    experts."""
    served = families.llama_forms(mixtures=True)
    if shape.architecture not in served:
        what = f"engines over several ranks serve {', '.join(served)}, not {shape.architecture}"
        yield unfit("rollout.tp", tp, what, "1 would do")
        return
    dense = shape.intermediate if shape.moe_layers < shape.layers else shape.shared_width
    parts = {"key/value heads": shape.kv_heads, "MLP width": dense, "experts": shape.experts}
    if any(size % tp for size in parts.values()):
        what = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
        fit = [n for n in divisors(shape.kv_heads) if not any(size % n for size in parts.values())]
        yield undivided("rollout.tp", tp, f"the model's {what}", fit)


def engine_sizes(config: Config, shape: ModelShape) -> list[int]:
    """List values of rollout.tp that the model and, colocated, the learner's ranks allow."""
    ranks = config.learn.parallel.ranks
    is_colocated = config.cluster.placement.rollout == "colocated"
    return [
        n
        for n in range(config.rollout.tp, max(config.rollout.tp, shape.kv_heads) + 1)
        if n == config.rollout.tp or (not any(engine_problems(n, shape)) and (not is_colocated or ranks % n == 0))
    ]


def _sequence(config: Config) -> Iterator[str]:
    """Check that every rank gets a token of each micro-batch: rows are padded to a multiple of the ranks that share
    them."""
    parallel, tokens = config.learn.parallel, config.train.tokens_per_microbatch
    multiple = parallel.cp * parallel.tp * (2 if parallel.cp > 1 else 1)
    if multiple > tokens:
        cut = f"sequences are cut into multiples of {multiple} tokens"
        what = f"{cut} (learn.parallel.cp {parallel.cp} × tp {parallel.tp})"
        yield unfit("train.tokens_per_microbatch", tokens, what, f"at least {multiple} would do")


def head_cuts(shape: ModelShape) -> list[int]:
    """List tensor-parallel sizes: they divide the heads, and divide or are divided by the key/value heads."""
    return [n for n in divisors(shape.heads) if max(shape.kv_heads, n) % min(shape.kv_heads, n) == 0]
