"""Environments by name: built in, of an installed package of games, or a user's own by import path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.chat.answer import Schema
from tidemill.environment.api import GameMaker, Maker
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import built_in, check_arguments, is_import_path, load
from tidemill.recipe.config import EnvironmentSettings

BUILT_IN = {
    "nim": "tidemill.environment.nim:Nim",
    "seen_grid": "tidemill.environment.seen_grid:SeenGrid",
    "nim_duel": "tidemill.environment.duels:NimDuel",
    "tictactoe": "tidemill.environment.duels:TicTacToe",
    "tools": "tidemill.environment.tools.environment:Tools",
}
PACKAGES = {  # PREFIX:GAME
    "gem": "tidemill.environment.gem:maker",
    "gymnasium": "tidemill.environment.gymnasium:maker",
    "openenv": "tidemill.environment.openenv:maker",
    "skyrl": "tidemill.environment.skyrl:maker",
    "textarena": "tidemill.environment.textarena:maker",
}


def find(name: str) -> Maker:
    """The class a recipe names; a name that does not exist is a ConfigError with the nearest ones."""
    package, _, game = name.partition(":")
    if name in BUILT_IN:
        found: Maker = built_in(BUILT_IN[name])
        return found
    if package in PACKAGES and game:
        found = built_in(PACKAGES[package])(game)
        return found
    if is_import_path(name):
        found = load(name, ConfigError, "environment.name")
        return found
    raise ConfigError(
        f"environment.name: there is no environment {name!r}{did_you_mean(name, BUILT_IN)}",
        f"there are {', '.join([*BUILT_IN, *(f'{p}:GAME' for p in PACKAGES)])}; your own is package.module:Class",
    )


def find_game(settings: EnvironmentSettings) -> GameMaker:
    """The class of a game of several players."""
    package, _, game = settings.name.partition(":")
    if package == "textarena" and game:
        found: GameMaker = built_in("tidemill.environment.textarena:several")(game, settings.players)
        return found
    maker: Any = find(settings.name)
    seats = getattr(maker, "seats", None)
    if seats is None:
        raise ConfigError(
            f"environment.players is {settings.players}, but {settings.name!r} is for one: it has no `seats`",
            "leave environment.players out, or name a game of several players (docs/environments.md)",
        )
    if isinstance(seats, int) and seats != settings.players:
        raise ConfigError(
            f"environment.players is {settings.players}, but {settings.name!r} has {seats} seats",
            f"set environment.players={seats}",
        )
    return maker  # type: ignore[no-any-return]


def check_players(settings: EnvironmentSettings) -> None:
    """Refuse a game that is played by another number of players than the recipe says."""
    if settings.program is not None:
        return
    if settings.players > 1:
        find_game(settings)
        return
    seats = getattr(find(settings.name), "seats", 1)
    if isinstance(seats, int) and seats > 1:
        raise ConfigError(
            f"environment {settings.name!r} is a game of {seats} players", f"set environment.players={seats}"
        )


def offered(settings: EnvironmentSettings | None) -> list[Schema]:
    """The tools that every prompt tells a chat model of."""
    if settings is None or settings.program is not None:
        return []
    maker = find(settings.name)
    tell = getattr(maker, "offered", None)
    return list(tell(**settings.args)) if tell is not None else []


def check_args(name: str, maker: Maker, args: Mapping[str, Any]) -> None:
    check_arguments(f"environment {name!r}", maker, args, ConfigError)
