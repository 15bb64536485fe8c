"""Feeds the next prompts as rows into the dock. The data position is one integer, so a resumed run feeds the same
rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill import tiles
from tidemill.batch import GROUP, ID, LENGTH, Batch, Column
from tidemill.data.curriculum import Curriculum
from tidemill.data.mix import Mixed
from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, FileRows, Order, PassedOver, Source
from tidemill.errors import DataError
from tidemill.flow.workers import Stopped
from tidemill.recipe.config import Config


class Feed:
    def __init__(self, source: Source, config: Config, encode: PromptTokens, greedy_rows: int = 0) -> None:
        self.source, self.config, self.encode, self.greedy_rows = source, config, encode, greedy_rows
        self.order = Order(source, config.seed, config.data.shuffle)
        self.position = 0  # examples read so far, bad ones included
        self.groups = 0  # prompts used so far
        self.places: list[int] = []  # data positions of the prompts that `rows` gave last
        self.bad_rows: list[str] = []  # found unusable while feeding
        self.stop: Callable[[], bool] = lambda: False  # called between rows: a slow source must not delay Ctrl-C

    def examples(self, count: int) -> Iterator[tuple[Example, Any]]:
        """Return the next `count` usable examples with their tokens; bad ones are counted and skipped, or end the
        run."""
        given, bad_in_a_row, first = 0, 0, self.position
        while given < count:
            if self.stop():
                self.position = first
                raise Stopped
            place = self.order(self.position)
            self.position += 1
            try:
                example = self.source.example(place)
                tokens = self._tokens(example)
            except PassedOver:
                continue
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
        tokens = self.encode.encode(example)
        return tokens, self.encode.tiles(example, tokens)

    def rows(self, prompts: int | None = None) -> Batch:
        """Make one step's rows (or those of `prompts` prompts): each prompt samples_per_prompt times, one group
        each."""
        prompts = prompts or self.config.train.prompts_per_step
        picked, self.places = [], []
        for example in self.examples(prompts):
            picked.append(example)
            self.places.append(self.position - 1)
        self.groups += prompts
        return self._rows(picked, np.arange(self.groups - prompts, self.groups, dtype=np.int64))

    def rows_again(self, groups: Sequence[int], places: Sequence[int]) -> Batch:
        """Make the rows of earlier prompts again, which lie at these data positions."""
        examples = [self.source.example(self.order(place)) for place in places]
        return self._rows([(example, self._tokens(example)) for example in examples], np.array(groups, np.int64))

    def _rows(self, picked: list[tuple[Example, Any]], numbers: npt.NDArray[np.int64]) -> Batch:
        prompts, n = len(picked), self.config.train.samples_per_prompt
        place = np.repeat(np.arange(prompts), n)  # index of each row's prompt among those picked
        groups = np.repeat(numbers, n)
        columns: dict[str, Any] = {
            ID: groups * n + np.tile(np.arange(n), prompts),
            GROUP: groups,
            "group_size": np.full(len(groups), n, np.int32),
            LENGTH: np.array([len(tokens) for _, (tokens, _) in picked], np.int32)[place],
            "prompt": Column.jagged([tokens for _, (tokens, _) in picked], np.int32).grouped(place),
            "answer": Column.text([e.answer for e, _ in picked]).grouped(place),
            "meta": Column.text([json.dumps(e.meta) for e, _ in picked]).grouped(place),
            "where": Column.text([e.where for e, _ in picked]).grouped(place),
        }
        if self.config.data.images is not None:
            shown = tiles.columns([own for _, (_, own) in picked])
            columns |= {name: column.grouped(place) for name, column in shown.items()}
        if self.greedy_rows:
            columns["greedy"] = np.tile(np.arange(n) < self.greedy_rows, prompts).astype(np.uint8)
        return Batch(columns)

    def take_cut(self) -> int:
        return self.encode.take_cut()

    def _shown(self, rows: list[tiles.Tiles]) -> dict[str, Column]:
        return {} if self.config.data.images is None else tiles.columns(rows)

    @property
    def left_out(self) -> int:
        """Count the rows left out so far, those left out when the file was read included."""
        parts = [part.source for part in self.source.parts] if isinstance(self.source, Mixed) else [self.source]
        return len(self.bad_rows) + sum(part.bad_rows for part in parts if isinstance(part, FileRows))

    def state(self) -> dict[str, Any]:
        own = {"position": self.position, "groups": self.groups}
        return own | ({"curriculum": self.source.state()} if isinstance(self.source, Curriculum) else {})

    def restore(self, state: dict[str, Any]) -> None:
        self.position, self.groups = int(state["position"]), int(state["groups"])
        if isinstance(self.source, Curriculum):
            self.source.restore(state["curriculum"])

    def report(self, metrics: dict[str, float]) -> None:
        """Pass a step's metrics to a source whose difficulty follows them."""
        if isinstance(self.source, Curriculum) and "accuracy" in metrics:
            train = self.config.train
            self.source.report(metrics["accuracy"], train.prompts_per_step * train.samples_per_prompt)


def encoder_of(config: Config, tokenizer: Any, longest_response: int | None = None) -> PromptTokens:
    """What turns this run's examples into tokens, and their images into tiles."""
    from tidemill.environment.registry import offered
    from tidemill.models.load import view_of
    from tidemill.recipe.load import model_of

    view = None if config.data.images is None else view_of(model_of(config), tokenizer)
    return PromptTokens(tokenizer, config.data, longest_response, offered(config.environment), view)


