"""The queue's configuration: TransferQueue's keys with their defaults, and what each means here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidemill.bridges.transfer_queue.samplers import SAMPLERS, BaseSampler
from tidemill.errors import did_you_mean

DEFAULTS: dict[str, Any] = {
    "metrics": {"enabled": False, "port": 0, "endpoint": None},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": 2, "zmq_info": None},
    },
}


class Settings(dict[str, Any]):
    """A mapping whose keys are attributes, too: what `init` returns where omegaconf is not installed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def merged(given: Any) -> Any:
    """Return the defaults with what was given laid over them."""
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError:
        return _merged(DEFAULTS, given or {})
    made = OmegaConf.create(DEFAULTS, flags={"allow_objects": True})
    return OmegaConf.merge(made, given) if given else made


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Settings:
    made = Settings()
    for key in {**base, **over}:
        mine, theirs = base.get(key), over.get(key, base.get(key))
        both = isinstance(mine, Mapping) or isinstance(theirs, Mapping)
        made[key] = _merged(mine or {}, theirs or {}) if both else theirs
    return made


def sampler_of(config: Any) -> BaseSampler:
    """Return the configured sampler: an object, a class, or the name of one."""
    given = config["controller"]["sampler"]
    if isinstance(given, str):
        if given not in SAMPLERS:
            known = ", ".join(SAMPLERS)
            raise ValueError(f"no sampler {given!r}{did_you_mean(given, SAMPLERS)} (there are {known})")
        given = SAMPLERS[given]
    if isinstance(given, type) and issubclass(given, BaseSampler):
        given = given()
    if not isinstance(given, BaseSampler):
        raise TypeError(f"controller.sampler must be a BaseSampler, its class or its name, got {given!r}")
    return given


def max_rows(config: Any) -> int | None:
    size = config["backend"].get("SimpleStorage", {}).get("total_storage_size")
    return None if size is None else int(size)


def to_json(config: Any) -> str:
    """Write what other processes need; a sampler object is the ledger's alone."""
    plain = _plain(config)
    sampler = plain["controller"]["sampler"]
    plain["controller"]["sampler"] = sampler if isinstance(sampler, str) else type(sampler).__name__
    return json.dumps(plain, default=str)


def from_json(text: str) -> Any:
    return merged(json.loads(text))


def _plain(config: Any) -> Any:
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError:
        return _copied(config)
    return OmegaConf.to_container(config) if OmegaConf.is_config(config) else _copied(config)


def _copied(config: Any) -> Any:
    return {key: _copied(value) for key, value in config.items()} if isinstance(config, Mapping) else config
