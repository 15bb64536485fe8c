"""A recipe from another framework's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidemill.bridges.recipes import trl, verl
from tidemill.bridges.recipes.given import Given, read
from tidemill.bridges.recipes.table import Converted
from tidemill.errors import ConfigError, did_you_mean

FRAMEWORKS: dict[str, Callable[[Given, str], Converted]] = {"trl": trl.convert, "verl": verl.convert}


def convert(framework: str, file: Path) -> Converted:
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"there is no reader for {framework!r}{did_you_mean(framework, FRAMEWORKS)}",
            f"there are {', '.join(FRAMEWORKS)}",
        )
    return FRAMEWORKS[framework](read(file), f"from {framework}'s {file.name}")
