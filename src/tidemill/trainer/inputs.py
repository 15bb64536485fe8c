"""What a program hands over as objects, as settings that any process can read: functions by import path, rows as a
file, a model as a folder."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tidemill import imports
from tidemill.errors import ConfigError, did_you_mean
from tidemill.recipe import schema

KEPT = ".inputs"  # beside the runs: rows and models that were handed over as objects
MOST_ROWS = 1_000_000  # of an iterable that may have no end
PREFERRED = {"temperature": "rollout.temperature", "dtype": "model.dtype", "schedule": "flow.schedule"}
PLACES = {"model": "model", "rewards": "rewards", "data": "data", "reward_funcs": "rewards", "train_dataset": "data",
          "eval_dataset": "eval_data", "processing_class": "tokenizer", "args": "the settings themselves"}  # fmt: skip


# Settings


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as a tree of settings: sections as mappings, whole keys, or the last word of a key."""
    tree: dict[str, Any] = {}
    keys = schema.keys()
    for name, value in given.items():
        _put(tree, _key(name, keys), value)
    return tree


def _key(name: str, keys: list[str]) -> str:
    if name in keys or name in schema.tree():
        return name
    own = [key for key in keys if key.rpartition(".")[2] == name]
    least = min((key.count(".") for key in own), default=0)
    nearest = [key for key in own if key.count(".") == least]
    if name in PREFERRED:
        return PREFERRED[name]
    if len(nearest) == 1:
        return nearest[0]
    if nearest:
        raise ConfigError(f"{name!r} may be {', '.join(nearest)}", f'write the whole key: **{{"{nearest[0]}": …}}')
    if name in PLACES:
        raise ConfigError(f"Trainer calls {name!r} something else", f"{name}=… is {PLACES[name]}=… here")
    if (ours := schema.WORDS_FROM_ELSEWHERE.get(name)) is not None:
        raise ConfigError(f"there is no setting {name!r}", f"it is {ours} here: {ours.rpartition('.')[2]}=…")
    raise ConfigError(
        f"there is no setting {name!r}{did_you_mean(name, [k.rpartition('.')[2] for k in keys])}",
        "`tidemill config` lists every key with its help",
    )


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
        tree[name] |= dict(value)
    else:
        tree[name] = dict(value) if isinstance(value, Mapping) else value


def as_overrides(tree: Mapping[str, Any], before: str = "") -> list[str]:
    """The same settings as the command line writes them."""
    found: list[str] = []
    for name, value in tree.items():
        inner = schema.tree().get(f"{before}{name}")
        if isinstance(value, Mapping) and value and inner is not None and inner.section is not None:
            found += as_overrides(value, f"{before}{name}.")
        else:
            found.append(f"{before}{name}={json.dumps(value, default=_plain)}")
    return found


# Functions and classes


@dataclass(frozen=True, slots=True)
class Named:
    """What a recipe calls an object, and the object itself where only this process knows it."""

    path: str
    kept: Any = None


def name_of(thing: Any, what: str, executor: str, taken: Iterable[str] = ()) -> Named:
    """The name by which workers find a function or class. One that they cannot import is kept for this process, which
    is enough for `cluster.executor: local`; elsewhere it is refused."""
    if isinstance(thing, str):
        return Named(thing)
    if not callable(thing):
        raise ConfigError(f"{what} is {type(thing).__name__}, not a function", "give a function, or a name")
    path = import_path(thing, executor)
    if path is not None:
        return Named(path)
    if executor != "local":
        raise ConfigError(
            f"{what}: {_called(thing)} cannot be imported by the processes of cluster.executor={executor}",
            "move it to the top level of a .py file and import it from there, or run with cluster.executor=local",
        )
    word = re.sub(r"\W", "", getattr(thing, "__name__", type(thing).__name__)) or "function"
    word = f"f_{word}" if word[0].isdigit() else word
    name, number = word, 2
    while f"{imports.HERE}:{name}" in set(taken):
        name, number = f"{word}_{number}", number + 1
    return Named(f"{imports.HERE}:{name}", thing)


def import_path(thing: Any, executor: str) -> str | None:
    """`package.module:name` or `file.py:name`; None for closures, lambdas, methods, and whatever a notebook defines."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or not name.isidentifier() or not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return None
    home = sys.modules.get(module)
    if getattr(home, name, None) is not thing:
        return None
    file = getattr(home, "__file__", None)
    if module == "__main__":
        is_script = file is not None and Path(file).suffix == ".py" and Path(file).is_file()
        return f"{Path(str(file)).resolve()}:{name}" if is_script and executor != "local" else None
    if "." not in module and file and "site-packages" not in Path(file).parts and Path(file).suffix == ".py":
        return f"{Path(file).resolve()}:{name}"  # a module beside the program, which a worker may not find by name
    return f"{module}:{name}"


def _called(thing: Any) -> str:
    name = getattr(thing, "__qualname__", type(thing).__name__)
    return f"{name!r} of {getattr(thing, '__module__', None) or 'nowhere'}"


# Rows


def rows_to_file(data: Any, folder: Path, what: str, most: int = MOST_ROWS) -> Path:
    """Rows of a list, an iterable or a `datasets` dataset as a JSONL file, named by what is in it."""
    if _is_split(data):
        names = ", ".join(map(str, data))
        raise ConfigError(f"{what} has several splits ({names})", f'choose one: {what}=dataset["train"]')
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise ConfigError(f"{what} is a {type(data).__name__}, not rows", "give a list of rows, a file, or a name")
    lines, digest = [], hashlib.sha256()
    for number, row in enumerate(islice(iter(data), most), 1):
        line = (_line(row, f"{what}, row {number}") + "\n").encode()
        digest.update(line)
        lines.append(line)
    if not lines:
        raise ConfigError(f"{what} has no rows", "an iterator that was used up before gives nothing")
    file = folder / f"{digest.hexdigest()[:16]}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_bytes(b"".join(lines))
        aside.replace(file)
    return file.absolute()


def first_row(file: Path) -> Mapping[str, Any]:
    with file.open(encoding="utf-8") as lines:
        found: Mapping[str, Any] = json.loads(next(lines))
        return found


def _is_split(data: Any) -> bool:
    return isinstance(data, Mapping) and bool(data) and all(hasattr(part, "features") for part in data.values())


def _line(row: Any, where: str) -> str:
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {type(row).__name__}", "a row is a mapping of columns, or a prompt's text")
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}", "columns hold text, numbers, lists and mappings") from error


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    for name in ("tolist", "item"):
        if callable(found := getattr(value, name, None)):
            return found()
    raise TypeError(f"a {type(value).__name__} cannot be a row's value")


# Models


def model_to_folder(model: Any, tokenizer: Any, folder: Path) -> Path:
    """A model object as a Hugging Face folder, which workers and a resumed run open."""
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder.absolute()


def _tokenizer_of(model: Any) -> Any:
    where = getattr(getattr(model, "config", None), "_name_or_path", "") or getattr(model, "name_or_path", "")
    if where and Path(where).is_dir():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(where)
    raise ConfigError("the model is an object, and where its tokenizer is is not known", "give it: tokenizer=…")


def is_model(thing: Any) -> bool:
    return callable(getattr(thing, "save_pretrained", None)) and hasattr(thing, "config")


Reward = str | Callable[..., Any] | tuple[Any, float] | Mapping[str, Any]
