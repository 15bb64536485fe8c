"""Past versions of the policy, in engines of their own: a league's members as opponents.

A rollout worker holds the weights of `league.resident` members at once; who plays against another waits until one of
them is free. Weights lie in the league's folder as safetensors.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from tidemill.environment.league import League
from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, RolloutEngine

EXPERT: Literal["expert"] = "expert"
Player = int | Literal["expert"] | None  # a member's version, the game's own expert, or the policy


class PastVersions:
    def __init__(self, league: League | None, loaded: LoadedModel, config: Config) -> None:
        self.league, self.loaded, self.config = league, loaded, config
        self._engines: dict[int, RolloutEngine] = {}
        self._busy: Counter[int] = Counter()  # matches of each member
        self._seen = -1  # the latest version that was looked at

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines.values())

    def step(self) -> list[Completion]:
        return [made for engine in self._engines.values() if engine.has_work for made in engine.step()]

    def keep(self, version: int) -> None:
        """Make a member of the weights that are served now, where the league wants one."""
        if self.league is None or version <= self._seen:  # an evaluation may serve a version's running mean meanwhile
            return
        self._seen = version
        if self.league.wants(version):
            self.league.add(version, self._write)
            self.league.save_ratings(version)

    def _write(self, path: Path) -> None:
        model = self.loaded.model
        kept = set(model.state_dict())
        own = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in own.items()}, path)

    def hold(self, version: Player) -> bool:
        """Whether the member can play now; it stays until it was let go as often."""
        assert isinstance(version, int)
        if version not in self._engines:
            free = [v for v in self._engines if not self._busy[v]]
            assert self.league is not None
            if len(self._engines) >= self.league.settings.resident and not free:
                return False
            self._take_in(version, free[0] if len(self._engines) >= self.league.settings.resident else None)
        self._busy[version] += 1
        return True

    def let_go(self, version: Player) -> None:
        if isinstance(version, int) and self._busy[version]:
            self._busy[version] -= 1

    def engine(self, version: Player) -> RolloutEngine:
        assert isinstance(version, int)
        return self._engines[version]

    def _take_in(self, version: int, instead: int | None) -> None:
        assert self.league is not None
        weights: dict[str, Any] = load_file(self.league.place(version))
        if instead is None:
            from tidemill.rollout.make import make_plain

            loaded = replace(self.loaded, model=copy.deepcopy(self.loaded.model))
            loaded.model.requires_grad_(False)
            engine = make_plain(loaded, self.config)
        else:
            engine = self._engines.pop(instead)
        engine.load(weights, version)
        self._engines[version] = engine

    def sleep(self) -> None:
        for engine in self._engines.values():
            engine.sleep()

    def wake(self) -> None:
        for engine in self._engines.values():
            engine.wake()
