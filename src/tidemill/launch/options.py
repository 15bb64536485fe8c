"""Settings of a target, given as `-o key=value`: typed, with a suggestion for a mistyped key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.errors import ConfigError, did_you_mean
from tidemill.recipe import dialect


class Options(BaseModel):
    """What every target understands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(1, ge=1, description="nodes; with several, a Ray cluster is made of them")
    python: str = Field("python3", description="the interpreter there, with Tidemill's dependencies installed")
    setup: str = Field("", description="shell lines to run first on each node, such as `module load cuda`")
    env: dict[str, str] = Field({}, description="environment variables of the job")
    restarts: int = Field(3, ge=0, description="times a killed run is resumed without a step made in between")
    port: int = Field(6379, ge=1, le=65535, description="of the Ray head, with several nodes")


Kind = TypeVar("Kind", bound=Options)


def parse(kind: type[Kind], given: Mapping[str, Any], where: str) -> Kind:
    known = kind.model_fields
    for key in given:
        if key not in known:
            raise ConfigError(
                f"--on {where} has no option {key!r}{did_you_mean(key, known)}", f"it has {', '.join(known)}"
            )
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"-o {key}={first['input']!r}: {first['msg'].lower()}", known[key].description or ""
        ) from error


def read(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words into a mapping, values as YAML; `env.NAME=value` goes into `env`."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"-o {word}: an option is key=value", "for example -o nodes=2")
        outer, dot, inner = key.partition(".")
        if dot:
            found.setdefault(outer, {})[inner] = value
        else:
            found[key] = dialect.parse(value)
    return found
