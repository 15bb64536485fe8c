"""What the scheduler moves about: samples of requests, runs of tokens to be read, and what paused samples keep.

A `Trunk` is read into the cache once, however many samples branch off its end: a prompt with its n samples, or a
half-made sample that goes on after a pause.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tidemill.batch import Array
from tidemill.rollout.engine import Completion, Finish, Partial, Request, Top
from tidemill.rollout.native.pages.host import HostCopy
from tidemill.rollout.native.pages.states import Hand
from tidemill.rollout.native.scene import Scene


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. The tokens it makes lie in its slot's arrays; the lists here hold those from before it
    last lost its slot."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[float] | None = None
    tops: list[Top] | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    shared: int = 0  # leading pages that others may hold too
    weights: int = 0  # that its pages began to be written with, as `PrefixIndex` counts
    spans: list[tuple[int, int]] = field(default_factory=list)  # (tokens made in this slot before, version from there)
    scene: Scene | None = None  # what its prompt shows

    def context(self) -> Array:
        """What is read to go on with it."""
        return np.array([*self.request.prompt, *self.tokens], np.int64)

    def identity(self) -> Array:
        """The same with images told apart."""
        made = self.context()
        if self.scene is not None:
            prompt = len(self.request.prompt)
            made[:prompt] = self.scene.identity[:prompt]
        return made

    def as_partial(self, cache: Kept | None = None) -> Partial:
        return Partial(self.request, self.index, self.tokens, self.logprobs, self.versions, self.kept, cache)

    def as_completion(self, finish: Finish, error: str | None = None, routes: Array | None = None) -> Completion:
        made = (self.tokens, self.logprobs, self.versions)
        return Completion(self.request, self.index, *made, finish, error, self.kept, routes, tops=self.tops)


@dataclass(slots=True, eq=False)
class Trunk:
    tokens: Array
    members: deque[Sequence]
    is_sole: bool  # one sample only: it takes the pages over
    pages: list[int] = field(default_factory=list)
    found: int = 0  # leading pages that were already cached
    done: int = 0  # tokens in the cache
    weights: int = 0  # that its pages began to be written with
    hand: Hand = field(default_factory=dict)  # states after the last token in the cache, of a model that has some
    logits: Tensor | None = None  # after the last token, once all are read
    kept: Kept | None = None  # of the cache, for when it is admitted
    scene: Scene | None = None  # what the tokens show; None: text alone

    @property
    def identity(self) -> Array:
        """What tells its pages from those of others."""
        return self.tokens if self.scene is None else self.scene.identity


@dataclass(slots=True, eq=False)
class Kept:
    """The cache of samples that have no slot, held for when they go on: on the device, or in host memory where it had
    to make room. With neither it was given up, and is read again."""

    pages: list[int]
    shared: int
    length: int  # tokens in it
    weights: int
    hand: Hand
    copy: HostCopy | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens `first:last` of a trunk are read in this step."""

    trunk: Trunk
    first: int
    last: int
