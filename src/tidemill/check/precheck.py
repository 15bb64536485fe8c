"""Checks everything that can be known to fail before a model is loaded: each sentence names the key, its value, and
what would do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tidemill import device
from tidemill.algorithms.shared import registry as algorithms
from tidemill.check import algorithm, parallel, rules, vllm_args
from tidemill.check.model_folder import folder_problems
from tidemill.check.sizes import longest_in_words, undivided, unfit, window_problems
from tidemill.errors import ConfigError, TidemillError, did_you_mean, either, human
from tidemill.estimate import run as estimate
from tidemill.estimate.memory import checkpoint_bytes
from tidemill.estimate.run import longest
from tidemill.models import families
from tidemill.models.box import find
from tidemill.models.shape import shape_of
from tidemill.recipe.config import Config, ModelSettings
from tidemill.recipe.load import as_list, model_of
from tidemill.recipe.ranks import divisors

LONGEST_NAME = 200  # bytes; file systems allow 255, and runs moved aside get a suffix
Check = Callable[[Config, ModelSettings], Iterator[str]]


def check(config: Config, *, fetch: bool = False) -> None:
    """Refuse, in one message, everything that can be known to fail before a model is loaded. `fetch`: download
    models given by name, once nothing else is wrong."""
    found = _all_problems(config)
    named = (("model.path", config.model.path), ("algorithm.teacher", config.algorithm.teacher))
    waiting = {find.not_here(key, path): path for key, path in named if path is not None}
    if fetch and found and all(problem in waiting for problem in found):
        for problem in found:
            find.resolve(waiting[problem])
        found = _all_problems(config)
    if found:
        raise ConfigError(as_list(found))


def _all_problems(config: Config) -> list[str]:
    try:
        model = model_of(config)
    except ConfigError as error:
        return [f"model.warm_start: {error.message}; give a recipe's name or path", *problems(config, config.model)]
    return problems(config, model)


def problems(config: Config, model: ModelSettings) -> list[str]:
    """List what is wrong. `model` is the one that will be trained (a warm start's own)."""
    checks: tuple[Check, ...] = (_name, _steps, _lengths, _model, _data, _functions, _environment, _device)
    # Checks that depend on the algorithm's facts need one that exists.
    ours: tuple[Check, ...] = (
        _batch,
        lambda c, _: rules.problems(c),
        _eight_bits,
        vllm_args.problems,
        _disk,
        parallel.problems,
        algorithm.problems,
    )
    unknown = list(_algorithm(config))
    found = [problem for one in (checks if unknown else (*checks, *ours)) for problem in one(config, model)]
    return [*unknown, *found]


def _eight_bits(config: Config, model: ModelSettings) -> Iterator[str]:
    """Refuse 8-bit rollout of a model that runs module by module there."""
    shape, served = shape_of(model), families.served_over_ranks()
    weights, is_native = config.rollout.weights, config.rollout.engine == "native"
    if weights != "same" and is_native and shape is not None and shape.architecture not in served:
        what = f"{shape.architecture} is not among the models that it works for: {', '.join(served)}"
        yield unfit("rollout.weights", weights, what, "same would do")


def _algorithm(config: Config) -> Iterator[str]:
    try:
        algorithms.roles_of(config)
    except TidemillError as error:
        yield _with_remedy("", error)


def _name(config: Config, _: ModelSettings) -> Iterator[str]:
    name, size = config.name, len(config.name.encode())
    is_odd = name in (".", "..") or any(c in '/\\:*?"<>|' or ord(c) < 32 for c in name) or name != name.strip()
    if is_odd or size > LONGEST_NAME:
        shown = repr(name) if is_odd else f"{size} bytes long"
        yield f"name is {shown}, which cannot be a folder's name; use at most {LONGEST_NAME} letters, digits, - and _"
    if config.folder and (place := Path(config.folder).expanduser()).exists() and not place.is_dir():
        yield f"folder is {config.folder!r}, which is a file; name a folder"


def _batch(config: Config, _: ModelSettings) -> Iterator[str]:
    train = config.train
    if train.prompts_per_step % train.updates_per_step:
        what = f"train.prompts_per_step ({train.prompts_per_step})"
        yield undivided("train.updates_per_step", train.updates_per_step, what, divisors(train.prompts_per_step))


def _steps(config: Config, _: ModelSettings) -> Iterator[str]:
    """Check the steps to profile or dump."""
    for key, asked in (("train.profile", config.train.profile), ("observe.dump", config.observe.dump)):
        none = [step for step in asked if not 1 <= step <= config.train.steps]
        if none:
            yield f"{key} names step {none[0]}, but steps are 1 to {config.train.steps}; one of these would do"


def _lengths(config: Config, model: ModelSettings) -> Iterator[str]:
    most, both = longest(config), longest_in_words(config)
    rooms = {
        "train.tokens_per_microbatch": config.train.tokens_per_microbatch,
        "rollout.cache_tokens": config.rollout.cache_tokens,
    }
    for key, room in rooms.items():
        if room is not None and room < most:
            yield unfit(key, room, f"one sample needs {both}", f"raise it to {most}, or lower one of these")
    whose = "model.tiny.window is" if model.path is None else f"the window of {model.path} is"
    yield from window_problems(config, whose, shape_of(model))


def _model(_: Config, model: ModelSettings) -> Iterator[str]:
    if model.path is not None:
        yield from folder_problems("model.path", model.path)
    elif model.tiny is not None and model.tiny.architecture not in families.names():
        given, known = model.tiny.architecture, families.names()
        yield f"model.tiny.architecture is {given}, but can be {either(known)}{did_you_mean(given, known)}"


def _data(config: Config, _: ModelSettings) -> Iterator[str]:
    from tidemill.data import generators

    data = config.data
    eval_args = data.args if data.eval_args is None else data.eval_args
    level = {} if data.curriculum is None else {data.curriculum.setting: data.curriculum.values[0]}
    sources = [("data.source", data.source, {**data.args, **level})]
    if data.sources:
        sources = [
            (f"data.sources.{i}.source", entry.source, data.args if entry.args is None else entry.args)
            for i, entry in enumerate(data.sources)
        ]
    if data.eval_source is not None:
        sources.append(("data.eval_source", data.eval_source, eval_args))
    for key, source, args in sources:
        if not generators.is_generator(source):
            wrong = _data_file(source, [*generators.registry()])
            if wrong:
                yield f"{key}={source} is {wrong}"
            continue
        try:
            generators.check_args(source, generators.find(source), args)
        except TidemillError as error:
            yield _with_remedy(f"{key}={source}", error)


def _data_file(source: str, generators: list[str]) -> str:
    """Say what is wrong with a data source, and what would do; "": nothing."""
    from tidemill.data import known

    path = known.folder(source) or Path(source).expanduser()
    if not path.exists() and known.is_on_hub(source):
        return ""  # fetched when the data is opened, before a model is
    if not path.exists():
        if source in known.KNOWN:
            return _with_remedy("not on this machine", known.missing(source))
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = did_you_mean(source, generators) or did_you_mean(path.name, beside) or "; check the path"
        return f"neither a file, nor a folder, nor a generator{close}"
    if path.is_file() and path.stat().st_size == 0:
        return "an empty file; write at least one row into it"
    if path.is_dir() and not any(path.iterdir()):
        return "an empty folder; give one with .parquet, .arrow, .csv or .jsonl files"
    return ""


def _functions(config: Config, _: ModelSettings) -> Iterator[str]:
    from tidemill.reward import registry

    for spec in config.rewards.functions:
        try:
            registry.check_args(spec.function, registry.find(spec.function), spec.args)
            if spec.function == "model":
                from tidemill.reward.verifiers.model import check

                check(str(spec.args["path"]))
        except TidemillError as error:
            yield _with_remedy("", error)


def _environment(config: Config, _: ModelSettings) -> Iterator[str]:
    if config.model.policy is not None:
        from tidemill.environment.vector import networks

        yield from networks.problems(config)
        return
    if config.environment is None:
        return
    from tidemill.environment import program, registry

    try:
        if config.environment.program is not None:
            program.check(config.environment)
            return
        registry.check_args(config.environment.name, registry.find(config.environment.name), config.environment.args)
        registry.check_players(config.environment)
    except TidemillError as error:
        yield _with_remedy("", error)


def _with_remedy(where: str, error: TidemillError) -> str:
    told = f"{where}: {error.message}" if where else error.message
    return f"{told}; {error.remedy}" if error.remedy else told


def _device(config: Config, _: ModelSettings) -> Iterator[str]:
    kind, index = [*config.device.split(":", 1), ""][:2]
    if (kind != "auto" and kind not in device.KINDS) or (index and not index.isdigit()):
        known = ("auto", *device.KINDS)
        yield f"device is {config.device!r}, but can be {either(known)}{did_you_mean(kind, known)}"
    elif index and config.cluster.executor != "local":
        seen = f", with {device.VISIBLE[kind]}={index} in the environment" if kind in device.VISIBLE else ""
        yield (
            f"device is {config.device}, but with cluster.executor={config.cluster.executor} each worker is "
            f"assigned one of the existing ones; device={kind} would do{seen}"
        )


def _disk(config: Config, model: ModelSettings) -> Iterator[str]:
    shape = shape_of(model)
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
