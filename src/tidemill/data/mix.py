"""Several sources as one: rows of each in exact shares, and where a position of the run lies in each of them.

Weights become whole numbers, `3 : 1`; every four positions in a row hold three rows of the one and one of the other,
spread evenly. Each source is shuffled and begun again by itself, so the row at a position depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING

from tidemill.data.source import Example, FileRows, Order, Source, open_source, without
from tidemill.data.streamed.rows import StreamedRows
from tidemill.errors import ConfigError, did_you_mean
from tidemill.reward.api import FROM

if TYPE_CHECKING:
    from tidemill.recipe.config import Config, Data, DataSource, RewardSpec

LONGEST_CYCLE = 100_000  # positions after which shares repeat


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    source: Source
    weight: float
    order: Order


class Mixed:
    """Implements `Source`, in the order in which its rows are taken."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.counts = whole_numbers([part.weight for part in parts])
        spread = ((Fraction(2 * k + 1, 2 * n), i, k) for i, n in enumerate(self.counts) for k in range(n))
        self.cycle = [(i, k) for _, i, k in sorted(spread)]

    def over(self, change: Callable[[Source], Source]) -> Mixed:
        """The same mix of changed sources."""
        return Mixed([replace(p, source=new, order=p.order.over(new)) for p in self.parts if (new := change(p.source))])

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self.parts)

    @property
    def size(self) -> int | None:
        sizes = [part.source.size for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def example(self, index: int) -> Example:
        cycles, place = divmod(index, len(self.cycle))
        which, rank = self.cycle[place]
        part = self.parts[which]
        return marked(part.source.example(part.order(cycles * self.counts[which] + rank)), part.name)


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the same proportions as the weights are written."""
    shares = [Fraction(repr(weight)) for weight in weights]
    common = lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    found = [n // gcd(*whole) for n in whole]
    if sum(found) > LONGEST_CYCLE:
        raise ConfigError(
            f"data.sources: weights {', '.join(map(str, weights))} are exact only after {sum(found):,} rows",
            f"round them, so that their sum in whole numbers is at most {LONGEST_CYCLE:,}",
        )
    return found


def marked(example: Example, name: str) -> Example:
    return replace(example, meta={**example.meta, FROM: name})


def open_mix(data: Data, seed: int) -> tuple[Source, Source]:
    """Training data in shares, and the held-out rows of every source. No source trains on what another holds out."""
    names = names_of(data)
    opened = [open_source(own_settings(data, entry), seed) for entry in data.sources]
    together = held_out(names, [aside for _, aside in opened])
    parts = []
    for name, entry, (training, _) in zip(names, data.sources, opened):
        own: Source = training
        if isinstance(training, FileRows | StreamedRows) and together.size:
            own = without(training, together)
        parts.append(Part(name, own, entry.weight, Order(own, seed, data.shuffle)))
    return Mixed(parts), together


def held_out(names: Sequence[str], asides: Iterable[Source]) -> FileRows:
    """All held-out rows, each source's spread evenly, so that the first of them are of every source."""
    rows = [
        ((2 * k + 1) / (2 * aside.size), i, marked(aside.example(k), names[i]))
        for i, aside in enumerate(asides)
        if aside.size
        for k in range(aside.size)
    ]
    return FileRows("held-out data", tuple(example for *_, example in sorted(rows, key=lambda row: row[:2])))


def own_settings(data: Data, entry: DataSource) -> Data:
    """The settings of one source: its own where it has some, else those of `data`."""
    own = {name: value for name in entry.OWN if (value := getattr(entry, name)) is not None}
    return data.model_copy(update={**own, "source": entry.source, "sources": ()})


def names_of(data: Data) -> list[str]:
    """Return the sources' names, as metrics have them: given, or the file's. Each once."""
    names = [entry.name or entry.source.rstrip("/").rpartition("/")[2].partition(".")[0] for entry in data.sources]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(
            f"data.sources has two sources called {twice[0]!r}", "give each a name of its own: data.sources[].name"
        )
    return names


def with_own_rewards(config: Config) -> Config:
    """Give every source's own rewards to those samples alone, and the others to sources without any."""
    data, rewards = config.data, config.rewards
    names = names_of(data) if data.sources else []
    for key in ("curriculum", "fit") if names else ():
        if getattr(data, key):
            raise ConfigError(f"data.{key} looks at one source, and data.sources has {len(names)}", "leave one out")
    for spec in rewards.functions:
        for name in spec.sources:
            if name not in names:
                raise ConfigError(
                    f"rewards: {spec.function!r} judges samples of {name!r}, which is not a source"
                    f"{did_you_mean(name, names)}",
                    f"data.sources are {', '.join(names)}" if names else "data.sources is empty",
                )
    if not any(entry.rewards for entry in data.sources):
        return _all_judged(config, names)
    rest = tuple(name for name, entry in zip(names, data.sources) if not entry.rewards)
    functions: list[RewardSpec] = [
        spec if spec.sources else spec.model_copy(update={"sources": rest})
        for spec in rewards.functions
        if spec.sources or rest
    ]
    for name, entry in zip(names, data.sources):
        functions += [spec.model_copy(update={"sources": (name,)}) for spec in entry.rewards]
    plain = tuple(entry.model_copy(update={"rewards": ()}) for entry in data.sources)
    return _all_judged(
        config.model_copy(
            update={
                "data": data.model_copy(update={"sources": plain}),
                "rewards": rewards.model_copy(update={"functions": tuple(functions)}),
            }
        ),
        names,
    )


def _all_judged(config: Config, names: Sequence[str]) -> Config:
    for name in names:
        if not any(not spec.sources or name in spec.sources for spec in config.rewards.functions):
            raise ConfigError(
                f"no reward judges samples of the source {name!r}", f"give it one: data.sources[].rewards, or {name!r} "
                "among the sources of one in rewards.functions",
            )  # fmt: skip
    return config
