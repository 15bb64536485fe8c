"""One set of ranks for all tests here: starting them costs more than most products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidemill.cluster.start.ranks import Ranks

MOST = 8
TESTS = 6  # that one set serves: every mesh leaves threads of its groups behind, and hundreds of them slow all others
PRELOAD = ("tests.learn.parallel.products", "tests.learn.parallel.models")


class Kept:
    """Ranks that are started again after a test that broke them, and after a few that did not."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self.uses = 0

    def get(self) -> Ranks:
        if self.ranks is not None and self.uses == TESTS:
            self.ranks.close()
        if self.ranks is None or not self.ranks.is_alive:
            self.ranks, self.uses = Ranks(MOST, timeout_s=150.0, preload=PRELOAD), 0
        self.uses += 1
        return self.ranks


@pytest.fixture(scope="session")
def kept_ranks() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    if kept.ranks is not None:
        kept.ranks.close()


@pytest.fixture
def ranks(kept_ranks: Kept) -> Ranks:
    return kept_ranks.get()
