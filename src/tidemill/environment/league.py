"""A league: past versions of a policy as opponents, and Elo ratings from the matches that were played.

It knows nothing of language or of models: a member is a version and a file or folder that the caller writes and reads.
Everything lies in one folder of the run. Members are made once, whoever is first; results are appended, one file for
each writer, and a match that a resumed run plays again takes the place of the first one. Ratings are a function of
members and results alone, so a run that goes on finds them as they were.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from tidemill.recipe.environment import LeagueSettings

POLICY = "policy"  # the player that learns
START = 1000.0  # rating of the first version
K = 16.0  # largest change of a rating by one match
SCALE = 400.0  # a lead of this much means odds of 10 to 1
RECENT = 4  # `draw: recent` chooses among so many


@dataclass(frozen=True, slots=True)
class Match:
    """How a match ended. `id` is the same when a resumed run plays it again."""

    id: str
    version: int  # of the policy that learns
    players: tuple[str, ...]  # POLICY, a member's name, or another's (an expert)
    scores: tuple[float, ...]  # the larger, the better


def member_name(version: int) -> str:
    return f"v{version:08d}"


def elo(matches: Iterable[Match], members: Iterable[int], k: float = K) -> dict[str, float]:
    """Ratings after all matches, in the order of versions and names.

    Of two players that met, S is 1, ½ or 0 by their scores and E = 1 / (1 + 10^((R_b − R_a)/400)) is what was expected;
    R_a grows by k (S − E), R_b loses as much. A member enters with the rating that the policy has when it is made.
    """
    ratings: dict[str, float] = {POLICY: START}
    entering = sorted(set(members))
    for match in sorted(matches, key=lambda m: (m.version, m.id)):
        while entering and entering[0] <= match.version:
            ratings[member_name(entering.pop(0))] = ratings[POLICY]
        gains: dict[str, float] = {}
        for (a, own), (b, other) in combinations(zip(match.players, match.scores), 2):
            if a == b:
                continue
            expected = 1.0 / (1.0 + 10.0 ** ((ratings.get(b, START) - ratings.get(a, START)) / SCALE))
            gain = k * ((0.5 if own == other else float(own > other)) - expected)
            gains[a], gains[b] = gains.get(a, 0.0) + gain, gains.get(b, 0.0) - gain
        for player, gain in gains.items():
            ratings[player] = ratings.get(player, START) + gain
    return ratings | {member_name(version): ratings[POLICY] for version in entering}


@dataclass(slots=True)
class League:
    """`writer`: names this process's file of results; two processes must not share one."""

    folder: Path
    settings: LeagueSettings
    writer: str = "0"
    seed: int = 0
    _matches: dict[str, Match] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)  # bytes of each file of results

    # Members

    def members(self, version: int | None = None) -> list[int]:
        """Versions in the league, the oldest first; only those before `version`, where it is given."""
        names = [entry.name for entry in self._listed() if entry.name.startswith("v") and "." not in entry.name]
        found = sorted(int(name[1:]) for name in names if name[1:].isdecimal())
        return [v for v in found if version is None or v < version]

    def wants(self, version: int) -> bool:
        """Whether this version is to be kept, and nobody has kept it yet."""
        return version % self.settings.every == 0 and not self.place(version).exists()

    def add(self, version: int, write: Callable[[Path], None]) -> None:
        """Keep a version: `write` makes a file or a folder at the path it is given. The oldest but the first leave
        when there are more than `keep`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f"{member_name(version)}.{self.writer}.new"
        write(aside)
        try:
            os.rename(aside, self.place(version))
        except OSError:  # another was first
            _remove(aside)
        members = self.members()
        for old in members[1 : max(1, len(members) - self.settings.keep + 1)]:
            _remove(self.place(old))

    def place(self, version: int) -> Path:
        return self.folder / member_name(version)

    def draw(self, key: str, version: int) -> int | None:
        """The opponent of a match that the policy plays at `version`: a member, or None for the policy itself. It is
        decided by `key`, the seed and the members, and with `draw: hard` by the results so far."""
        return self.drawing(version)(key)

    def drawing(self, version: int) -> Callable[[str], int | None]:
        """`draw` for many matches, with the members and results as they are now."""
        members = self.members(version)
        if self.settings.draw == "recent":
            members = members[-RECENT:]
        is_hard = self.settings.draw == "hard"
        weights = [self._hardness(member_name(m)) for m in members] if is_hard else []

        def draw(key: str) -> int | None:
            rng = random.Random(f"{self.seed} league {key}")
            if not members or rng.random() >= self.settings.share:
                return None
            return rng.choices(members, weights)[0] if is_hard else rng.choice(members)

        return draw

    def _hardness(self, member: str) -> float:
        """1 less the share of matches that the policy won against it, and a little, so that none is forgotten."""
        won = [m for m in self._matches.values() if {*m.players} == {POLICY, member}]
        points = [_points(m) for m in won]
        return 1.05 - (sum(points) + 0.5) / (len(points) + 1.0)

    # Results

    def record(self, matches: Sequence[Match]) -> None:
        if not matches:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps([m.id, m.version, list(m.players), list(m.scores)]) + "\n" for m in matches]
        with open(self.folder / f"results-{self.writer}.jsonl", "a") as file:
            file.write("".join(lines))
        self._matches |= {m.id: m for m in matches}

    def matches(self, version: int | None = None) -> list[Match]:
        """All results so far, of every writer; only those up to `version`, where it is given."""
        for entry in self._listed():
            if entry.name.startswith("results-"):
                self._take_in(entry)
        return [m for m in self._matches.values() if version is None or m.version <= version]

    def ratings(self, version: int | None = None) -> dict[str, float]:
        """Elo of the policy, the members, and others that it met."""
        members = [m for m in self.members() if version is None or m <= version]
        return elo(self.matches(version), members)

    def score(self, player: str, since: int = 0) -> tuple[float, int]:
        """The policy's mean score against one player (a win 1, a draw ½), and how many matches that is of."""
        points = [_points(m) for m in self.matches() if m.version >= since and {*m.players} == {POLICY, player}]
        return (sum(points) / len(points) if points else 0.0), len(points)

    def save_ratings(self, version: int) -> Mapping[str, float]:
        """Write `ratings.json` for people."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {name: round(rating, 1) for name, rating in sorted(self.ratings(version).items())}
        aside = self.folder / f"ratings.{self.writer}.new"
        aside.write_text(json.dumps({"version": version, "elo": found}, indent=1) + "\n")
        os.replace(aside, self.folder / "ratings.json")
        return found

    def _take_in(self, path: Path) -> None:
        """Read the lines that are new; one that is still being written waits."""
        with open(path, "rb") as file:
            file.seek(self._read.get(path.name, 0))
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[path.name] = self._read.get(path.name, 0) + len(whole)
        for line in whole.splitlines():
            id, version, players, scores = json.loads(line)
            held = self._matches.get(id)
            if held is None or path.name == f"results-{self.writer}.jsonl" or version > held.version:
                self._matches[id] = Match(id, version, tuple(players), tuple(scores))

    def _listed(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []


def _points(match: Match) -> float:
    """The policy's share of the point that a match of two is about."""
    own = match.scores[match.players.index(POLICY)]
    other = match.scores[1 - match.players.index(POLICY)]
    return 0.5 if own == other else float(own > other)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
