"""Settings that cannot work with others, and settings that nothing would read: tables with one sentence each. A rule
names the key, when it does not work, why, and what would do. `{c.rollout.tp}` in a text is the recipe's value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tidemill.algorithms.shared import registry
from tidemill.estimate import handover as turns
from tidemill.imports import is_kept_here
from tidemill.recipe.config import AlgorithmSettings, Config
from tidemill.recipe.load import leaves

When = Callable[[Config], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    key: str
    when: When
    why: str
    remedy: str  # what would do; alternatives separated by |


def is_local(c: Config) -> bool:
    return c.cluster.executor == "local"


def is_cut(c: Config) -> bool:
    return c.learn.parallel.ranks > 1


def learns_values(c: Config) -> bool:
    return registry.of(c).learns_values or "critic" in registry.roles_of(c)


def value_stages(c: Config) -> int:
    return (c.algorithm.critic.parallel or c.learn.parallel).pp


def is_reference_apart(c: Config) -> bool:
    return not is_local(c) and c.cluster.placement.reference == "separated"


def not_native(c: Config) -> bool:
    return c.rollout.engine != "native"


def shows_images(c: Config) -> bool:
    return c.data.images is not None


def _program(c: Config) -> str | None:
    return None if c.environment is None else c.environment.program


def _players(c: Config) -> int:
    return 1 if c.environment is None else c.environment.players


def in_mindspore(c: Config) -> bool:
    return c.learn.backend == "mindspore"


def engine_over(size: str, when: When) -> When:
    """An engine with that many replicas, stages or ranks of a layer, where `when` holds too."""
    return lambda c: getattr(c.rollout, size) > 1 and when(c)


NATIVE = "{c.rollout.engine} does not have this setting of the native engine"
ONE_PROCESS = "it shows what one process does, and here several work"
INVARIANT = "rollout.batch_invariant"
MINDSPORE = "learn.backend=mindspore "
ENGINE_SIZES = ("tp", "dp", "pp")

RULES = (
    # Images
    Rule("data.images", lambda c: shows_images(c) and c.rollout.engine == "vllm",
         "vLLM expands image marks itself, so the sampled tokens would differ from the learned ones",
         "rollout.engine=native|hf"),
    Rule("data.images", lambda c: shows_images(c) and _program(c) is not None,
         "environment.program sends text only", "omit the images with data.columns.images=none"),
    Rule("data.images", lambda c: shows_images(c) and _players(c) > 1,
         "games of several players are text only", "omit the images with data.columns.images=none"),
    Rule("rewards.images", lambda c: not c.rewards.images and any(r.function == "ocr" for r in c.rewards.functions),
         "the reward ocr reads the prompt's images", "true"),
    # Rollout
    Rule("rollout.cache_dtype", lambda c: not_native(c) and c.rollout.cache_dtype != "auto", NATIVE, "auto"),
    Rule("rollout.weights", lambda c: not_native(c) and c.rollout.weights != "same", NATIVE, "same"),
    Rule("rollout.speculate", lambda c: not_native(c) and c.rollout.speculate == "on", NATIVE, "auto"),
    Rule("rollout.page_size", lambda c: not_native(c) and c.rollout.page_size is not None, NATIVE, "none"),
    Rule("rollout.cache_tokens", lambda c: not_native(c) and c.rollout.cache_tokens is not None, NATIVE, "none"),
    Rule("rollout.cache_on_host_gb", lambda c: not_native(c) and c.rollout.cache_on_host_gb > 0, NATIVE, "0"),
    Rule("learn.moe.replay", lambda c: not_native(c) and c.learn.moe.replay,
         "rollout.engine {c.rollout.engine} does not record routes", "rollout.engine=native|false"),
    Rule(INVARIANT, lambda c: not_native(c) and c.rollout.batch_invariant,
         "rollout.engine is {c.rollout.engine}, and only native has this mode", "rollout.engine=native"),
    Rule("rollout.speculate", lambda c: c.rollout.batch_invariant and c.rollout.speculate == "on",
         "rollout.batch_invariant does not use the kernels of speculative decoding", "auto"),
    Rule("rollout.cache_dtype", lambda c: c.rollout.batch_invariant and c.rollout.cache_dtype != "auto",
         "it rounds, which rollout.batch_invariant must not", "auto"),
    Rule("rollout.weights", lambda c: c.rollout.batch_invariant and c.rollout.weights != "same",
         "8 bits round, which rollout.batch_invariant must not", "same"),
    Rule("learn.recompute", lambda c: c.rollout.batch_invariant and c.learn.recompute != "none",
         "layers would be recomputed outside rollout.batch_invariant", "none"),
    Rule(INVARIANT, lambda c: c.rollout.batch_invariant and (is_cut(c) or c.rollout.ranks > 1),
         "only a single rank can promise it, and learn.parallel or rollout.tp, dp and pp ask for several", "false"),
    *(Rule(f"rollout.{size}", engine_over(size, is_local),
           "one process has one rank", "cluster.executor=processes or ray|1") for size in ENGINE_SIZES),
    *(Rule(f"rollout.{size}", engine_over(size, not_native),
           "{c.rollout.engine} has one rank for each", "1") for size in ENGINE_SIZES),
    Rule("cluster.spread", lambda c: c.cluster.spread and c.cluster.executor == "ray" and c.rollout.ranks > 1,
         "the {c.rollout.ranks} ranks of an engine are placed together, and engines wherever there is room",
         "false|rollout.tp=1 with dp and pp of 1"),
    *(Rule(f"rollout.{size}", engine_over(size, lambda c: c.cluster.placement.rollout == "colocated" and not is_cut(c)),
           "colocated with learners that hold whole models, rollout reads their tensors",
           "1|cluster.placement.rollout=separated|sizes of learn.parallel") for size in ENGINE_SIZES),
    Rule("rollout.ep", lambda c: c.rollout.ep is not None and c.rollout.ep > 1 and c.rollout.ranks == 1,
         "experts are spread over the ranks of an engine, which here has one", "none|rollout.dp={c.rollout.ep}"),
    Rule("rollout.experts.spare", lambda c: c.rollout.experts.spare > 0 and c.rollout.ranks == 1,
         "an engine of one rank has no use for copies of experts", "0"),
    Rule("learn.moe.balance", lambda c: c.learn.moe.balance == "bias" and c.rollout.engine == "vllm",
         "vLLM receives weights only, and would route without the bias",
         "rollout.engine=native|learn.moe.balance=aux_loss"),
    # The learner over several ranks or processes
    Rule("observe.dump", lambda c: bool(c.observe.dump) and (is_cut(c) or not is_local(c)), ONE_PROCESS,
         "cluster.executor=local with learn.parallel sizes of 1|leaving it out"),
    Rule("train.profile", lambda c: bool(c.train.profile) and (is_cut(c) or not is_local(c)), ONE_PROCESS,
         "cluster.executor=local with learn.parallel sizes of 1|leaving it out"),
    Rule("cluster.learners",
         lambda c: not is_local(c) and is_cut(c) and c.cluster.learners not in (1, c.learn.parallel.ranks),
         "learn.parallel has {c.learn.parallel.ranks} ranks, one worker each", "{c.learn.parallel.ranks}"),
    Rule("learn.ema", lambda c: bool(c.learn.ema) and is_cut(c) and not is_local(c),
         "the worker that evaluates cannot get the running mean of a learner that is split over workers",
         "cluster.executor=local|learn.parallel sizes of 1"),
    Rule("learn.fp8", lambda c: c.learn.fp8 != "none" and c.learn.parallel.tp > 1,
         "its scales need whole factors, which learn.parallel.tp {c.learn.parallel.tp} cuts",
         "learn.parallel.tp=1|learn.fp8=none"),
    Rule("learn.dora", lambda c: c.learn.dora and c.learn.parallel.tp > 1,
         "its norms need whole rows, which learn.parallel.tp {c.learn.parallel.tp} cuts", "learn.parallel.tp=1"),
    Rule("learn.dora", lambda c: c.learn.dora and not c.learn.lora_rank,
         "learn.lora_rank is 0: there are no adapters", "learn.lora_rank=16"),
    Rule("learn.recompute",
         lambda c: c.learn.parallel.pp > 1 and c.learn.recompute == "mlp"
         and (c.learn.moe.replay or c.learn.moe.balance == "aux_loss"),
         "with learn.parallel.pp {c.learn.parallel.pp} other micro-batches run in between, and learn.moe would "
         "route and balance by their tokens", "full"),
    Rule("learn.parallel.pp_chunks",
         lambda c: (c.learn.parallel.pp_chunks > 1) != (c.learn.parallel.pp_schedule == "interleaved")
         or (c.learn.parallel.pp_chunks > 1 and c.learn.parallel.pp == 1),
         "several runs of layers per rank need pp_schedule=interleaved and several pipeline ranks",
         "pp_chunks=2 with pp_schedule=interleaved and pp above 1|pp_chunks=1 with 1f1b"),
    Rule("algorithm", lambda c: registry.of(c).learns_values and is_cut(c) and not is_local(c),
         "its value model cannot be split over workers", "cluster.executor=local|learn.parallel sizes of 1"),
    Rule("algorithm.critic.trunk",
         lambda c: "critic" in registry.roles_of(c) and is_cut(c) and c.algorithm.critic.trunk == "shared",
         "over ranks, a critic has a decoder of its own", "own"),
    Rule("learn.parallel.pp", lambda c: learns_values(c) and value_stages(c) > 1,
         "a value model cannot be split into stages", "algorithm.critic.parallel with pp: 1 and the same product"),
    # MindSpore's learner
    Rule("model.dtype", lambda c: in_mindspore(c) and c.model.dtype != "float32",
         MINDSPORE + "learns in float32", "float32|learn.backend=torch"),
    Rule("algorithm", lambda c: in_mindspore(c) and registry.of(c).learns_values,
         MINDSPORE + "has no value models", "learn.backend=torch"),
    Rule("algorithm.critic.trunk", lambda c: in_mindspore(c) and "critic" in registry.roles_of(c)
         and c.algorithm.critic.trunk == "shared", "with " + MINDSPORE + "torch trains the critic", "own"),
    Rule("learn.parallel", lambda c: in_mindspore(c) and is_cut(c), MINDSPORE + "holds whole models",
         "sizes of 1 with learn.mindspore.processes=2"),
    Rule("cluster.learners", lambda c: in_mindspore(c) and not is_local(c) and c.cluster.learners > 1,
         MINDSPORE + "learns in one worker", "1 with learn.mindspore.processes=2"),
    Rule("learn.lora_rank", lambda c: in_mindspore(c) and c.learn.lora_rank > 0, MINDSPORE + "has no adapters", "0"),
    Rule("learn.optimizer", lambda c: in_mindspore(c) and c.learn.optimizer != "adamw",
         MINDSPORE + "has only AdamW", "adamw"),
    Rule("learn.moments", lambda c: in_mindspore(c) and c.learn.moments == "int8",
         MINDSPORE + "keeps moments in float32", "same"),
    Rule("learn.ema", lambda c: in_mindspore(c) and c.learn.ema > 0, MINDSPORE + "keeps no running mean", "0"),
    Rule("learn.fp8", lambda c: in_mindspore(c) and c.learn.fp8 != "none", MINDSPORE + "learns in float32", "none"),
    Rule("learn.recompute", lambda c: in_mindspore(c) and c.learn.recompute not in ("none", "full"),
         MINDSPORE + "recomputes whole layers", "full|none"),
    Rule("observe.dump", lambda c: in_mindspore(c) and bool(c.observe.dump),
         MINDSPORE + "cannot dump its gradients", "leaving it out"),
    Rule(INVARIANT, lambda c: in_mindspore(c) and c.rollout.batch_invariant,
         MINDSPORE + "sums in a different order from rollout", "false"),
    # The reference
    Rule("algorithm.kl.target", lambda c: c.algorithm.kl.target is not None and c.algorithm.kl.coef == 0,
         "an adaptive coefficient begins with algorithm.kl.coef, which is 0", "algorithm.kl.coef=0.01"),
    Rule("algorithm.kl.target", lambda c: c.algorithm.kl.target is not None and is_reference_apart(c),
         "a reference in workers of its own cannot steer it", "cluster.placement.reference=colocated"),
    Rule("algorithm.kl.reset_every", lambda c: bool(c.algorithm.kl.reset_every) and is_reference_apart(c),
         "a reference in workers of its own stays fixed", "cluster.placement.reference=colocated"),
    Rule("algorithm.kl.reset_every", lambda c: bool(c.algorithm.kl.reset_every and c.learn.lora_rank),
         "with learn.lora_rank the reference is the model without its adapters, which stays fixed",
         "0|learn.lora_rank=0"),
    Rule("algorithm.kl.weights",
         lambda c: c.algorithm.kl.weights != "same"
         and ((is_cut(c) and not is_local(c)) or bool(c.algorithm.kl.reset_every)),
         "a reference that is split over workers or replaced (kl.reset_every) keeps the weights' dtype", "same"),
    # The flow
    Rule("algorithm.rollout_correction",
         lambda c: c.algorithm.rollout_correction != "none" and c.algorithm.old_logprobs == "rollout",
         "with algorithm.old_logprobs=rollout there is nothing to correct: every weight is 1",
         "algorithm.old_logprobs=recompute"),
    Rule("algorithm.rollout_correction_floor",
         lambda c: c.algorithm.rollout_correction_floor > c.algorithm.rollout_correction_cap,
         "its cap is {c.algorithm.rollout_correction_cap}", "a lower floor"),
    Rule("flow.placement", lambda c: c.flow.schedule == "async" and c.flow.placement == "colocated",
         "flow.schedule is async, and rollout cannot run ahead while it takes turns", "flow.placement=auto"),
    Rule("flow.carry_over", lambda c: c.flow.carry_over > 0 and c.flow.schedule != "sync",
         "with flow.schedule={c.flow.schedule} rollout does not stop for learning, so there is no tail to carry over",
         "flow.schedule=sync|flow.carry_over=0"),
    Rule("flow.carry_over", lambda c: c.flow.carry_over > c.flow.max_staleness,
         "with flow.max_staleness={c.flow.max_staleness} not all of these prompts could be learned from in time",
         "flow.carry_over={c.flow.max_staleness}|a higher flow.max_staleness"),
    Rule("flow.carry_over", lambda c: c.flow.carry_over > 0 and registry.of(c).input_kind != "prompts",
         "{c.algorithm.name} learns from given responses: nothing is rolled out", "flow.carry_over=0"),
    Rule("flow.carry_over", lambda c: c.flow.carry_over > 0 and _program(c) is not None,
         "an agent's own time limits would run on during learning", "flow.carry_over=0"),
    Rule("flow.hand_over", lambda c: c.flow.hand_over in ("cache", "all") and not turns.are_taken(c),
         "rollout and learning take turns on a device only with flow.schedule=sync and rollout colocated",
         "flow.hand_over=auto"),
    Rule("environment.program", lambda c: _program(c) is not None and c.learn.moe.replay,
         "an agent's calls do not record the routes that learn.moe.replay needs", "learn.moe.replay=false"),
    Rule("environment.program", lambda c: _program(c) is not None and is_kept_here(str(_program(c))),
         "each sample runs in a process of its own, which cannot use an object of this one", "package.module:function"),
    Rule("algorithm.credit.by", lambda c: c.algorithm.credit.by == "turn" and c.environment is None,
         "without an environment a sample is one turn", "trajectory"),
    Rule("algorithm.credit.by", lambda c: c.algorithm.credit.by == "turn" and not registry.of(c).credits_turns,
         "{c.algorithm.name} has one advantage per sample", "trajectory|an algorithm with advantages per token"),
    Rule("algorithm.credit.discount",
         lambda c: c.algorithm.credit.discount < 1
         and (registry.of(c).has_critic or c.algorithm.name == "reinforce_pp"),
         "{c.algorithm.name} sums rewards token by token", "1|with ppo algorithm.critic.gamma"),
    Rule("environment.players", lambda c: _players(c) > 1 and (c.rollout.engine != "native" or c.rollout.ranks > 1)
         and c.environment is not None and c.environment.league is not None,
         "past versions play in native engines of one rank", "rollout.engine=native with one rank|no league"),
    Rule("train.samples_per_prompt", lambda c: c.train.samples_per_prompt % _players(c) != 0,
         "each match of environment.players {c.environment.players} gives that many samples",
         "a multiple of {c.environment.players}"),
    Rule("train.samples_per_prompt",
         lambda c: _players(c) > 1 and registry.of(c).compares_samples
         and c.train.samples_per_prompt < 2 * _players(c),
         "a seat is compared with the same seat of other matches", "twice environment.players or more"),
    Rule("environment.players", lambda c: _players(c) > 1 and c.learn.moe.replay,
         "matches do not record the routes that learn.moe.replay needs", "learn.moe.replay=false"),
    Rule("rewards", lambda c: c.environment is None and any(r.function == "environment" for r in c.rewards.functions),
         "there is no environment", "environment.name|another reward"),
)  # fmt: skip


def problems(config: Config) -> Iterator[str]:
    for rule in RULES:
        if rule.when(config):
            why, remedy = (text.format(c=config) for text in (rule.why, rule.remedy))
            first, *others = remedy.split("|")
            would_do = ", or ".join([f"{first} would do", *others])
            yield f"{rule.key} is {said(at(config, rule.key))}, but {why}; {would_do}"


# Settings that nothing reads: allowed, because a recipe may be tried in another mode, but reported.


@dataclass(frozen=True, slots=True)
class Unread:
    keys: tuple[str, ...]  # settings, or sections of them
    when: When
    why: str


RAY_ALONE = ("cluster.address", "cluster.spread", "cluster.cpus")
UNREAD = (
    Unread(("cluster",), is_local, "cluster.executor is local: all roles share one process"),
    Unread(RAY_ALONE, lambda c: c.cluster.executor == "processes", "only cluster.executor=ray reads it"),
    Unread(("flow.max_staleness", "flow.unfinished_samples"),
           lambda c: c.flow.schedule != "async" and not c.flow.carry_over,
           "flow.schedule is {c.flow.schedule}: no sample is older than its step"),
    Unread(("learn.lora_alpha", "learn.lora_experts"), lambda c: not c.learn.lora_rank, "learn.lora_rank is 0"),
    Unread(("learn.mindspore",), lambda c: not in_mindspore(c), "learn.backend is torch"),
    Unread(("learn.attention", "learn.compile", "learn.master", "learn.offload", "learn.optimizer_on_host",
            "learn.recompute_every", "learn.reduce_dtype"), in_mindspore, "learn.backend is mindspore"),
    Unread(("learn.min_lr_share",), lambda c: c.learn.schedule == "constant", "learn.schedule is constant"),
    Unread(("learn.recompute_every",), lambda c: c.learn.recompute == "none", "learn.recompute is none"),
    Unread(("learn.moe.coef",), lambda c: c.learn.moe.balance != "aux_loss", "learn.moe.balance is not aux_loss"),
    Unread(("learn.moe.bias_rate",), lambda c: c.learn.moe.balance != "bias", "learn.moe.balance is not bias"),
    Unread(("learn.parallel.cp_form",), lambda c: c.learn.parallel.cp == 1, "learn.parallel.cp is 1"),
    Unread(("rollout.vllm",), lambda c: c.rollout.engine != "vllm", "rollout.engine is {c.rollout.engine}"),
    Unread(("algorithm.critic",), lambda c: not learns_values(c), "{c.algorithm.name} has no critic"),
    Unread(("algorithm.preference",), lambda c: registry.of(c).input_kind in ("prompts", "responses"),
           "{c.algorithm.name} does not learn from preferences"),
    Unread(("algorithm.kl",), lambda c: "reference" not in registry.roles_of(c), "algorithm.kl.coef is 0: there is no "
           "reference"),
    Unread(("algorithm.rollout_correction_cap", "algorithm.rollout_correction_floor",
            "algorithm.rollout_correction_outside"),
           lambda c: c.algorithm.rollout_correction == "none", "algorithm.rollout_correction is none"),
    Unread(("algorithm.dynamic_sampling_rounds",), lambda c: not c.algorithm.dynamic_sampling,
           "algorithm.dynamic_sampling is false"),
    Unread(("algorithm.constant_length",), lambda c: c.algorithm.aggregation != "constant",
           "algorithm.aggregation is not constant"),
    Unread(("algorithm.overlong.penalty",), lambda c: not c.algorithm.overlong.buffer, "its buffer is 0"),
    Unread(("algorithm.covariance",), lambda c: c.algorithm.covariance.mode == "none", "its mode is none"),
)  # fmt: skip


def unread(config: Config) -> list[str]:
    """Return sentences about settings that differ from their defaults and that nothing reads in the chosen mode."""
    usual = Config(algorithm=AlgorithmSettings(name=config.algorithm.name))
    defaults = dict(leaves(usual))
    changed = {key: value for key, value in leaves(config) if value != defaults.get(key, value)}
    told: dict[str, str] = {}
    for row in UNREAD:
        mine = [key for key in changed if any(key == name or key.startswith(f"{name}.") for name in row.keys)]
        if mine and row.when(config):
            told |= {key: row.why.format(c=config) for key in mine if key != "cluster.executor"}
    return [f"nothing reads {key}={said(changed[key])}: {why}" for key, why in told.items()]


def at(section: Any, key: str) -> Any:
    found = reduce(getattr, key.split("."), section)
    return found.name if isinstance(found, AlgorithmSettings) else found


def said(value: Any) -> str:
    if hasattr(value, "functions"):
        return ", ".join(spec.function for spec in value.functions)
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
