"""A look at the data before a model is loaded: how long its rows are in tokens, and whether rewards find what they
read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.data.mix import Mixed, marked
from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, FileRows, Source, open_source
from tidemill.data.streamed.rows import StreamedRows
from tidemill.errors import DataError, did_you_mean
from tidemill.reward.api import FROM

if TYPE_CHECKING:
    from tidemill.recipe.config import Config

GIVEN = {"sft": ("response",)} | dict.fromkeys(
    ("dpo", "ipo", "kto", "orpo", "simpo", "reward_model"), ("response", "rejected")
)  # algorithms that learn from responses in the data, and the columns these are in
MOST_ROWS, MOST_MADE = 4096, 64  # rows of a file, and problems of a generator, whose lengths are measured
Lacking = Callable[[Example], DataError | None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the rows looked at."""

    rows: int
    longest_prompt: int
    mean_prompt: float
    longest_response: int = 0  # of those in the data
    cut: int = 0  # responses in the data that are longer than rollout.max_new_tokens
    too_long: int = 0  # prompts longer than data.max_prompt_tokens

    def bounded(self, config: Config) -> Config:
        """The config with lengths that the data does not reach lowered to those it has, for estimates."""
        prompt = min(config.data.max_prompt_tokens, max(1, self.longest_prompt))
        changes: dict[str, Any] = {"data": config.data.model_copy(update={"max_prompt_tokens": prompt})}
        if config.algorithm.name in GIVEN:
            response = min(config.rollout.max_new_tokens, max(1, self.longest_response))
            changes["rollout"] = config.rollout.model_copy(update={"max_new_tokens": response})
        return config.model_copy(update=changes)

    def sentences(self, config: Config) -> list[str]:
        """What the user should know before training."""
        if not self.cut:
            return []
        return [
            f"{self.cut} of {self.rows} responses looked at are longer than rollout.max_new_tokens "
            f"({config.rollout.max_new_tokens}) and are cut; the longest has {self.longest_response} tokens: "
            f"rollout.max_new_tokens={self.longest_response} would keep all whole"
        ]


def open_rows(config: Config) -> tuple[Source, Source]:
    """Open training and held-out data. With data.on_bad_row=skip, leave out the rows that lack a column which the
    algorithm or a reward reads."""
    training, held_out = open_source(config.data, config.seed)
    given = GIVEN.get(config.algorithm.name)
    learned = _lacking_rewards(config) if given is None else _lacking_given(config)
    if config.data.on_bad_row == "fail":
        return _checked_later(training, learned), held_out
    return _complete(training, learned), _complete(held_out, _lacking_rewards(config))


def _complete(source: Source, lacking: Lacking) -> Source:
    """Leave out incomplete rows of a file. Where all are, keep them: the mistake is the recipe's, and is refused."""
    if isinstance(source, Mixed):
        return source.over(lambda part: _complete(part, lacking))
    if isinstance(source, StreamedRows):
        return source.needing(lacking)
    if not isinstance(source, FileRows):
        return source
    found = [(example, lacking(example)) for example in source.examples]
    kept = tuple(example for example, problem in found if problem is None)
    if not kept or len(kept) == len(found):
        return source
    first = source.first_bad or next(problem.message for _, problem in found if problem is not None)
    return FileRows(source.name, kept, source.bad_rows + len(found) - len(kept), first)


def _checked_later(source: Source, lacking: Lacking) -> Source:
    """Rows that are not read yet are checked as they come; all others are checked before the run."""
    if isinstance(source, Mixed):
        return source.over(lambda part: _checked_later(part, lacking))
    return source.needing(lacking) if isinstance(source, StreamedRows) else source


def left_out(source: Source) -> list[str]:
    """Say how many rows of a file are left out, and why the first one is."""
    if isinstance(source, Mixed):
        return [sentence for part in source.parts for sentence in left_out(part.source)]
    if not isinstance(source, FileRows) or not source.bad_rows:
        return []
    rows = "1 row" if source.bad_rows == 1 else f"{source.bad_rows:,} rows"
    return [f"{rows} left out (data.on_bad_row=skip); the first: {source.first_bad}"]


def sampled(source: Source) -> list[Example]:
    """Return the rows whose lengths are measured."""
    count = MOST_MADE if source.size is None else min(source.size, MOST_ROWS)
    if isinstance(source, StreamedRows):
        return source.sample(count)
    return [source.example(i) for i in range(count)]


