"""Checks an algorithm's facts against the recipe, and the teacher that distillation learns from."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill import device
from tidemill.algorithms.shared import registry
from tidemill.check.model_folder import folder_problems
from tidemill.check.rules import at, said
from tidemill.check.sizes import unfit, window_problems
from tidemill.errors import TidemillError, human
from tidemill.estimate.run import BYTES
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe.config import AlgorithmSettings, Config, ModelSettings


def problems(config: Config, model: ModelSettings) -> Iterator[str]:
    algorithm, own = registry.of(config), config.algorithm
    yield from registry.unfit_for_policy(config)
    usual, usual_name = AlgorithmSettings(name=own.name), AlgorithmSettings().name
    unused = {key: (why, usual_name) for key, why in algorithm.unused(config).items()}
    for other in registry.every():
        strange = set(other.own_settings) - {*algorithm.own_settings, *unused}
        unused |= dict.fromkeys(strange, (f"does not read it, which {other.name} does", other.name))
    for key, (why, better) in unused.items():
        if at(own, key) != at(usual, key) and _is_read(key, config):
            yield (
                f"algorithm.{key} is {said(at(own, key))}, but {algorithm.name} {why}; "
                f"{said(at(usual, key))} would do, or algorithm={better}"
            )
    if algorithm.compares_samples and own.group_of_one == "zero" and config.train.samples_per_prompt < 2:
        what = f"{algorithm.name} compares the samples of one prompt"
        yield unfit("train.samples_per_prompt", config.train.samples_per_prompt, what, "2 or more would do, 8 is usual")
    if "teacher" in registry.roles_of(config):
        yield from _teacher(config, model)


def _is_read(key: str, config: Config) -> bool:
    """Report reference settings without a reference: no algorithm reads them."""
    return not key.startswith("kl.") or config.algorithm.kl.coef > 0


def _teacher(config: Config, model: ModelSettings) -> Iterator[str]:
    path = config.algorithm.teacher
    if path is None:
        yield f"algorithm {config.algorithm.name} needs a teacher; set algorithm.teacher to a model folder"
        return
    found = list(folder_problems("algorithm.teacher", path))
    yield from found
    if found:
        return
    teacher = config.model.model_copy(update={"path": path})
    shape = shape_of(teacher)
    yield from window_problems(config, f"algorithm.teacher={path} reads", shape)
    if differing := _other_vocabulary(teacher, model, shape):
        yield f"algorithm.teacher={path} {differing}; a teacher with the policy's tokenizer would do"
    if shape is not None and (policy := shape_of(model)) is not None:
        yield from _room(config, path, shape, policy)


def _other_vocabulary(teacher: ModelSettings, model: ModelSettings, shape: ModelShape | None) -> str:
    """Compare the tokenizers: tokens go to the teacher as ids, which must mean the same there."""
    from tidemill.models.load import load_tokenizer  # brings transformers

    try:
        own, theirs = (load_tokenizer(one).get_vocab() for one in (model, teacher))
    except TidemillError as error:
        return f"has a vocabulary that cannot be compared: {error.message}"
    other = sorted((number, token) for token, number in own.items() if theirs.get(token) != number)
    if other:
        number, token = other[0]
        there = f"is {theirs[token]} there" if token in theirs else "is unknown to it"
        return (
            f"has another vocabulary: {len(other):,} of the policy's {len(own):,} tokens differ, first {token!r}, "
            f"which is {number} here and {there}"
        )
    if shape is not None and own and shape.vocabulary <= max(own.values()):
        return f"gives probabilities to {shape.vocabulary:,} tokens, but the policy has {max(own.values()) + 1:,}"
    return ""


def _room(config: Config, path: str, teacher: ModelShape, policy: ModelShape) -> Iterator[str]:
    """Report what cannot fit whatever else is set; `tidemill doctor --recipe` estimates the rest."""
    if teacher.parameters is None or policy.parameters is None:
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
