"""Settings that an algorithm would take and never use, and the teacher that distillation learns from: both before a
model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from tidemill import device
from tidemill.check.model_folder import folder_problems
from tidemill.errors import TidemillError
from tidemill.estimate import run as estimate
from tidemill.estimate.run import BYTES, human, longest
from tidemill.recipe.config import PAPER, AlgorithmSettings, Config, ModelSettings

NO_RATIO = "imitates responses: its loss is −log π, without a ratio"
NO_ADVANTAGE = "imitates responses: there are no advantages"
ITS_OWN = "takes every token's advantage from the teacher"
MEASURED = "learns from the teacher: rewards are only measured"
# Of each algorithm the shared settings that change nothing in it, and why; critic and preference settings are plain
# enough about whose they are.
UNUSED: dict[str, dict[str, str]] = {
    "rejection": {
        **dict.fromkeys(("clip_low", "clip_high", "dual_clip", "ratio_cap"), NO_RATIO),
        **dict.fromkeys(("baseline", "advantage_scale", "std_bias", "std_eps", "group_of_one"), NO_ADVANTAGE),
        "covariance.mode": NO_ADVANTAGE,
    },
    "distill": {
        **dict.fromkeys(("baseline", "advantage_scale", "std_bias", "std_eps", "group_of_one"), ITS_OWN),
        **dict.fromkeys(("dynamic_sampling", "overlong.buffer"), MEASURED),
    },
}
OF_ONE = {"keep_best": "rejection", "teacher": "distill"}  # settings that one algorithm alone knows


def problems(config: Config, model: ModelSettings) -> Iterator[str]:
    yield from _unused(config)
    if config.algorithm.name == "distill":
        yield from _teacher(config, model)


def _unused(config: Config) -> Iterator[str]:
    own, name = config.algorithm, config.algorithm.name
    usual = AlgorithmSettings.model_validate({"name": name})
    for key, why in UNUSED.get(name, {}).items():
        value, default = _at(own, key), _at(usual, key)
        if value != default:
            yield f"algorithm.{key} is {_say(value)}, but {name} {why}; {_say(default)} would do, or algorithm=grpo"
    for key, whose in OF_ONE.items():
        if name in PAPER and name != whose and _at(own, key) is not None:
            yield f"algorithm.{key} is {_at(own, key)}, which {whose} alone uses; algorithm={whose} would do, or none"
    if name == "rejection" and own.kl.coef > 0 and own.kl.place == "reward":
        yield (
            "algorithm.kl.place is reward, but rejection keeps what is correct, whatever its reward; "
            "algorithm.kl.place=loss would do"
        )
    if name == "rejection" and own.overlong.buffer and own.keep_best is None:
        yield (
            f"algorithm.overlong.buffer is {own.overlong.buffer}, but rejection keeps every correct response, whatever "
            "its reward; 0 would do, or algorithm.keep_best=1, or algorithm.overlong.drop_truncated=true"
        )


def _at(section: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), section)


def _say(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _teacher(config: Config, model: ModelSettings) -> Iterator[str]:
    path = config.algorithm.teacher
    if path is None:
        yield "algorithm distill needs a teacher; set algorithm.teacher to a model folder"
        return
    found = list(folder_problems("algorithm.teacher", path))
    yield from found
    if found:
        return
    teacher = config.model.model_copy(update={"path": path})
    shape = estimate.shape_of(teacher)
    if shape is not None and shape.window is not None and shape.window < longest(config):
        yield (
            f"algorithm.teacher={path} reads {shape.window} tokens, but a sample may have {longest(config)} "
            "(data.max_prompt_tokens + rollout.max_new_tokens); lower one of them, or name another teacher"
        )
    yield from _vocabulary(path, teacher, model, shape)
    yield from _room(config, path, shape, estimate.shape_of(model))


def _vocabulary(path: str, teacher: ModelSettings, model: ModelSettings, shape: estimate.Shape | None) -> Iterator[str]:
    """Tokens go to the teacher as numbers: each must mean there what it means here."""
    from tidemill.models.load import load_tokenizer  # brings transformers

    try:
        own, theirs = (load_tokenizer(one).get_vocab() for one in (model, teacher))
    except TidemillError as error:
        yield f"algorithm.teacher={path}: vocabularies cannot be compared: {error.message}"
        return
    other = sorted((number, token) for token, number in own.items() if theirs.get(token) != number)
    if other:
        number, token = other[0]
        there = f"is {theirs[token]} there" if token in theirs else "is unknown there"
        yield (
            f"algorithm.teacher={path} has another vocabulary: {len(other):,} of the policy's {len(own):,} tokens "
            f"differ, first {token!r}, which is {number} here and {there}; one with the policy's tokenizer would do"
        )
    elif shape is not None and own and shape.vocabulary <= max(own.values()):
        yield (
            f"algorithm.teacher={path} gives probabilities to {shape.vocabulary:,} tokens, but the policy has "
            f"{max(own.values()) + 1:,}; a teacher with the policy's tokenizer would do"
        )


def _room(config: Config, path: str, teacher: estimate.Shape | None, policy: estimate.Shape | None) -> Iterator[str]:
    """What cannot fit whatever else is set; `tidemill doctor --recipe` weighs the rest."""
    if teacher is None or policy is None or teacher.parameters is None or policy.parameters is None:
        return
    try:
        have = device.pick(config.device).memory().total
    except TidemillError:
        return  # said elsewhere
    width = BYTES[config.model.dtype]
    theirs, own = teacher.parameters * width, policy.parameters * width
    if theirs + own > have:
        narrower = "model.dtype=bfloat16 or a smaller teacher" if width > 2 else "a smaller teacher"
        yield (
            f"algorithm.teacher={path} takes {human(theirs)} beside the policy's {human(own)}, but the device has "
            f"{human(have)} in all; {narrower} would do"
        )
