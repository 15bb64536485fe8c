"""Settings from one source (a file, the command line), by dotted key; and how layers override one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tidemill.errors import did_you_mean
from tidemill.recipe import dialect, schema
from tidemill.recipe.config import AlgorithmSettings, Config, EnvironmentSettings, Rewards, Section

COMMAND_LINE = "command line"
Where = Callable[[str], str]  # dotted key → the place that wrote it


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and where it was written."""

    value: Any
    where: str


@dataclass(slots=True)
class Layer:
    """Settings of one file, or of the command line, by dotted key, and what is wrong with them."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def from_one(where: str) -> Where:
    return lambda key: where


def flatten(tree: Mapping[str, Any], where: Where, section: type[Section] = Config, prefix: str = "") -> Layer:
    layer = Layer()
    known = schema.fields(section, prefix)
    for name, value in tree.items():
        dotted, key = f"{prefix}{name}", known.get(str(name))
        if key is None:
            layer.problems.append(_unknown(dotted, where(dotted)))
            continue
        if key.section is not None:
            value = _long_form(key.section, value)
        if key.section is not None and isinstance(value, Mapping) and value:
            inner = flatten(value, where, key.section, f"{dotted}.")
            layer.problems += inner.problems
            layer.given[dotted] = Given({}, where(dotted))
            layer.given |= inner.given
        elif key.is_mapping and isinstance(value, Mapping) and value:
            layer.given |= {f"{dotted}.{k}": Given(v, where(f"{dotted}.{k}")) for k, v in value.items()}
        else:
            layer.problems += _unknown_in_list(key, value, where(dotted))
            layer.given[dotted] = Given(_leaf(key, value), where(dotted))
    return layer


def _long_form(section: type[Section], value: Any) -> Any:
    """Expand `algorithm: grpo` to `{name: grpo}`, so that a short form changes only what it names. The sections' own
    validators are not used: they fill in an algorithm's defaults, which must lie under every layer."""
    if section in (AlgorithmSettings, EnvironmentSettings) and isinstance(value, str) and value != "none":
        return {"name": value}
    if section is Rewards and isinstance(value, str | list | tuple):
        value = {"functions": value}
    if section is Rewards and isinstance(value, Mapping) and isinstance(value.get("functions"), str):
        value = {**value, "functions": [value["functions"]]}
    return value


def _leaf(key: schema.Key, value: Any) -> Any:
    if value == "none" and key.allows_none and "none" not in key.choices:
        return None
    return {} if value is None and key.is_mapping and not key.allows_none else value


def _unknown(dotted: str, where: str) -> str:
    close = schema.nearest_keys(dotted)
    return f"unknown key {dotted!r} ({where})" + (f"; did you mean {' or '.join(close)}?" if close else "")


def _unknown_in_list(key: schema.Key, value: Any, where: str) -> list[str]:
    if key.element is None or not isinstance(value, list | tuple):
        return []
    known = set(key.element.model_fields)
    return [
        f"unknown key '{key.name}[{i}].{name}' ({where}){did_you_mean(str(name), known)}"
        for i, item in enumerate(value)
        if isinstance(item, Mapping)
        for name in item
        if name not in known
    ]


def parse_overrides(overrides: Sequence[str]) -> Layer:
    layer = Layer()
    for text in overrides:
        dotted, equals, value = text.partition("=")
        dotted = dotted.strip().lstrip("-")
        if not equals or not dotted:
            layer.problems.append(
                f"{text!r} ({COMMAND_LINE}) is not an override; write key=value, such as train.steps=10"
            )
            continue
        try:
            parsed = _override_value(dotted, value)
        except yaml.YAMLError:
            layer.problems.append(f"the value of {text!r} ({COMMAND_LINE}) is not YAML; quote it")
            continue
        tree: Any = parsed
        for part in reversed(dotted.split(".")):
            tree = {part: tree}
        one = flatten(tree, from_one(COMMAND_LINE))
        layer.problems += one.problems
        lay_over(layer.given, one.given)
    return layer


def _override_value(dotted: str, text: str) -> Any:
    key = schema.tree().get(dotted)
    # Text is taken literally: {question} in a template is not a mapping, 007 is a name.
    if key is not None and key.is_text and not text.startswith(('"', "'")):
        return None if key.allows_none and text in ("none", "null", "~", "") else text
    return dialect.parse(text)


def lay_over(below: dict[str, Given], above: Mapping[str, Given]) -> None:
    """Override: a value replaces what was under its key; a mapping merges, and restores a section that was set to
    none."""
    for key, given in above.items():
        if given.value != {} or not _is_section(key):
            for old in [k for k in below if k == key or (k.startswith(f"{key}.") and not _is_free(key))]:
                del below[old]
        elif isinstance(below.get(key), Given) and below[key].value == {}:
            continue
        below[key] = given


def _is_section(key: str) -> bool:
    known = schema.tree().get(key)
    return known is not None and known.section is not None


def _is_free(key: str) -> bool:
    """Say whether the key lies under a free mapping, where `a.b` is not a part of `a`."""
    *above, _ = _parts(key)
    known = schema.tree().get(".".join(above))
    return known is not None and known.is_mapping


def _parts(dotted: str) -> list[str]:
    """Split a key into its path; what lies under a free mapping is one name, dots included."""
    parts = dotted.split(".")
    for i in range(1, len(parts)):
        key = schema.tree().get(".".join(parts[:i]))
        if key is not None and key.is_mapping:
            return [*parts[:i], ".".join(parts[i:])]
    return parts


def unflatten(given: Mapping[str, Given]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted in sorted(given, key=lambda k: len(_parts(k))):
        *above, name = _parts(dotted)
        place = tree
        for part in above:
            inner = place.get(part)
            place[part] = dict(inner) if isinstance(inner, Mapping) else {}
            place = place[part]
        place[name] = given[dotted].value
    return tree
