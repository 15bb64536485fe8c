"""Turn a recipe into settings that can run: absolute paths, sizes taken from the data where they are asked for, and
every check that needs no weights. Nothing is written before this is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.check import precheck, rules
from tidemill.data.mix import with_own_rewards
from tidemill.errors import ConfigError
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.data.survey import Lengths


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recipe that passed all checks, and what the user should know about it."""

    loaded: recipes.LoadedRecipe
    lengths: Lengths
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.loaded.config


def prepare(loaded: recipes.LoadedRecipe) -> Prepared:
    from tidemill.data import survey
    from tidemill.environment.vector import networks
    from tidemill.run.own import fitted

    notes: list[str] = []
    config = anchored(with_own_rewards(loaded.config))
    config = _from_run(config, notes.append)
    if config.data.fit:
        config = fitted(config, loaded.sources, notes.append)
    if config.model.policy is not None:
        config = networks.fitted(config)
    precheck.check(config, fetch=True)
    _check_device(config)
    if config.model.policy is not None:
        as_one = recipes.load(config).layers
        return Prepared(replace(loaded, config=config, layers=as_one), survey.Lengths(0, 0, 0.0), notes)
    training, held_out = survey.open_rows(config)
    config = _with_steps(config, training.size)
    rows = survey.checked(training)
    survey.check_columns(rows, config)
    config = _check_rewards(config, [*rows, *survey.checked(held_out)], notes.append)
    shown = survey.with_images(config, [*rows, *survey.checked(held_out)])
    if shown is not config:
        precheck.check(config := shown)
    lengths = _measured(config, survey.sampled(training))
    notes += [*survey.left_out(training), *survey.left_out(held_out), *lengths.sentences(config), *rules.unread(config)]
    as_one = recipes.load(config).layers  # what was chosen here is part of the recipe from now on
    return Prepared(replace(loaded, config=config, layers=as_one), lengths, notes)


# Paths


def anchored(config: Config) -> Config:
    """Return the config with absolute paths: a run works from any folder."""
    from tidemill.data.generators import is_generator

    data: dict[str, Any] = {
        key: _absolute(value)
        for key in ("source", "eval_source")
        if (value := getattr(config.data, key)) is not None and not is_generator(value)
    }
    data |= {
        key: _function(value)
        for key in ("source", "eval_source")
        if (value := getattr(config.data, key)) is not None and is_generator(value)
    }
    data["sources"] = tuple(
        entry.model_copy(
            update={"source": _function(entry.source) if is_generator(entry.source) else _absolute(entry.source)}
        )
        for entry in config.data.sources
    )
    model = {
        key: _absolute(value) for key in ("path", "warm_start") if (value := getattr(config.model, key)) is not None
    }
    functions = tuple(
        spec.model_copy(
            update={
                "function": _function(spec.function),
                "args": {k: _absolute(v) if k == "path" and isinstance(v, str) else v for k, v in spec.args.items()},
            }
        )
        for spec in config.rewards.functions
    )
    teacher = config.algorithm.teacher
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "model": config.model.model_copy(update=model),
            "rewards": config.rewards.model_copy(update={"functions": functions}),
            "algorithm": config.algorithm.model_copy(update={"teacher": _absolute(teacher) if teacher else teacher}),
        }
    )


def _absolute(path: str) -> str:
    place, at, which = path.partition("@")
    found = Path(path).expanduser()
    if found.exists():
        return str(found.absolute())
    run = Path(place).expanduser()
    return f"{run.absolute()}{at}{which}" if at and (run / "config.yaml").exists() else path


def _function(name: str) -> str:
    """Return `path/to/file.py:function` with an absolute path, and anything else as it is."""
    file, colon, function = name.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{function}" if colon and file.endswith(".py") else name


# Start from another run's model


def _from_run(config: Config, note: Callable[[str], None]) -> Config:
    """Resolve `model.path=RUN`, `RUN@STEP` and `RUN@best`: export the run's checkpoint to a folder in the cache."""
    if config.model.path is None or not is_run(config.model.path):
        return config
    from tidemill.run.trained import checkpoint_as_folder

    folder, step = checkpoint_as_folder(config.model.path)
    note(f"model.path={config.model.path}: step {step}, exported to {folder}")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def is_run(path: str) -> bool:
    return (Path(path.partition("@")[0]).expanduser() / "config.yaml").is_file()


# Checks


def _check_device(config: Config) -> None:
    if config.cluster.executor == "local":
        from tidemill import device

        device.pick(config.device)


def _with_steps(config: Config, rows: int | None) -> Config:
    epochs = config.train.epochs
    if epochs is None:
        return config
    if rows is None:
        raise ConfigError(
            f"train.epochs is {epochs:g}, but data.source={config.data.called} is endless, so it has no epochs",
            "set train.steps instead, and train.epochs=none",
        )
    steps = max(1, math.ceil(epochs * rows / config.train.prompts_per_step))
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def _check_rewards(config: Config, examples: list[Any], note: Callable[[str], None]) -> Config:
    """Check that rows have what rewards read. An algorithm that learns without rewards is not evaluated otherwise."""
    from tidemill.data import survey

    if config.algorithm.name in survey.GIVEN and not config.eval.size:
        return config
    problem = survey.unread(examples, config)
    if problem is None:
        return config
    if config.algorithm.name not in survey.GIVEN:
        raise problem
    note(f"held-out accuracy is not measured: {problem.message}")
    return config.model_copy(update={"eval": config.eval.model_copy(update={"size": 0})})


def _measured(config: Config, examples: list[Any]) -> Lengths:
    from tidemill.data import survey
    from tidemill.flow.feed import encoder_of
    from tidemill.models.load import load_tokenizer

    encode = encoder_of(config, load_tokenizer(recipes.model_of(config)))
    return survey.measure(examples, encode, config)
