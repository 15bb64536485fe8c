"""A look at the data before a model is loaded: how long its rows are in tokens, and whether rewards find what they
read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example, Source
from tidemill.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from tidemill.recipe.config import Config

GIVEN = {"sft": ("response",)} | dict.fromkeys(
    ("dpo", "ipo", "kto", "orpo", "simpo", "reward_model"), ("response", "rejected")
)  # algorithms that learn from responses in the data, and the columns these are in
MOST_ROWS, MOST_MADE = 4096, 64  # rows of a file, and problems of a generator, that are looked at


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


def looked_at(source: Source) -> list[Example]:
    count = MOST_MADE if source.size is None else min(source.size, MOST_ROWS)
    return [source.example(i) for i in range(count)]


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
    """Refuse rows that lack what the algorithm learns from."""
    skips = config.data.on_bad_row == "skip"
    for name in GIVEN.get(config.algorithm.name, ()):
        lacking = [e for e in examples if not _has(e, name)]
        if lacking and (len(lacking) == len(examples) or not skips):
            raise _lacks(lacking[0], f"algorithm {config.algorithm.name} learns from the column {name}", name)


def unread(examples: Sequence[Example], config: Config) -> DataError | None:
    """What the rewards read and the rows do not have. A row in many is its own mistake; all rows are the recipe's."""
    from tidemill.reward.registry import missing_columns

    for example in examples:
        found = missing_columns(config.rewards, {**example.meta, "answer": example.answer})
        if found:
            return _lacks(example, str(found[0]), found[0].column)
    return None


def _has(example: Example, name: str) -> bool:
    if example.text is not None or (name == "response" and example.messages is not None):
        return True
    return isinstance(example.response if name == "response" else example.meta.get(name), str)


def _lacks(example: Example, reads: str, column: str) -> DataError:
    ours = column.partition("|")[0]
    theirs = list(example.meta)
    has = ", ".join(theirs) if theirs else "none"
    near = did_you_mean(ours, theirs)
    return DataError(
        f"{example.where}: {reads}, which is missing or empty in the row{near}",
        f"name it with data.columns.{ours}=NAME (the row's other columns: {has}), or choose another reward",
    )
