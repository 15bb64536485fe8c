"""Who a network plays against: itself, its past versions in the league, or players of known strength."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file, save_file

from tidemill.environment.league import POLICY, League, Match, member_name
from tidemill.environment.vector.duel import Anyone
from tidemill.recipe.config import Config

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
ITSELF = -1
MOST_RECORDED = 16  # matches of one fragment that ratings are made of


class Opponents:
    """`Others` of training: the policy as it is now, and members of the league."""

    def __init__(self, policy: Any, config: Config, run: Path | None, writer: str) -> None:
        settings = config.environment.league if config.environment is not None else None
        has_league = settings is not None and run is not None
        self.league = League(run / "league", settings, writer, config.seed) if has_league else None  # type: ignore[operator, arg-type]
        self.policy, self.version = policy, 0
        self.slips = settings.slips if settings is not None else 0.0
        self._members: dict[int, Any] = {}
        self._draw: Callable[[str], int | None] = lambda key: None
        self._ended: list[Match] = []

    def serve(self, version: int) -> None:
        """The policy is this version from now on: perhaps it becomes a member."""
        self.version = version
        if self.league is None:
            return
        if self.league.wants(version):
            self.league.add(version, self._write)
            self.league.save_ratings(version)
        self._draw = self.league.drawing(version)

    def _write(self, path: Path) -> None:
        save_file({name: t.detach().cpu().contiguous() for name, t in self.policy.state_dict().items()}, path)

    def _member(self, version: int) -> Any:
        if version not in self._members:
            assert self.league is not None
            member = copy.deepcopy(self.policy)
            member.load_state_dict(load_file(self.league.place(version)))
            member.serve()
            here = set(self.league.members())
            self._members = {v: m for v, m in self._members.items() if v in here} | {version: member}
        return self._members[version]

    def draw(self, seeds: Ints) -> Ints:
        found = [self._draw(str(seed)) for seed in seeds.tolist()]
        return np.array([ITSELF if one is None else one for one in found], np.int64)

    def answer(self, opponent: int, seen: Array, chance: Array) -> Array:
        """Slips lead to positions that good play never comes to, and whoever learns must know how to win those too."""
        player = self.policy if opponent == ITSELF else self._member(opponent)
        is_slip = chance < self.slips
        moves = np.zeros(len(seen), np.int64)
        if is_slip.any():
            moves[is_slip] = Anyone(self.policy.spaces).answer(opponent, seen[is_slip], chance[is_slip] / self.slips)
        if not is_slip.all():
            noise = (chance[~is_slip] - self.slips) / (1.0 - self.slips)
            moves[~is_slip] = player.act(seen[~is_slip], noise[:, None].astype(np.float32)).actions[:, 0]
        return moves

    def ended(self, opponents: Ints, seeds: Ints, seats: Ints, scores: Array) -> None:
        if self.league is None:
            return
        for opponent, seed, seat, score in zip(opponents.tolist(), seeds.tolist(), seats.tolist(), scores.tolist()):
            if opponent == ITSELF or len(self._ended) >= MOST_RECORDED:
                continue
            sides = [(POLICY, score), (member_name(opponent), -score)]
            (first, a), (second, b) = sides if seat == 0 else sides[::-1]
            self._ended.append(Match(str(seed), self.version, (first, second), (a, b)))

    def record(self) -> None:
        """Keep the results of a fragment."""
        if self.league is not None:
            self.league.record(self._ended)
        self._ended = []


class Known:
    """`Others` of an evaluation: a player of known strength."""

    def __init__(self, player: Callable[[Array, Array], Array]) -> None:
        self.player = player

    def draw(self, seeds: Ints) -> Ints:
        return np.zeros(len(seeds), np.int64)

    def answer(self, opponent: int, seen: Array, chance: Array) -> Array:
        return self.player(seen, chance)

    def ended(self, opponents: Ints, seeds: Ints, seats: Ints, scores: Array) -> None:
        """An evaluation counts by itself."""


def known_players(game: Any) -> Mapping[str, Callable[[Array, Array], Array]]:
    return getattr(game, "players", {})