def checked(source: Source) -> Sequence[Example]:
    """Return the rows whose columns are checked: all of a file's, some of a generator's or of a streamed file's."""
    if isinstance(source, Mixed):
        return [marked(example, part.name) for part in source.parts for example in checked(part.source)]
    return source.examples if isinstance(source, FileRows) else sampled(source)


def with_images(config: Config, examples: Sequence[Example]) -> Config:
    """Turn images on where rows have some, and look at each once."""
    from tidemill.data.pictures.shown import check_rows
    from tidemill.recipe.images import ImageSettings

    if not any(example.images for example in examples):
        return config
    images = config.data.images or ImageSettings()
    if config.data.on_bad_row == "fail":
        check_rows(examples, images)
    return config.model_copy(update={"data": config.data.model_copy(update={"images": images})})


def measure(examples: Sequence[Example], encode: PromptTokens, config: Config) -> Lengths:
    """Tokenise the rows. A prompt over the limit is a DataError that says which limit would do, unless such rows are
    skipped."""
    limit, most = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    examples = [example for example in examples if example.text is None]  # documents are cut into samples as they come
    usable = examples if config.data.on_bad_row == "fail" else [e for e in examples if _is_usable(e, encode)]
    examples, prompts = usable, [len(encode.prompt(example)) for example in usable]
    long = [i for i, n in enumerate(prompts) if n > limit]
    if long and config.data.on_bad_row == "fail":
        raise DataError(
            f"{examples[long[0]].where}: the prompt has {prompts[long[0]]} tokens, more than data.max_prompt_tokens "
            f"({limit}); {len(long)} of {len(examples)} rows are too long, the longest has {max(prompts)} tokens",
            f"data.max_prompt_tokens={max(prompts)} would do, or data.on_bad_row=skip to leave such rows out",
        )
    responses = [len(encode.whole_response(text, e.where)) for e in examples for text in _responses(e, config)]
    return Lengths(
        rows=len(examples),
        longest_prompt=max(prompts, default=0),
        mean_prompt=sum(prompts) / max(1, len(prompts)),
        longest_response=max(responses, default=0),
        cut=sum(n > most for n in responses),
        too_long=len(long),
    )


def _is_usable(example: Example, encode: PromptTokens) -> bool:
    try:
        return bool(encode.prompt(example))
    except DataError:
        return False


def _responses(example: Example, config: Config) -> list[str]:
    columns = GIVEN.get(config.algorithm.name, ())
    found = [example.response if name == "response" else example.meta.get(name) for name in columns]
    return [text for text in found if isinstance(text, str)]


def check_columns(examples: Sequence[Example], config: Config) -> None:
    """Refuse rows that lack a column the algorithm learns from."""
    if (problem := _first(examples, _lacking_given(config))) is not None:
        raise problem


def unread(examples: Sequence[Example], config: Config) -> DataError | None:
    """Return the first row that lacks a column a reward reads, as an error."""
    return _first(examples, _lacking_rewards(config))


def _first(examples: Sequence[Example], lacking: Lacking) -> DataError | None:
    problems = (lacking(example) for example in examples)
    return next((problem for problem in problems if problem is not None), None)


def _lacking_given(config: Config) -> Lacking:
    names, algorithm = GIVEN.get(config.algorithm.name, ()), config.algorithm.name

    def lacking(example: Example) -> DataError | None:
        for name in names:
            if not _has(example, name):
                return _lacks(example, f"algorithm {algorithm} learns from the column {name}", name)
        return None

    return lacking


def _lacking_rewards(config: Config) -> Lacking:
    from tidemill.reward.registry import columns_read, missing_of

    read = columns_read(config.rewards)

    def lacking(example: Example) -> DataError | None:
        asked = [one for one in read if not one.sources or example.meta.get(FROM) in one.sources]
        found = missing_of(asked, {**example.meta, "answer": example.answer}) if asked else []
        return _lacks(example, str(found[0]), found[0].column) if found else None

    return lacking


def _has(example: Example, name: str) -> bool:
    if example.text is not None or (name == "response" and example.messages is not None):
        return True
    return isinstance(example.response if name == "response" else example.meta.get(name), str)


def _lacks(example: Example, reads: str, column: str) -> DataError:
    ours = column.partition("|")[0]
    theirs = list(example.meta)
    has = ", ".join(theirs) if theirs else "none"
    near = did_you_mean(ours, theirs)
    others = f"the row's other columns: {has}"
    return DataError(
        f"{example.where}: {reads}, which is missing or empty in the row{near}",
        f"name it with data.columns.{ours}=NAME ({others}), choose another reward, or leave such rows out with "
        "data.on_bad_row=skip",
    )
