"""Recipes: a whole run as a YAML file, which may extend another, with overrides from the command line. `load` returns
the validated config and where each setting came from. Mappings merge with what they extend; lists and values replace
it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

from tidemill.errors import ConfigError, did_you_mean
from tidemill.recipe import dialect, schema
from tidemill.recipe.config import Config, ModelSettings, Section
from tidemill.recipe.layer import Given, Layer, flatten, from_one, lay_over, parse_overrides, unflatten

DEFAULT, PYTHON = "default", "python"  # beside "file:line" and "command line"
ENV_FOLDERS = "TIDEMILL_RECIPES"  # more folders of recipes, separated like PATH
PYDANTICS_OWN = {*get_args(ErrorType), "not_a_number"}  # other errors say in words of their own what is wrong
SEE_KEYS = "`tidemill config` lists every key with its help"


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    config: Config
    sources: dict[str, str]  # dotted key → default, "file:line" or command line
    path: Path | None = None
    layers: tuple[Layer, ...] = ()  # whoever lays more over them knows what was given and what is a default


def load(
    recipe: str | Path | Mapping[str, Any] | Config | LoadedRecipe,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedRecipe:
    """Load the config of a recipe (a path, a name, a mapping or a finished config) with `key.sub=value` overrides.
    `settings`: a program's own, by section, over the recipe and under the overrides."""
    path: Path | None = None
    if isinstance(recipe, LoadedRecipe):
        if not overrides and not settings:
            return recipe  # with its sources
        path, layers = recipe.path, list(recipe.layers)
    elif isinstance(recipe, Config):
        layers = [flatten(recipe.model_dump(exclude_unset=True), from_one(PYTHON))]
    elif isinstance(recipe, Mapping):
        layers = [flatten(dict(recipe), from_one(PYTHON))]
    else:
        path = locate(str(recipe))
        layers = list(_read_with_bases(path))
    if settings:
        layers.append(flatten(dict(settings), from_one(PYTHON)))
    layers.append(parse_overrides(overrides))
    problems = [p for layer in layers for p in layer.problems]
    given: dict[str, Given] = {}
    for layer in layers:
        lay_over(given, layer.given)
    config = None
    try:
        config = Config.model_validate(unflatten(given))
    except ValidationError as error:
        found = [e for e in error.errors() if e["type"] != "extra_forbidden"]
        inner = {e["loc"][:n] for e in found for n in range(len(e["loc"]))}  # around a wrong value, all is wrong
        problems += [_explain(e, given) for e in found if e["loc"] not in inner]
    if problems or config is None:
        raise ConfigError(as_list(problems), SEE_KEYS)
    return LoadedRecipe(config, _sources(config, given), path, tuple(layers))


def model_of(config: Config) -> ModelSettings:
    """Return the settings of the model that will be trained; a warm start's are in its own recipe."""
    seen: list[str] = []
    while config.model.path is None and config.model.warm_start is not None:
        if config.model.warm_start in seen:
            raise ConfigError(f"warm starts form a cycle: {' → '.join([*seen, config.model.warm_start])}")
        seen.append(config.model.warm_start)
        config = load(config.model.warm_start).config
    return config.model


def as_list(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings cannot work:\n" + "\n".join(f"  - {p}" for p in problems)


# Finding recipes


def folders() -> list[Path]:
    """Return the folders in which recipes are found by name: the user's, the repository's, the package's."""
    mine = [Path(p) for p in os.environ.get(ENV_FOLDERS, "").split(os.pathsep) if p]
    package = Path(__file__).resolve().parents[1]
    repository = package.parents[1]
    ours = repository / "recipes" if (repository / "pyproject.toml").exists() else package / "recipes"
    return [f for f in [*mine, ours] if f.is_dir()]


def _named() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.rglob("*.y*ml")):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return found


def locate(name: str, beside: Path | None = None) -> Path:
    """Find the file of a recipe given as a path (relative to the file that names it, or to the working folder) or as
    a name."""
    for base in [beside.parent] if beside else [Path()]:
        if (base / name).expanduser().is_file():
            return (base / name).expanduser()
    known = _named()
    if (bare := re.sub(r"\.ya?ml$", "", name)) in known:
        return known[bare]
    if len(ends := [name for name in known if name.endswith(f"/{bare}")]) == 1:
        return known[ends[0]]
    asker = f" (extended by {beside})" if beside else ""
    close = did_you_mean(bare, names()) or did_you_mean(Path(bare).name, names())
    raise ConfigError(
        f"there is no recipe {name!r}{asker}{close}", "`tidemill recipes` lists names; a path ends in .yaml"
    )


