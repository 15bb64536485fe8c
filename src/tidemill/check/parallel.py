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
from tidemill.rollout.native.ranks.grid import Grid

MOST_ENGINE_RANKS = 64  # that a remedy suggests
ONE_NODE = 8  # ranks that share a layer are within one


def problems(config: Config, model: ModelSettings) -> Iterator[str]:
    """Check all sizes. `model` is the one that will be trained."""
    parallel, shape = config.learn.parallel, shape_of(model)
    yield from _sequence(config)
    yield from size_problems(parallel, shape)
    for key, sizes in (("kl", config.algorithm.kl.parallel), ("critic", config.algorithm.critic.parallel)):
        if sizes is not None:
            yield from _beside(f"algorithm.{key}.parallel", sizes, parallel, shape)
    if config.rollout.ranks > 1:
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
    grid, ranks = Grid.of(config.rollout), config.learn.parallel.ranks
    if config.cluster.placement.rollout == "colocated" and ranks % grid.ranks:
        what = f"the {ranks} ranks of learn.parallel that engines share"
        yield undivided("rollout.tp × dp × pp", grid.ranks, what, divisors(ranks))
    if shape is not None:
        yield from engine_problems(grid, shape)


def engine_problems(grid: Grid, shape: ModelShape) -> Iterator[str]:
    """Check that each rank of an engine gets whole heads, and an equal share of the MLP and of the experts."""
    served = families.served_over_ranks()
    if shape.architecture not in served:
        what = f"engines over several ranks serve {', '.join(served)}, not {shape.architecture}"
        yield unfit("rollout.tp × dp × pp", grid.ranks, what, "1 would do")
        return
    keys = shape.heads if shape.is_latent else shape.kv_heads
    if max(keys, grid.tp) % min(keys, grid.tp) or shape.heads % grid.tp:
        heads = f"the model's {shape.heads} heads and {keys} key/value heads"
        yield undivided("rollout.tp", grid.tp, heads, head_cuts(shape))
    dense = shape.intermediate if shape.moe_layers < shape.layers else 0
    for what, size in (("MLP width", dense), ("shared expert's width", shape.shared_width)):
        if size % grid.tp:
            yield undivided("rollout.tp", grid.tp, f"the model's {what}, {size}", divisors(size))
    if shape.experts and (problem := grid.problem()):
        yield problem
    elif shape.experts % grid.ep:
        yield undivided("rollout.ep", grid.ep, f"the model's {shape.experts} experts", divisors(shape.experts))
    elif shape.expert_width % grid.widths:
        what = f"an expert's width of {shape.expert_width}"
        yield undivided("rollout.tp / rollout.ep", grid.widths, what, divisors(shape.expert_width))
    if grid.pp > shape.layers:
        what = f"it is more than the model's {shape.layers} layers"
        yield unfit("rollout.pp", grid.pp, what, f"at most {shape.layers} would do")


def engine_grids(config: Config, shape: ModelShape) -> list[Grid]:
    """List engines that the model and, colocated, the learner's ranks allow, the smallest first; of those as large,
    the one with fewer stages."""
    ranks, now = config.learn.parallel.ranks, Grid.of(config.rollout)
    is_colocated = config.cluster.placement.rollout == "colocated"
    most = ranks if is_colocated else max(now.ranks, MOST_ENGINE_RANKS)
    sizes = [n for n in head_cuts(shape) if n <= min(most, max(now.tp, ONE_NODE))]
    wider = [1 << i for i in range(most.bit_length())]
    grids = {now} | {
        Grid(tp, dp, pp)
        for pp in wider
        for tp in sizes
        for dp in (wider if shape.experts else (1,))
        if tp * dp * pp <= most
    }

    def fits(grid: Grid) -> bool:
        has_room = grid.ranks >= now.ranks and not (is_colocated and ranks % grid.ranks)
        return has_room and not any(engine_problems(grid, shape))

    return sorted((g for g in grids if g == now or fits(g)), key=lambda g: (g.ranks, g.pp, g.dp, g.tp))


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
    keys = shape.heads if shape.is_latent else shape.kv_heads
    return [n for n in divisors(shape.heads) if max(keys, n) % min(keys, n) == 0]
