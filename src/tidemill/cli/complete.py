"""What a shell offers when Tab is pressed: recipes, runs and settings. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def recipe(incomplete: str) -> Iterator[tuple[str, str]]:
    """Recipes by name, then YAML files."""
    from tidemill.recipe import load

    yield from ((name, "recipe") for name in load.names() if name.startswith(incomplete))
    yield from ((name, "file") for name in _paths(incomplete) if name.endswith((".yaml", ".yml", "/")))


def run(incomplete: str) -> Iterator[tuple[str, str]]:
    """Runs of ./runs, by their folders, then other folders."""
    runs = sorted(path.parent.as_posix() for path in Path("runs").glob("*/config.yaml"))
    yield from ((name, "run") for name in runs if name.startswith(incomplete))
    yield from ((name, "folder") for name in _paths(incomplete) if name.endswith("/") and name.rstrip("/") not in runs)


def setting(incomplete: str) -> Iterator[tuple[str, str]]:
    """Settings, as `key=`."""
    from tidemill.recipe import schema

    known = schema.keys()
    yield from ((f"{key}=", "setting") for key in known if key.startswith(incomplete))


def _paths(incomplete: str) -> Iterator[str]:
    place = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    shown = "" if place == Path() else f"{place.as_posix().rstrip('/')}/"
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        name = f"{shown}{path.name}{'/' if path.is_dir() else ''}"
        if name.startswith(incomplete) and not path.name.startswith("."):
            yield name