def names() -> dict[str, Path]:
    """Return each recipe that can be run by name, with its file; names that begin with _ are parts of others."""
    return {name: path for name, path in _named().items() if not Path(name).name.startswith("_")}


def listing() -> list[tuple[str, str]]:
    """Return each recipe that can be run by name, with a line about it."""
    rows = []
    for name, path in names().items():
        try:
            layers = list(_read_with_bases(path))
            about = next((str(la.given["about"].value) for la in reversed(layers) if "about" in la.given), "")
        except ConfigError as error:
            about = f"cannot be read: {error.message.splitlines()[0]}"
        rows.append((name, about))
    return rows


def dump(config: Config) -> str:
    """Return the whole effective config as YAML that loads to an equal one."""
    return dialect.write(config.model_dump())


def _read_with_bases(path: Path, children: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Return the layers of a file and of all that it extends, the furthest base first."""
    path = path.resolve()
    if path in children:
        ring = " → ".join(dialect.display(p) for p in (*children[children.index(path) :], path))
        raise ConfigError(f"recipes extend each other in a cycle: {ring}", "remove one `extends`")
    tree, lines = dialect.read(path)
    base = tree.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"extends is {base!r} ({dialect.display(path)}), but wants one path or recipe name")
        yield from _read_with_bases(locate(base, beside=path), (*children, path))
    yield flatten(tree, lambda key: f"{dialect.display(path)}:{lines[key]}" if key in lines else dialect.display(path))


# Explaining


def _explain(error: Mapping[str, Any], given: Mapping[str, Given]) -> str:
    """Describe a pydantic error by the key, the value, where it came from, and what is accepted."""
    names = [part for part in error["loc"] if isinstance(part, str)]
    is_element = bool(error["loc"]) and isinstance(error["loc"][-1], int)
    dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error["loc"]).lstrip(".")
    where = _where(".".join(names), given)
    key = schema.tree().get(".".join(names)) or _element_key(names)
    if error["type"] in ("value_error", "assertion_error"):
        return f"{dotted or 'recipe'} ({where}): {error['msg'].split(', ', 1)[-1]}"
    if error["type"] == "missing":
        return f"{dotted} is missing ({where}); it wants {key.wants if key else 'a value'}"
    got = error["input"]
    if error["type"] == "huge_number":
        return f"{dotted} is {_shown(got)} ({where}), but wants a number of at most {error['ctx']['most']:,}"
    if error["type"] not in PYDANTICS_OWN:
        return f"{dotted} ({where}): {error['msg']}"
    close = did_you_mean(got, key.choices) if key and isinstance(got, str) else ""
    quoting = "; put it in quotes" if key and key.is_text and isinstance(got, int | float) else ""
    wants = (key.element_wants if is_element else key.wants) if key else error["msg"]
    wants = wants.replace("a number", "a finite number", 1) if error["type"] == "finite_number" else wants
    return f"{dotted} is {_shown(got)} ({where}), but wants {wants}{close}{quoting}"


def _element_key(names: list[str]) -> schema.Key | None:
    parent = schema.tree().get(".".join(names[:-1]))
    if parent is None or parent.element is None:
        return None
    return schema.fields(parent.element).get(names[-1])


def _where(dotted: str, given: Mapping[str, Given]) -> str:
    while dotted:
        if dotted in given:
            return given[dotted].where
        dotted = dotted.rpartition(".")[0]
    return DEFAULT


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _sources(config: Config, given: Mapping[str, Given]) -> dict[str, str]:
    found = {}
    plain = dict(leaves(Config()))
    for key, value in leaves(config):
        inside = [g.where for k, g in given.items() if k.startswith(f"{key}.")]
        if key in given:
            found[key] = given[key].where
        elif inside:
            found[key] = inside[-1]
        else:
            of_algorithm = key.startswith("algorithm.") and value != plain.get(key, value)
            found[key] = f"{DEFAULT} of {config.algorithm.name}" if of_algorithm else DEFAULT
    return found


def leaves(config: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return every setting of this config by dotted key; a section that is none counts as one setting."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe(loaded: LoadedRecipe) -> list[tuple[str, Any, str, str]]:
    """Return the rows of `tidemill config`: key, value, where it came from, help."""
    tree = schema.tree()
    return [(key, value, loaded.sources.get(key, DEFAULT), tree[key].help) for key, value in leaves(loaded.config)]


def keys() -> list[str]:
    return schema.keys()
