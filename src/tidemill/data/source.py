"""Where prompts come from: examples by index, from files or generators, split into training and held-out.

Everything is a function of (settings, seed, index), so the position of a run in its data is one integer.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tidemill.errors import DataError

if TYPE_CHECKING:
    from tidemill.data.streamed.rows import StreamedRows
    from tidemill.recipe.config import Data

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """One problem. `where` names its origin in messages to people: file:line or generator:index."""

    prompt: str | list[Message]
    answer: str = ""
    response: str | None = None  # what a good answer looks like, for supervised training
    meta: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns
    where: str = ""
    messages: list[Message] | None = None  # the whole conversation, where the row is one
    text: str | None = None  # a document to learn from as it is, where the row is one
    images: tuple[Any, ...] = ()  # that the prompt shows, as `data/pictures` takes them

    @property
    def problem(self) -> str:
        """What makes it another example than others: its prompt, or its text."""
        if self.text is not None:
            return self.text
        return repr(self.prompt) if not self.images else repr((self.prompt, [_known(one) for one in self.images]))


def _known(picture: Any) -> str:
    """What tells an image from others: where it lies, or what it holds."""
    if isinstance(picture, str):
        return picture
    held = picture if isinstance(picture, bytes) else picture.tobytes()
    return hashlib.blake2b(held, digest_size=16).hexdigest()


class Source(Protocol):
    """Examples by index. `size` is None for an endless generator."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    def example(self, index: int) -> Example: ...


@runtime_checkable
class Shuffles(Protocol):
    """A source that computes its own order, because a permutation of its rows would not fit into memory."""

    def shuffled(self, place: int, key: tuple[int, ...]) -> int: ...


class PassedOver(DataError):
    """A row that is left out of training on purpose: it is not counted as a bad one."""


class Order:
    """Which example comes at a position: a new permutation each pass, the identity without shuffling.

    The first pass after `size` positions is pass 1, and so on; an endless source is taken as it comes.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool = True) -> None:
        from tidemill.data.mix import Mixed

        if source.size == 0:
            raise DataError(f"{source.name} has no examples", "check data.source and data.split")
        self.size = None if isinstance(source, Mixed) else source.size  # a mix keeps the order of its parts
        self.source = source
        self.seed = seed
        self.shuffle = shuffle
        self._passes: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def over(self, source: Source) -> Order:
        """The same of another source."""
        return Order(source, self.seed, self.shuffle)

    def order(self, position: int) -> int:
        if self.size is None:
            return position
        number, place = divmod(position, self.size)
        if not self.shuffle:
            return place
        if isinstance(self.source, Shuffles):
            return self.source.shuffled(place, (self.seed, number))
        return int(self._permutation(number)[place])

    __call__ = order

    def _permutation(self, number: int) -> npt.NDArray[np.int64]:
        """A prompt that runs ahead may straddle two passes, so the last two permutations are kept."""
        assert self.size is not None
        if number not in self._passes:
            self._passes[number] = np.random.default_rng((self.seed, number)).permutation(self.size)
            while len(self._passes) > 2:
                self._passes.popitem(last=False)
        return self._passes[number]


@dataclass(frozen=True, slots=True)
class FileRows:
    """A fixed list of examples."""

    name: str
    examples: tuple[Example, ...]
    bad_rows: int = 0  # left out because they could not be used
    first_bad: str = ""  # where the first of them is, and what is wrong with it

    @property
    def size(self) -> int:
        return len(self.examples)

    def example(self, index: int) -> Example:
        return self.examples[index]


def open_source(data: Data, seed: int) -> tuple[Source, Source]:
    """Training and held-out data. No held-out problem occurs in training."""
    from tidemill.data import generators, mix, readers

    if data.sources:
        return mix.open_mix(data, seed)
    if generators.is_generator(data.source) or data.curriculum is not None:
        return open_generated(data, seed)
    rows = readers.read(data.source, data)
    if data.eval_source is None and data.eval_split is None:
        return split(rows, data.held_out, seed) if isinstance(rows, FileRows) else rows.split(data.held_out, seed)
    aside: Source
    if data.eval_source and generators.is_generator(data.eval_source):
        aside = generators.open_pair(data.eval_source, data.eval_args or {}, data.held_out, seed)[1]
        return rows, aside
    aside = readers.read_whole(data.eval_source or data.source, data, data.eval_split)
    return without(rows, aside), aside


def open_generated(data: Data, seed: int) -> tuple[Source, Source]:
    from tidemill.data import generators, readers

    train: Source
    if data.curriculum is not None:
        from tidemill.data.curriculum import open_curriculum

        levels = open_curriculum(data.source, data.args, data.curriculum, seed)
        train, aside = levels, generators.open_pair(data.source, levels.args[-1], data.held_out, seed)[1]
    else:
        train, aside = generators.open_pair(data.source, data.args, data.held_out, seed)
    if data.eval_source is None and data.eval_args is None:
        return train, aside
    if data.eval_source and not generators.is_generator(data.eval_source):
        return train, readers.read_whole(data.eval_source, data, data.eval_split)
    args = data.args if data.eval_args is None else data.eval_args
    return train, generators.open_pair(data.eval_source or data.source, args, data.held_out, seed)[1]


def without(rows: FileRows | StreamedRows, aside: FileRows) -> FileRows | StreamedRows:
    """The rows whose prompt is not held out."""
    if not isinstance(rows, FileRows):
        return rows.without(aside.examples)
    prompts = {example.problem for example in aside.examples}
    kept = tuple(example for example in rows.examples if example.problem not in prompts)
    if not kept:
        raise DataError(
            f"every prompt of {rows.name} is also in the held-out data {aside.name}: none is left to train on",
            "name other held-out data with data.eval_source, or use data.held_out instead",
        )
    return replace(rows, examples=kept)


def split(rows: FileRows, held_out: int, seed: int) -> tuple[FileRows, FileRows]:
    """Keep `held_out` rows aside, the same ones for the same seed. Rows with the same prompt stay on one side."""
    prompts: dict[str, list[Example]] = {}
    for example in rows.examples:
        prompts.setdefault(example.problem, []).append(example)
    keys = list(prompts)
    random.Random(f"held-out {seed}").shuffle(keys)
    aside: set[str] = set()
    count = 0
    for key in keys:
        if count >= held_out:
            break
        aside.add(key)
        count += len(prompts[key])
    if len(aside) == len(keys):
        raise DataError(
            f"{rows.name} has {len(rows.examples)} usable rows with {len(keys)} different prompts, "
            f"and data.held_out keeps {held_out} of them for evaluation: none is left to train on",
            "lower data.held_out, or name held-out data with data.eval_source",
        )
    kept = [example for example in rows.examples if example.problem not in aside]
    out = [example for example in rows.examples if example.problem in aside]
    return replace(rows, examples=tuple(kept)), FileRows(f"{rows.name} (held out)", tuple(out))
