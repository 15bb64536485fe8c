"""YAML as people mean it: 1e-6 is a number, a key given twice is an error, every key knows its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tidemill.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-6 is a number; on, off, yes, no and 1:30 are text (true/false settings take them)."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as it was."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Unicode's own line ends survive only as escapes, which only double quotes have.
    odd = any(c in text for c in "\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf)|\.(nan|NaN)", "-+.0123456789"),
    ("merge", r"<<", "<"),
)
for _yaml in (_Loader, _Dumper):
    # The dumper keeps YAML 1.1's rules beside ours: it quotes what either would misread.
    _yaml.yaml_implicit_resolvers = {}
    if _yaml is _Dumper:
        _yaml.yaml_implicit_resolvers = {c: list(r) for c, r in yaml.SafeDumper.yaml_implicit_resolvers.items()}
    for _tag, _pattern, _first in _SCALARS:
        # The empty string stands for "no first character": an empty value is null.
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first]
        )


def parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def write(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML file's mapping and the line of each dotted key in it."""
    lines: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=_Loader)
        _note_lines(node, "", lines, path)
        tree = parse(text)
    except yaml.YAMLError as error:
        raise _explain(path, error) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{display(path)} cannot be read: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{display(path)} holds {type(tree).__name__}, but a recipe is a mapping of keys to values")
    return tree, lines


def _explain(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    at = f":{mark.line + 1}" if mark else ""
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    remedy = "check indentation, colons and quotes there"
    if "mapping values are not allowed" in what:
        remedy = "put a text with ': ' in it in quotes"
    return ConfigError(f"{display(path)}{at} is not YAML: {what}", remedy)


def _note_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int], path: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key, line = f"{prefix}{name.value}", name.start_mark.line + 1
        if key in lines and name.value != "<<":
            raise ConfigError(f"{key} is given twice in {display(path)}, on lines {lines[key]} and {line}", "keep one")
        lines[key] = line
        _note_lines(value, f"{key}.", lines, path)


def display(path: Path) -> str:
    """A path as short as it can be said from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
