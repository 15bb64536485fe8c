"""Topologies in YAML: read with every mistake named, and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tidemill.errors import ConfigError, did_you_mean
from tidemill.topology.tree import KINDS, LEVELS, Level, Link, Topology


def load(path: str | Path) -> Topology:
    try:
        plain = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"topology {path}: {error}") from error
    return parse(plain, str(path))


def parse(plain: Any, where: str = "topology") -> Topology:
    """A description, checked: unknown keys, levels out of order and numbers that cannot be are refused."""
    fields = _fields(plain, {"name", "device", "levels"}, where)
    given = fields.get("levels")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{where}: levels is a list, from the inside outwards", f"of {', '.join(LEVELS)}")
    levels = tuple(_level(item, f"{where}: levels[{index}]") for index, item in enumerate(given))
    order = [LEVELS.index(level.name) for level in levels]
    if order != sorted(set(order)):
        raise ConfigError(f"{where}: levels must be in this order, each once: {', '.join(LEVELS)}")
    if "node" not in {level.name for level in levels}:
        raise ConfigError(f"{where}: the level node is missing", "what one machine holds must be known")
    return Topology(str(fields.get("name", "cluster")), str(fields.get("device", "device")), levels)


def _level(plain: Any, where: str) -> Level:
    fields = _fields(plain, {"level", "holds", "link"}, where)
    name = fields.get("level")
    if name not in LEVELS:
        raise ConfigError(f"{where}: no level {name!r}{did_you_mean(str(name), LEVELS)}", f"use {', '.join(LEVELS)}")
    return Level(name, int(_positive(fields, "holds", where, int)), _link(fields.get("link"), f"{where}.link"))


def _link(plain: Any, where: str) -> Link:
    """A known kind's name, or `{kind, gb_per_s, us}`; what is not said is the known kind's."""
    if isinstance(plain, str):
        plain = {"kind": plain}
    fields = _fields(plain, {"kind", "gb_per_s", "us"}, where)
    kind = str(fields.get("kind", ""))
    known = KINDS.get(kind)
    if known is None and "gb_per_s" not in fields:
        raise ConfigError(
            f"{where}: the rate of {kind!r} is not known{did_you_mean(kind, KINDS)}", "say gb_per_s (and us)"
        )
    rate = float(_positive(fields, "gb_per_s", where, float)) if "gb_per_s" in fields else known.gb_per_s  # type: ignore[union-attr]
    latency = fields.get("us", known.us if known else 0.0)
    if not isinstance(latency, int | float) or latency < 0:
        raise ConfigError(f"{where}.us={latency!r}: microseconds, 0 or more")
    return Link(kind, rate, float(latency))


def _fields(plain: Any, known: set[str], where: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: fields are expected, not {plain!r}", f"of {', '.join(sorted(known))}")
    for key in plain:
        if key not in known:
            fields = ", ".join(sorted(known))
            raise ConfigError(f"{where}: there is no field {key!r}{did_you_mean(str(key), known)}", f"use {fields}")
    return plain


def _positive(fields: Mapping[str, Any], key: str, where: str, kind: type) -> float:
    value = fields.get(key)
    allowed = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
        raise ConfigError(f"{where}.{key}={value!r}: a number above 0 is expected")
    return value


def dump(topology: Topology) -> str:
    levels = [
        {
            "level": level.name,
            "holds": level.holds,
            "link": {"kind": level.link.kind, "gb_per_s": level.link.gb_per_s, "us": level.link.us},
        }
        for level in topology.levels
    ]
    plain = {"name": topology.name, "device": topology.device, "levels": levels}
    return yaml.safe_dump(plain, sort_keys=False)
