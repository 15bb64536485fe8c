"""Everything that can be known to fail before a model is loaded, as sentences: the key, what it got, what would do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tidemill import device
from tidemill.check import algorithm, parallel
from tidemill.check.model_folder import folder_problems
from tidemill.errors import TidemillError, did_you_mean
from tidemill.estimate import handover as turns
from tidemill.estimate import run as estimate
from tidemill.estimate.memory import checkpoint_bytes
from tidemill.estimate.run import human, longest
from tidemill.recipe.config import PAPER, Config, ModelSettings

# Algorithms whose advantage compares the samples of one prompt with each other: one sample says nothing.
GROUP_ALGORITHMS = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp_baseline"})
LONGEST_NAME = 200  # bytes; file systems stop at 255, and runs moved aside get a suffix


def problems(config: Config, model: ModelSettings) -> list[str]:
    """`model` is the one that will be trained (a warm start's own)."""
    checks: tuple[Callable[[Config, ModelSettings], Iterator[str]], ...] = (
        _name, _cluster, _batch, _steps, _flow, _reference, _routes, _lengths, _rollout, _rollout_ranks, _adapters,
        _model_folder, _data, _functions, _environment, _device, _disk, _in_one_process, parallel.problems,
        algorithm.problems,
    )  # fmt: skip
    return [problem for check in checks for problem in check(config, model)]


def _cluster(config: Config, _: ModelSettings) -> Iterator[str]:
    executor = config.cluster.executor
    if executor == "local":
        return
    ranks, learners = config.learn.parallel.ranks, config.cluster.learners
    if ranks > 1 and learners not in (1, ranks):
        yield (
            f"cluster.learners is {learners}, but learn.parallel comes to {ranks} ranks, one worker each; {ranks} "
            "would do"
        )
    if ranks > 1 and config.algorithm.name == "reward_model":
        yield (
            f"algorithm is reward_model, which is not cut with cluster.executor={executor}; cluster.executor=local "
            "would do, or learn.parallel sizes of 1"
        )
    if config.algorithm.kl.reset_every and config.cluster.placement.reference == "separated":
        yield (
            f"algorithm.kl.reset_every is {config.algorithm.kl.reset_every}, but a reference apart from the learners "
            "does not move; cluster.placement.reference=colocated would do"
        )
    if config.observe.dump:
        yield f"observe.dump needs cluster.executor=local, but it is {executor}"


def _name(config: Config, _: ModelSettings) -> Iterator[str]:
    name = config.name
    if name in (".", "..") or any(c in '/\\:*?"<>|' or ord(c) < 32 for c in name) or name != name.strip():
        yield f"name is {name!r}, which cannot be a folder's name; use letters, digits, - and _"
    elif len(name.encode()) > LONGEST_NAME:
        yield f"name has {len(name.encode())} bytes; at most {LONGEST_NAME} fit a folder's name"
    if config.folder and (place := Path(config.folder).expanduser()).exists() and not place.is_dir():
        yield f"folder is {config.folder!r}, which is a file; name a folder"


def _batch(config: Config, _: ModelSettings) -> Iterator[str]:
    train = config.train
    if train.prompts_per_step % train.updates_per_step:
        fit = _either([n for n in range(1, train.prompts_per_step + 1) if train.prompts_per_step % n == 0])
        yield (
            f"train.updates_per_step is {train.updates_per_step}, which does not divide train.prompts_per_step "
            f"({train.prompts_per_step}); {fit} would do"
        )
    compares = config.algorithm.name in GROUP_ALGORITHMS and config.algorithm.group_of_one == "zero"
    if compares and train.samples_per_prompt < 2:
        yield (
            f"train.samples_per_prompt is {train.samples_per_prompt}, but {config.algorithm.name} compares the samples "
            "of one prompt; 2 or more would do, 8 is usual"
        )


def _steps(config: Config, _: ModelSettings) -> Iterator[str]:
    """Steps to look into."""
    for key, asked in (("train.profile", config.train.profile), ("observe.dump", config.observe.dump)):
        none = [step for step in asked if not 1 <= step <= config.train.steps]
        if none:
            yield f"{key} names step {none[0]}, but steps are 1 to {config.train.steps}; one of these would do"


def _in_one_process(config: Config, _: ModelSettings) -> Iterator[str]:
    """Settings that only the local executor knows."""
    if config.cluster.executor == "local":
        return
    is_cut = config.learn.parallel.ranks > 1
    if config.train.profile:
        yield "train.profile is set, which works in one process; cluster.executor=local would do"
    cut = {
        "learn.ema": (config.learn.ema, "no running mean of a learner that is cut over workers reaches who evaluates"),
        "algorithm.kl.weights": (config.algorithm.kl.weights != "same", "no reference that is cut over workers has it"),
    }
    for key, (is_set, why) in cut.items():
        if is_set and is_cut:
            yield f"{key} is set, but {why}; cluster.executor=local would do, or learn.parallel sizes of 1"


def _flow(config: Config, _: ModelSettings) -> Iterator[str]:
    settings, flow = config.algorithm, config.flow
    if settings.rollout_correction != "none" and settings.old_logprobs == "rollout":
        yield (
            f"algorithm.rollout_correction is {settings.rollout_correction}, but with algorithm.old_logprobs=rollout "
            "there is nothing to correct: every weight is 1; algorithm.old_logprobs=recompute would do"
        )
    if settings.rollout_correction_floor > settings.rollout_correction_cap:
        yield (
            f"algorithm.rollout_correction_floor ({settings.rollout_correction_floor}) is above its cap "
            f"({settings.rollout_correction_cap}); lower it"
        )
    if flow.schedule == "async" and flow.placement == "colocated":
        yield (
            "flow.schedule is async, but flow.placement is colocated: rollout cannot be ahead while it takes turns; "
            "flow.placement=auto would do"
        )
    if flow.hand_over in ("cache", "all") and not turns.are_taken(config):
        apart = "flow.placement" if config.cluster.executor == "local" else "cluster.placement.rollout"
        yield (
            f"flow.hand_over is {flow.hand_over}, but rollout and learning take no turns on a device here, which is "
            f"with flow.schedule=sync and {apart}=colocated; flow.hand_over=auto would do"
        )


def _reference(config: Config, _: ModelSettings) -> Iterator[str]:
    kl, cluster = config.algorithm.kl, config.cluster
    if kl.target is not None and cluster.executor != "local" and cluster.placement.reference == "separated":
        yield (
            f"algorithm.kl.target is {kl.target}, but a reference apart from the learners does not steer; "
            "cluster.placement.reference=colocated would do"
        )
    if kl.target is not None and kl.place == "loss" and cluster.executor == "local" and config.learn.parallel.ranks > 1:
        yield (
            f"algorithm.kl.target is {kl.target}, which steers a coefficient in the loss of one rank here; "
            "algorithm.kl.place=reward would do, or cluster.executor=processes"
        )
    if config.algorithm.kl.reset_every and config.learn.lora_rank:
        yield (
            f"algorithm.kl.reset_every is {config.algorithm.kl.reset_every}, but with learn.lora_rank the reference is "
            "the model without its adapters, which does not move; 0 would do, or learn.lora_rank=0"
        )


def _routes(config: Config, _: ModelSettings) -> Iterator[str]:
    if config.learn.moe.replay and config.rollout.engine != "native":
        yield (
            f"learn.moe.replay is true, but rollout.engine {config.rollout.engine} does not record routes; "
            "use rollout.engine=native, or learn.moe.replay=false"
        )
    if config.learn.moe.balance != "bias":
        return
    if config.rollout.engine == "vllm":
        yield (
            "learn.moe.balance is bias, but rollout.engine vllm is given weights alone and would choose experts "
            "without it; rollout.engine=native would do, or learn.moe.balance=aux_loss"
        )
    if config.rollout.tp > 1:
        yield (
            f"learn.moe.balance is bias, which an engine over several ranks (rollout.tp {config.rollout.tp}) is not "
            "given; rollout.tp=1 would do, or learn.moe.balance=aux_loss"
        )


def _lengths(config: Config, model: ModelSettings) -> Iterator[str]:
    prompt, response, most = config.data.max_prompt_tokens, config.rollout.max_new_tokens, longest(config)
    both = f"data.max_prompt_tokens ({prompt}) + rollout.max_new_tokens ({response}) = {most}"
    if config.train.tokens_per_microbatch < most:
        yield (
            f"train.tokens_per_microbatch is {config.train.tokens_per_microbatch}, but the longest sample must fit: "
            f"{both}; raise it to {most}, or lower one of these"
        )
    shape = estimate.shape_of(model)
    if shape is not None and shape.window is not None and shape.window < most:
        whose = "model.tiny.window" if model.path is None else f"the window of {model.path}"
        room = shape.window - response
        fix = f"data.max_prompt_tokens={room} would do" if room > 0 else "lower rollout.max_new_tokens"
        yield f"{whose} is {shape.window} tokens, less than {both}; {fix}"
    if config.rollout.cache_tokens is not None and config.rollout.cache_tokens < most:
        yield f"rollout.cache_tokens is {config.rollout.cache_tokens}, but one sample needs {both}; raise it to {most}"


def _rollout(config: Config, _: ModelSettings) -> Iterator[str]:
    rollout = config.rollout
    narrow = rollout.cache_dtype != "auto"
    natives = {
        "cache_dtype": (narrow, "auto"),
        "speculate": (rollout.speculate == "on", "auto"),
        "page_size": (rollout.page_size is not None, "null"),
        "cache_tokens": (rollout.cache_tokens is not None, "null"),
    }
    for key, (is_set, usual) in natives.items():
        if is_set and rollout.engine != "native":
            yield f"rollout.{key}={getattr(rollout, key)} is the native engine's; set it to {usual}"
    if not config.rollout.batch_invariant:
        return
    if rollout.speculate == "on":
        yield "rollout.speculate=on drafts with kernels that rollout.batch_invariant does without; set it to auto"
    if narrow:
        yield f"rollout.cache_dtype={config.rollout.cache_dtype} rounds, which rollout.batch_invariant must not"
    if config.rollout.engine != "native":
        yield f"rollout.batch_invariant is true, but rollout.engine={config.rollout.engine}; only native has this mode"
    if config.learn.recompute != "none":
        yield (
            f"rollout.batch_invariant is true, but learn.recompute={config.learn.recompute} would compute layers again "
            "outside of it; set learn.recompute=none"
        )


def _rollout_ranks(config: Config, model: ModelSettings) -> Iterator[str]:
    """An engine over several devices."""
    tp, rollout, cluster = config.rollout.tp, config.rollout, config.cluster
    if tp == 1:
        return
    if cluster.executor == "local":
        yield f"rollout.tp is {tp}, but one process has one rank; cluster.executor=processes or ray would do, or 1"
        return
    if rollout.engine != "native":
        yield f"rollout.tp is {tp}, which only rollout.engine=native has, not {rollout.engine}; 1 would do"
    if rollout.batch_invariant:
        yield f"rollout.tp is {tp}, but rollout.batch_invariant is promised by one rank alone; false would do"
    if cluster.spread and cluster.executor == "ray":
        yield (
            f"cluster.spread is true, but with rollout.tp {tp} the ranks of an engine are placed close together and "
            "engines where there is room; false would do, or rollout.tp=1"
        )
    ranks = config.learn.parallel.ranks
    if cluster.placement.rollout == "colocated" and ranks == 1:
        yield (
            f"rollout.tp is {tp}, but colocated with learners that hold whole models rollout reads their own tensors; "
            "1 would do, or cluster.placement.rollout=separated, or sizes of learn.parallel"
        )
    elif cluster.placement.rollout == "colocated" and ranks % tp:
        yield (
            f"rollout.tp is {tp}, which does not divide the {ranks} ranks of learn.parallel that engines share; "
            f"{parallel.either(parallel.divisors(ranks))} would do"
        )
    yield from parallel.engine_problems(tp, model)


def _adapters(config: Config, _: ModelSettings) -> Iterator[str]:
    if config.learn.dora and not config.learn.lora_rank:
        yield "learn.dora is true, but learn.lora_rank is 0: there are no adapters; learn.lora_rank=16 would do"


def _model_folder(_: Config, model: ModelSettings) -> Iterator[str]:
    if model.path is not None:
        yield from folder_problems("model.path", model.path)


def _data(config: Config, _: ModelSettings) -> Iterator[str]:
    from tidemill.data import generators

    data = config.data
    eval_args = data.args if data.eval_args is None else data.eval_args
    level = {} if data.curriculum is None else {data.curriculum.setting: data.curriculum.values[0]}
    sources = (("data.source", data.source, {**data.args, **level}), ("data.eval_source", data.eval_source, eval_args))
    for key, source, args in sources:
        if source is None:
            continue
        if not generators.is_generator(source):
            yield from _data_file(key, source, [*generators.registry()])
            continue
        try:
            generators.check_args(source, generators.find(source), args)
        except TidemillError as error:
            yield _with_remedy(f"{key}={source}", error)


def _data_file(key: str, source: str, generators: list[str]) -> Iterator[str]:
    path = Path(source).expanduser()
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = did_you_mean(source, generators) or did_you_mean(path.name, beside) or "; check the path"
        yield f"{key}={source} is neither a file, nor a folder, nor a generator{close}"
    elif path.is_file() and path.stat().st_size == 0:
        yield f"{key}={source} is an empty file; write at least one row into it"
    elif path.is_dir() and not any(path.iterdir()):
        yield f"{key}={source} is an empty folder; give one with .parquet, .arrow, .csv or .jsonl files"


def _functions(config: Config, _: ModelSettings) -> Iterator[str]:
    from tidemill.reward import registry

    for spec in config.rewards.functions:
        try:
            registry.check_args(spec.function, registry.find(spec.function), spec.args)
            if spec.function == "model":
                from tidemill.reward.model import check

                check(str(spec.args["path"]))
        except TidemillError as error:
            yield _with_remedy("", error)
    # A name with defaults of its own needs no look into the registry, which brings torch.
    if config.algorithm.name not in PAPER:
        from tidemill.algorithms.registry import get

        try:
            get(config.algorithm.name)
        except TidemillError as error:
            yield _with_remedy("", error)


def _environment(config: Config, _: ModelSettings) -> Iterator[str]:
    if config.environment is None:
        if any(spec.function == "environment" for spec in config.rewards.functions):
            yield "rewards names environment, but there is none; set environment.name, or name another reward"
        return
    from tidemill.environment import registry

    try:
        registry.check_args(config.environment.name, registry.find(config.environment.name), config.environment.args)
    except TidemillError as error:
        yield _with_remedy("", error)


def _with_remedy(where: str, error: TidemillError) -> str:
    told = f"{where}: {error.message}" if where else error.message
    return f"{told}; {error.remedy}" if error.remedy else told


def _device(config: Config, _: ModelSettings) -> Iterator[str]:
    kind, index = [*config.device.split(":", 1), ""][:2]
    if (kind != "auto" and kind not in device.KINDS) or (index and not index.isdigit()):
        known = ("auto", *device.KINDS)
        yield f"device is {config.device!r}, but can be {_either(list(known))}{did_you_mean(kind, known)}"
    elif index and config.cluster.executor != "local":
        seen = f", with {device.VISIBLE[kind]}={index} in the environment" if kind in device.VISIBLE else ""
        yield (
            f"device is {config.device}, but with cluster.executor={config.cluster.executor} each worker is given one "
            f"of those there are; device={kind} would do{seen}"
        )


def _disk(config: Config, model: ModelSettings) -> Iterator[str]:
    shape = estimate.shape_of(model)
    if shape is None or shape.parameters is None:
        return
    # One more than is kept: a checkpoint is written aside before the oldest goes.
    needed = checkpoint_bytes(config, shape) * (estimate.checkpoints_kept(config) + 1)
    place = Path(config.folder).expanduser().resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        yield (
            f"folder={config.folder} has {human(free)} free, but checkpoints may take {human(needed)}; "
            "free some, name another folder, or lower checkpoint.keep"
        )


def _either(values: list[object] | list[int] | list[str]) -> str:
    words = [str(v) for v in values]
    if len(words) > 8:
        words = [*words[:4], "…", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
