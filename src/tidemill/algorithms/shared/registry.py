"""Find every algorithm by name: the files of the folder above."""

from __future__ import annotations

from functools import cache

from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.shared import tables
from tidemill.errors import ConfigError, did_you_mean
from tidemill.graph import Graph
from tidemill.imports import files_of, is_import_path, load, named
from tidemill.recipe.config import Config

PACKAGE = "tidemill.algorithms"
BESIDE = ("api",)  # what an algorithm file states is no algorithm


def names() -> list[str]:
    return [name for name in files_of(PACKAGE) if name not in BESIDE]


@cache
def every() -> tuple[Algorithm, ...]:
    """All that are here; those that make their own samples first."""
    return tuple(sorted(map(get, names()), key=lambda algorithm: algorithm.input_kind != "prompts"))


def get(name: str) -> Algorithm:
    """An algorithm by its name, or a user's own by import path (an object or a class)."""
    found = load(name, ConfigError, "algorithm.name") if is_import_path(name) else named(PACKAGE, name)
    if found is None:
        raise ConfigError(
            f"algorithm.name: there is no algorithm {name!r}{did_you_mean(name, names())}",
            f"the algorithms are {', '.join(names())}; your own is package.module:name",
        )
    algorithm: Algorithm = found() if isinstance(found, type) else found
    return algorithm


def of(config: Config) -> Algorithm:
    return get(config.algorithm.name)


def unfit_for_policy(config: Config) -> list[str]:
    """What is wrong where the config's algorithm does not teach its kind of policy."""
    kind = "decoder" if config.model.policy is None else "network"
    if kind in of(config).policies:
        return []
    others = ", ".join(other.name for other in every() if kind in other.policies)
    return [f"algorithm.name is {of(config).name}, which does not train a {kind}; {others} would do"]


def graph_of(config: Config) -> Graph:
    """The table of the config's algorithm, with what its data adds to it."""
    return tables.with_images(of(config).graph(config), config)


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles that the table of the config's algorithm needs: a critic, a reference, …"""
    return graph_of(config).roles()
