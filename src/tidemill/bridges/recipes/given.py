"""Reads the settings of another framework from what people keep them in: YAML, JSON, a shell script, a Python script.

Nothing is run. A shell script's variables are filled in where the script itself sets them; of a Python script the calls
of settings classes are read, and the command in its docstring.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tidemill.errors import ConfigError

Given = dict[str, Any]  # dotted key → value

ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\((.+)\)\)")
SUM = re.compile(r"[\d\s+*/()\-]+")
SETTING = re.compile(r"^\+{0,2}([A-Za-z_][\w.]*)=(.*)$", re.DOTALL)
CLASSES = ("Config", "Arguments")  # ends of the names of settings classes
KIND = "trainer"  # the key under which a script's trainer is kept: GRPO, DPO, …


def read(path: Path) -> Given:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "give a .yaml, .json, .sh or .py file") from None
    if path.suffix == ".py":
        found = of_python(text, path)
    elif path.suffix in (".yaml", ".yml", ".json"):
        found = of_tree(text, path)
    else:
        found = of_shell(text)
    if not found:
        raise ConfigError(
            f"{path} has no settings that can be read",
            "give the file that holds them: YAML, JSON, a script with key=value or --key value, or a Python script",
        )
    return found


def of_tree(text: str, path: Path) -> Given:
    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        kind, mark = path.suffix[1:].upper(), getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else getattr(error, "lineno", 1)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}:{line} is not {kind}: {problem}", "fix the file, or give another") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings, but {type(tree).__name__}", "give a file of the form key: value")
    return {key: value for key, value in _flat(tree) if not key.startswith(("defaults", "hydra"))}


def _flat(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif not (isinstance(value, str) and value.startswith("${")):  # another setting's value: it is read there
            yield f"{prefix}{key}", value_of(value) if isinstance(value, str) else value


def of_shell(text: str) -> Given:
    """The `key=value` and `--key value` words of every command, with the script's own variables filled in."""
    variables = {"HOME": os.path.expanduser("~")}
    found: Given = {}
    joined = re.sub(r"\\\s*\n", " ", text)
    for line in joined.splitlines():
        if line.lstrip().startswith("#"):
            continue
        assigned = ASSIGNED.match(line)
        if assigned and " --" not in line and "." not in assigned[1]:
            variables[assigned[1]] = _filled(_unquoted(assigned[2]), variables)
            continue
        found |= of_words(_words(line), variables)
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that ends on another line
        return line.split()


def of_words(words: list[str], variables: dict[str, str]) -> Given:
    found: Given = {}
    flag: str | None = None
    for word in words:
        filled = _filled(word, variables)
        setting = SETTING.match(filled)
        if filled.startswith("--"):
            name, has_value, value = filled[2:].partition("=")
            flag = name.replace("-", "_")
            found[flag] = value_of(value) if has_value else True
            flag = None if has_value else flag
        elif setting is not None and "." in setting[1]:
            found[setting[1]], flag = value_of(setting[2]), None
        elif flag is not None:
            found[flag] = _one_more(found[flag], value_of(filled))
    return {key: value for key, value in found.items() if key not in ("config_path", "config_name", "config_file")}


def _one_more(before: Any, value: Any) -> Any:
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _unquoted(text: str) -> str:
    words = _words(text)
    return words[0] if len(words) == 1 else text.partition(" #")[0].strip()


def _filled(text: str, variables: dict[str, str]) -> str:
    def fill(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        usual = _filled(found[2], variables) if found[2] is not None else found[0]
        return variables.get(name) or usual

    def add(found: re.Match[str]) -> str:
        term = VARIABLE.sub(fill, re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", found[1]))
        return str(int(eval(term))) if SUM.fullmatch(term) else found[0]  # numbers and signs alone

    return VARIABLE.sub(fill, ARITHMETIC.sub(add, text))


def value_of(text: str) -> Any:
    """A number, truth value, list or text, as YAML and Python write them."""
    plain = text.strip()
    if plain.lower() in ("none", "null", "~"):
        return None
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            pass
    if plain.startswith("[") and plain.endswith("]"):
        return [value_of(part.strip().strip("'\"")) for part in plain[1:-1].split(",") if part.strip()]
    return plain.rstrip(",")


# Python


def of_python(text: str, path: Path) -> Given:
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(
            f"{path}:{error.lineno} is not Python: {error.msg}", "fix the file, or give another"
        ) from None
    docstring = re.sub(r"```\w*", "", ast.get_docstring(module) or "")
    commands = [part for part in re.split(r"\n\s*\n", docstring) if "--" in part]
    found: Given = of_shell(commands[0]) if commands else {}
    constants = _constants(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            found |= _of_call(node, constants)
    return found


def _constants(module: ast.Module) -> dict[str, Any]:
    found = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _of_call(node: ast.Call, constants: dict[str, Any]) -> Given:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    arguments = {word.arg: _constant(word.value, constants) for word in node.keywords if word.arg}
    known = {key: value for key, value in arguments.items() if value is not ...}
    if name == "LoraConfig":
        return {f"lora_{key}" if not key.startswith("lora_") else key: value for key, value in known.items()}
    if name.endswith("Trainer"):
        first = _constant(node.args[0], constants) if node.args else ...
        model = known.get("model", first)
        rewards = next((_names(word.value) for word in node.keywords if word.arg == "reward_funcs"), [])
        made: Given = {KIND: name.removesuffix("Trainer")}
        made |= {"model_name_or_path": model} if isinstance(model, str) else {}
        return made | ({"reward_funcs": rewards} if rewards else {})
    if name == "load_dataset" and node.args and isinstance(_constant(node.args[0], constants), str):
        split = known.get("split")
        made = {"dataset_name": _constant(node.args[0], constants)}
        return made | ({"dataset_train_split": split} if isinstance(split, str) else {})
    return known if name.endswith(CLASSES) and name not in ("ScriptArguments",) else {}


def _constant(node: ast.expr, constants: dict[str, Any]) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return constants.get(node.id, ...) if isinstance(node, ast.Name) else ...


def _names(node: ast.expr) -> list[str]:
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [item.id for item in items if isinstance(item, ast.Name)]
