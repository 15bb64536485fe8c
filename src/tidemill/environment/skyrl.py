"""Environments as skyrl-gym has them: a class with `init(prompt)` and `step(action)`, registered by id or one's own.

A row's columns are its `extras`; `reward_spec.ground_truth` is the row's answer where the row says nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.environment.api import Maker, Task, Turn
from tidemill.errors import ConfigError, MissingExtra
from tidemill.imports import is_import_path, load


class SkyRL:
    """`args`: the environment's own settings, its `env_config`."""

    def __init__(self, task: Task, make: Any, **args: Any) -> None:
        extras = {"reward_spec": {"ground_truth": task.answer}, "extra_info": {}, **task.meta}
        self.prompt = [{"role": "user", "content": task.prompt}]
        self.environment = make(env_config=_Settings(args), extras=extras)

    def reset(self) -> str:
        prompt, _ = self.environment.init([dict(message) for message in self.prompt])
        if list(prompt) != self.prompt:
            raise ValueError("init() changes the prompt, which is a row's: change it in the data (data.rewrite)")
        return str(self.prompt[0]["content"])

    def step(self, text: str) -> Turn:
        told = self.environment.step(text)
        shown = told.get("postprocessed_action")
        if shown is not None and shown != text:
            raise ValueError("postprocessed_action would change tokens that the model has sampled: use stop strings")
        messages: Sequence[Mapping[str, Any]] = told["observations"]
        is_done = bool(told["done"])
        parts = _numbers(told.get("metadata") or {})
        if is_done and hasattr(self.environment, "get_metrics"):
            parts |= _numbers(self.environment.get_metrics())
        words = "\n".join(str(message["content"]) for message in messages)
        return Turn(words, is_done=is_done, reward=float(told["reward"]), parts=parts, messages=messages)

    def close(self) -> None:
        self.environment.close()


class _Settings(dict[str, Any]):
    """Settings by key and by attribute, as the environments' OmegaConf objects have them."""

    def __getattr__(self, name: str) -> Any:
        try:
            found = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return _Settings(found) if isinstance(found, dict) else found


def _numbers(told: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in told.items() if isinstance(value, int | float)}


def maker(id: str) -> Maker:
    """`id`: what the package has registered, or package.module:Class."""
    make = load(id, ConfigError, "environment.name") if is_import_path(id) else _registered(id)
    return lambda task, **args: SkyRL(task, make, **args)


def _registered(id: str) -> Any:
    try:
        import skyrl_gym
    except ImportError:
        raise MissingExtra("environment.name: skyrl:…", "skyrl-gym", "games") from None
    try:
        skyrl_gym.spec(id)
    except Exception as error:  # an error type of its own for each way to be unknown
        raise ConfigError(
            f"environment skyrl:{id}: {error}", "name a registered id, or package.module:Class"
        ) from error
    return lambda **given: skyrl_gym.make(id, **given)
