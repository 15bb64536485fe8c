"""Reads YAML the way people mean it: 1e-6 is a number, a duplicate key is an error, every key knows its line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from tidemill.errors import ConfigError

# ${VAR}, ${VAR:-default}; $${…} is the text itself. While YAML is parsed, each stands as one character of Unicode's
# private use, because braces mean something else in {a: ${B}}.
VARIABLE = re.compile(r"\$(?P<escape>\$?)\{(?P<name>[A-Za-z_]\w*)(?P<rest>:-(?P<default>[^}]*))?\}")
FIRST_MARK = 0xE000


class _Loader(yaml.SafeLoader):
    """Reads YAML where 1e-6 is a number, and on, off, yes, no and 1:30 are text (true/false settings accept them).
    Environment variables that a value names are inserted, and typed as if they had been written there."""

    variables: list[re.Match[str]]

    def __init__(self, text: str) -> None:
        self.variables = []
        super().__init__(VARIABLE.sub(self._mark, text))

    def _mark(self, found: re.Match[str]) -> str:
        self.variables.append(found)
        return chr(FIRST_MARK + len(self.variables) - 1)

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if not any(FIRST_MARK <= ord(c) < FIRST_MARK + len(self.variables) for c in node.value):
            return node
        parts = [self._value(c, node.start_mark.line + 1) for c in node.value]
        node.value = "".join(parts)
        if node.style is None:
            node.tag = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        return node

    def _value(self, character: str, line: int) -> str:
        place = ord(character) - FIRST_MARK
        if not 0 <= place < len(self.variables):
            return character
        found = self.variables[place]
        if found["escape"]:
            return found[0][1:]
        value = os.environ.get(found["name"])
        if not value and found["rest"]:
            return str(found["default"])
        if value is None:
            raise UnsetVariable(found["name"], line)
        return value


class UnsetVariable(Exception):
    """A recipe names an environment variable that is not set."""

    def __init__(self, name: str, line: int) -> None:
        super().__init__(name)
        self.name, self.line = name, line


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back unchanged."""

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
    # The dumper keeps YAML 1.1's rules beside ours, and so quotes what either would misread.
    _yaml.yaml_implicit_resolvers = {}
    if _yaml is _Dumper:
        _yaml.yaml_implicit_resolvers = {c: list(r) for c, r in yaml.SafeDumper.yaml_implicit_resolvers.items()}
    for _tag, _pattern, _first in _SCALARS:
        # The empty string stands for "no first character": an empty value is null.
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first]
        )


KINDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a yes or no"}


def parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def write(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML file's mapping and the line of each dotted key in it."""
    lines: dict[str, int] = {}
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _note_lines(node, "", lines, path)
        tree = None if node is None else loader.construct_document(node)
    except UnsetVariable as unset:
        raise ConfigError(
            f"{display(path)}:{unset.line} names the environment variable {unset.name}, which is not set",
            f"set it, or give a default: ${{{unset.name}:-value}}; $${{{unset.name}}} is the text itself",
        ) from None
    except yaml.YAMLError as error:
        raise _explain(path, error) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{display(path)} cannot be read: {error}", "give the path of a YAML file") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{display(path)} holds {KINDS.get(type(tree), 'one value')}, but a recipe is a mapping of keys to values",
            "write key: value lines; `tidemill config quickstart --yaml` shows one",
        )
    return tree, lines


def _explain(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    at = f":{mark.line + 1}" if mark else ""
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    remedy = "check indentation, colons and quotes there"
    if "mapping values are not allowed" in what:
        remedy = "put text that contains ': ' in quotes"
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
    """Return the shortest form of a path, relative to the working folder where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
