"""Feed: the next prompts as rows for the dock. The data position is one integer: a resumed run feeds the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tidemill.batch import GROUP, ID, LENGTH, Batch, Column
from tidemill.config import Config
from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, Order, Source
from tidemill.errors import DataError


class Feed:
    def __init__(self, source: Source, config: Config, encode: PromptTokens) -> None:
        self.source, self.config, self.encode = source, config, encode
        self.order = Order(source, config.seed, config.data.shuffle)
        self.position = 0  # examples looked at so far, bad ones included
        self.groups = 0  # prompts given out so far
        self.bad_rows: list[str] = []

    def examples(self, count: int) -> Iterator[tuple[Example, Any]]:
        """The next `count` usable examples with their tokens; bad ones are counted and skipped, or end the run."""
        given, bad_in_a_row = 0, 0
        while given < count:
            example = self.source.example(self.order(self.position))
            self.position += 1
            try:
                tokens = self._tokens(example)
            except DataError as error:
                bad_in_a_row += 1
                if self.config.data.on_bad_row == "fail":
                    raise
                self.bad_rows.append(error.message)
                if bad_in_a_row > (self.source.size or 1000):
                    raise DataError(f"{self.source.name}: no usable row is left", error.message) from error
                continue
            bad_in_a_row = 0
            given += 1
            yield example, tokens

    def _tokens(self, example: Example) -> Any:
        return self.encode.encode(example)

    def rows(self) -> Batch:
        """One step's rows: each prompt samples_per_prompt times, a group each."""
        train, n = self.config.train, self.config.train.samples_per_prompt
        picked = [pair for pair in self.examples(train.prompts_per_step) for _ in range(n)]
        groups = np.repeat(np.arange(self.groups, self.groups + train.prompts_per_step, dtype=np.int64), n)
        self.groups += train.prompts_per_step
        return Batch(
            {
                ID: groups * n + np.tile(np.arange(n), train.prompts_per_step),
                GROUP: groups,
                "group_size": np.full(len(groups), n, np.int32),
                LENGTH: np.array([len(tokens) for _, tokens in picked], np.int32),
                "prompt": Column.jagged([tokens for _, tokens in picked], np.int32),
                "answer": Column.text([e.answer for e, _ in picked]),
                "meta": Column.text([json.dumps(e.meta) for e, _ in picked]),
                "where": Column.text([e.where for e, _ in picked]),
            }
        )

    def state(self) -> dict[str, int]:
        return {"position": self.position, "groups": self.groups}

    def restore(self, state: dict[str, int]) -> None:
        self.position, self.groups = int(state["position"]), int(state["groups"])


class PairFeed(Feed):
    """Prompts with given responses, to learn from examples: every row is its own group and enters ready to learn."""

    def _tokens(self, example: Example) -> Any:
        return self.encode.encode_pair(example)

    def rows(self) -> Batch:
        count = self.config.train.prompts_per_step
        pairs = [pair for _, pair in self.examples(count)]
        ids = np.arange(self.groups, self.groups + count, dtype=np.int64)
        self.groups += count
        return Batch(
            {
                ID: ids,
                GROUP: ids,
                "group_size": np.ones(count, np.int32),
                LENGTH: np.array([len(p) + len(r) for p, r in pairs], np.int32),
                "tokens": Column.jagged([[*p, *r] for p, r in pairs], np.int32),
                "prompt_length": np.array([len(p) for p, _ in pairs], np.int32),
                "mask": Column.jagged([np.ones(len(r)) for _, r in pairs], np.uint8),
            }
        )