class PairFeed(Feed):
    """Feeds prompts with given responses, conversations and documents: every row is its own group and enters ready
    to learn. A document longer than a sample may be becomes several rows."""

    def __init__(self, source: Source, config: Config, encode: PromptTokens, greedy_rows: int = 0) -> None:
        super().__init__(source, config, encode, greedy_rows)
        self.left: list[Any] = []  # pieces of the last document that are not used yet

    def _tokens(self, example: Example) -> list[Any]:
        if example.text is None:
            prompt, response, learned = self.encode.encode_taught(example)
            return [(prompt, response, learned, self.encode.tiles(example, [*prompt, *response]))]
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens
        return [(*piece, ()) for piece in self.encode.encode_text(example, longest)]

    def _next(self) -> Any:
        if not self.left:
            _, self.left = next(self.examples(1))
        return self.left.pop(0)

    def state(self) -> dict[str, Any]:
        return super().state() | ({"pieces_left": len(self.left)} if self.left else {})

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        left = int(state.get("pieces_left", 0))
        last = self.source.example(self.order(self.position - 1)) if left else None
        self.left = self._tokens(last)[-left:] if last is not None else []

    def rows(self, prompts: int | None = None) -> Batch:
        count = prompts or self.config.train.prompts_per_step
        taught = [self._next() for _ in range(count)]
        ids = np.arange(self.groups, self.groups + count, dtype=np.int64)
        self.groups += count
        pairs, learned = [(p, r) for p, r, *_ in taught], [marks for _, _, marks, _ in taught]
        return given_rows(ids, ids, 1, pairs, learned).merge(self._shown([own for *_, own in taught]))


class PreferenceFeed(Feed):
    """Feeds pairs: a chosen and a rejected response of each prompt form one group; the column `chosen` says which is
    which."""

    def _tokens(self, example: Example) -> Any:
        prompt, chosen = self.encode.encode_pair(example)
        rejected = example.meta.get("rejected")
        if not isinstance(rejected, str):
            raise DataError(
                f"{example.where}: the row has no rejected response",
                "set data.columns.rejected to its column, and data.columns.response to that of the chosen one",
            )
        said = self.encode.response_tokens(rejected, example.where)
        return prompt, chosen, said, self.encode.tiles(example, prompt)

    def rows(self, prompts: int | None = None) -> Batch:
        count = prompts or self.config.train.prompts_per_step
        triples = [triple for _, triple in self.examples(count)]
        groups = np.repeat(np.arange(self.groups, self.groups + count, dtype=np.int64), 2)
        self.groups += count
        pairs = [(p, r) for p, chosen, rejected, _ in triples for r in (chosen, rejected)]
        chosen = np.tile(np.array([1.0, 0.0], np.float32), count)
        made = given_rows(2 * groups + np.tile([0, 1], count), groups, 2, pairs).merge({"chosen": chosen})
        return made.merge(self._shown([own for *_, own in triples for _ in range(2)]))


class JudgedFeed(PreferenceFeed):
    """Feeds single responses, good or bad; a pair gives one of each. Every response also follows another's prompt,
    with `mismatched` 1, to measure how far the policy has moved on unrelated text."""

    def rows(self, prompts: int | None = None) -> Batch:
        pairs = super().rows(prompts)
        order = list(range(pairs.rows))
        prompt_of = [pairs["tokens"][i][: pairs.values("prompt_length")[i]].tolist() for i in order]
        response = [pairs["tokens"][i][pairs.values("prompt_length")[i] :].tolist() for i in order]
        strange = [(prompt_of[i], response[(i + 2) % pairs.rows]) for i in order]
        own = [(prompt_of[i], response[i]) for i in order]
        ids = np.concatenate([2 * pairs.values(ID), 2 * pairs.values(ID) + 1])
        chosen = np.concatenate([pairs.values("chosen"), np.zeros(len(order), np.float32)])
        mismatched = np.repeat(np.array([0.0, 1.0], np.float32), len(order))
        # a group belongs to a prompt: its two responses, and the two mismatched ones
        groups = np.concatenate([pairs.values(GROUP), pairs.values(GROUP)])
        shown = tiles.of_batch(pairs)
        made = given_rows(ids, groups, 4, own + strange).merge({"chosen": chosen, "mismatched": mismatched})
        return made.merge(self._shown([*shown, *shown]))


def given_rows(
    ids: Any,
    groups: Any,
    group_size: int,
    pairs: list[tuple[list[int], list[int]]],
    learned: list[list[bool]] | None = None,
) -> Batch:
    """Make rows that come with their responses; all response tokens are learned unless `learned` selects some."""
    masks = [np.ones(len(r)) for _, r in pairs] if learned is None else learned
    return Batch(
        {
            ID: ids,
            GROUP: groups,
            "group_size": np.full(len(ids), group_size, np.int32),
            LENGTH: np.array([len(p) + len(r) for p, r in pairs], np.int32),
            "tokens": Column.jagged([[*p, *r] for p, r in pairs], np.int32),
            "prompt_length": np.array([len(p) for p, _ in pairs], np.int32),
            "mask": Column.jagged(masks, np.uint8),
        }
    )


FEEDS = {"prompts": Feed, "responses": PairFeed, "pairs": PreferenceFeed, "judged": JudgedFeed}
