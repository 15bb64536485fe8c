"""A conversation as tokens: what the model said, what it was told, and which turn earned what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.batch import Array
from tidemill.environment.api import Played
from tidemill.rollout.engine import Completion, Finish, Partial, Request
from tidemill.tiles import Tiles


@dataclass(slots=True, eq=False, kw_only=True)
class Transcript:
    """Behind the prompt: tokens that were sampled (mask 1) and tokens of answers (mask 0), never tokenised again."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    routes: Array | None = None  # the last turn's: it has read all that was said before
    is_cut: bool = False  # some turn was drawn from a truncated distribution: `kept` counts
    tiles: Tiles = ()  # of images that answers showed, by their places in prompt and response
    before: int = 0  # tokens of the prompt
    images: int = 0  # that the prompt shows
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)  # where each turn begins, and what it earned

    def speak(self, made: Completion | Partial) -> None:
        self.turn_rewards.append((len(self.tokens), 0.0))
        self.tokens += made.tokens
        self.logprobs += made.logprobs
        self.versions += made.versions
        self.mask += [1] * len(made.tokens)
        self.kept += [0.0] * len(made.tokens) if made.kept is None else made.kept
        self.is_cut |= made.kept is not None
        self.routes = made.routes if isinstance(made, Completion) else None

    def hear(self, tokens: Sequence[int], version: int, tiles: Tiles = ()) -> None:
        """`tiles`: what the tokens show, by their places among them."""
        images = self.tiles[-1].image + 1 if self.tiles else self.images
        self.tiles += tuple(tile.moved(self.before + len(self.tokens), images) for tile in tiles)
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [version] * len(tokens)
        self.mask += [0] * len(tokens)
        self.kept += [0.0] * len(tokens)

    def gain(self, reward: float) -> None:
        """What the latest turn earned."""
        if self.turn_rewards:
            place, before = self.turn_rewards[-1]
            self.turn_rewards[-1] = (place, before + reward)

    def completion(self, request: Request, index: int, finish: Finish, error: str | None, played: Played) -> Completion:
        made = Completion(
            request, index, self.tokens, self.logprobs, self.versions, finish, error,
            self.kept if self.is_cut else None, self.routes, self.mask, played,
        )  # fmt: skip
        made.turn_rewards = self.turn_rewards
        made.tiles = self.tiles
        return made
