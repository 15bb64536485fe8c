"""Environments for networks by name: of Gymnasium, of PettingZoo, built in, or a user's own by import path."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from tidemill.environment.vector.agents import make_agents, of_parallel
from tidemill.environment.vector.duel import DuelSlots
from tidemill.environment.vector.slots import BatchedSlots, EnvSlots, Slots, VectorSlots
from tidemill.environment.vector.spaces import codec_of
from tidemill.errors import ConfigError, MissingExtra, TidemillError, did_you_mean
from tidemill.imports import built_in, is_import_path, load
from tidemill.models.spaces import Spaces
from tidemill.recipe.environment import EnvironmentSettings

BUILT_IN = {
    "bandit": "tidemill.environment.tasks.bandit:Bandit",
    "connect_four": "tidemill.environment.tasks.connect_four:ConnectFour",
    "inventory": "tidemill.environment.tasks.inventory:Inventory",
}
PICTURE = 240  # pixels of a side
GYMNASIUM, VECTOR, PETTINGZOO = "gymnasium", "gymnasium_vector", "pettingzoo"


def make_slots(settings: EnvironmentSettings, count: int, render: bool = False) -> Slots:
    """So many slots of the recipe's environment, in this process."""
    name, args = settings.name, dict(settings.args)
    package, _, game = name.partition(":")
    try:
        if package == GYMNASIUM and game:
            return _of_envs([_gymnasium(game, args, render) for _ in range(count)], name)
        if package == VECTOR and game:
            gymnasium = _package()
            return _of_vector(gymnasium.make_vec(game, num_envs=count, **args), name)
        if package == PETTINGZOO and game:
            return make_agents(game, args, count, render)
        return _of_class(_find(name), name, args, count, render)
    except TidemillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {name!r} could not be made: {type(error).__name__}: {error}", "see environment.args"
        ) from error


def _find(name: str) -> Any:
    if name in BUILT_IN:
        return built_in(BUILT_IN[name])
    if is_import_path(name):
        return load(name, ConfigError, "environment.name")
    raise ConfigError(
        f"environment.name: there is no environment {name!r} for a network{did_you_mean(name, BUILT_IN)}",
        f"there are {', '.join(BUILT_IN)}, {GYMNASIUM}:ID, {VECTOR}:ID and {PETTINGZOO}:MODULE; your own is "
        "package.module:Class",
    )


def _of_class(maker: Any, name: str, args: Mapping[str, Any], count: int, render: bool) -> Slots:
    """A class of our kind takes the number of slots; one of Gymnasium's takes none, and is made once for each."""
    if "count" in inspect.signature(maker).parameters:
        made = maker(count=count, **args)
        if hasattr(made, "to_move"):
            return DuelSlots(made, count)
        return _of_vector(made, name) if hasattr(made, "num_envs") else BatchedSlots(made, count)
    first = maker(**_rendering(maker, args, render))
    if hasattr(first, "num_envs"):
        return _of_vector(first, name)
    if hasattr(first, "possible_agents"):
        first.close()
        return of_parallel(lambda: maker(**_rendering(maker, args, render)), count, name)
    return _of_envs([first, *(maker(**_rendering(maker, args, render)) for _ in range(count - 1))], name)


def _rendering(maker: Any, args: Mapping[str, Any], render: bool) -> dict[str, Any]:
    takes = "render_mode" in inspect.signature(maker).parameters
    return {**args, **({"render_mode": "rgb_array"} if render and takes else {})}


def _of_envs(envs: list[Any], name: str) -> Slots:
    return EnvSlots(envs, codec_of(envs[0].observation_space, envs[0].action_space, name))


def _of_vector(env: Any, name: str) -> Slots:
    return VectorSlots(env, codec_of(env.single_observation_space, env.single_action_space, name))


def _gymnasium(game: str, args: Mapping[str, Any], render: bool) -> Any:
    gymnasium = _package()
    mode: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    if "mujoco" in str(getattr(gymnasium.registry.get(game), "entry_point", "")):
        _tell_warnings_of_mujoco()
        if render:
            mode |= {"width": PICTURE, "height": PICTURE}  # drawn in software, the usual size takes four times as long
    try:
        made = gymnasium.make(game, disable_env_checker=True, **mode, **args)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtra(f"environment gymnasium:{game} ({error})", "mujoco", "control") from None
    except gymnasium.error.Error as error:
        raise ConfigError(f"environment gymnasium:{game}: {error}") from error
    return made


def _tell_warnings_of_mujoco() -> None:
    """Print MuJoCo's warnings once each, into the worker's log: else it writes MUJOCO_LOG.TXT in the current folder."""
    try:
        import mujoco
    except ImportError:
        return  # said when the environment is made
    told = set[str]()

    def tell(warning: str) -> None:
        if warning not in told and "deprecated" not in warning:  # of the environments' own models
            told.add(warning)
            print(f"MuJoCo: {warning}", file=sys.stderr)

    mujoco.set_mju_user_warning(tell)


def _package() -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import gymnasium
    except ImportError:
        raise MissingExtra("environment.name: gymnasium:…", "gymnasium", "control") from None
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    return gymnasium


def spaces_of(settings: EnvironmentSettings) -> Spaces:
    """What the recipe's environment shows and takes."""
    slots = make_slots(settings, 1)
    try:
        return slots.spaces
    finally:
        slots.close()
