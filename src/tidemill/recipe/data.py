"""Where a run's rows come from, and what judges them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from tidemill.recipe.images import ImageSettings
from tidemill.recipe.section import Places, Section


class CurriculumSettings(Section):
    """Raise the difficulty as easier problems are solved."""

    setting: str = Field("level", description="the key of data.args that takes one value after the other")
    values: tuple[Any, ...] = Field(min_length=1, description="its values, easiest first")
    rise_above: float = Field(0.8, ge=0, le=1, description="accuracy from which the next value is used")
    fall_below: float = Field(0.1, ge=0, le=1, description="accuracy below which the value before is used again")
    window: int = Field(256, ge=1, description="samples over which accuracy is measured")


class RewardSpec(Section):
    function: str = Field(description="a built-in reward's name, or package.module:function")
    weight: float = Field(1.0, description="factor in the total")
    args: dict[str, Any] = Field({}, description="keyword arguments of the function")
    label: str | None = Field(None, description="name of its value in metrics; none: the function's name")
    sources: tuple[str, ...] = Field((), description="names of the data.sources whose samples it judges; none: all")


def in_long_form(functions: Any) -> Any:
    """`exact` and `[exact, {function: …}]` are short for a list of objects."""
    given = [functions] if isinstance(functions, str) else functions
    return [{"function": f} if isinstance(f, str) else f for f in given] if isinstance(given, list | tuple) else given


class DataSource(Section):
    """One of several sources. What is not set is taken from `data`."""

    OWN: ClassVar = ("args", "columns", "split", "eval_split", "answer_pattern", "rewrite")

    source: str = Field(description="a file, a folder, a generator's name, as data.source")
    name: str | None = Field(None, min_length=1, description="its name in metrics; none: the file's")
    weight: float = Field(1.0, gt=0, le=1e6, description="its share of the prompts, relative to the others'")
    rewards: tuple[RewardSpec, ...] = Field((), description="rewards of its samples alone; none: those of all")
    args: dict[str, Any] | None = Field(None, description="the generator's own settings")
    columns: dict[str, str] | None = Field(None, description="our name: the file's column")
    split: str | None = Field(None, description="split of a dataset folder")
    eval_split: str | None = Field(None, description="split used as held-out data")
    answer_pattern: str | None = Field(None, description="regular expression; its first group is the answer")
    rewrite: dict[str, tuple[tuple[str, str], ...]] | None = Field(None, description="as data.rewrite")

    @field_validator("rewards", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        return in_long_form(value)


class Data(Section):
    source: str = Field(
        "arithmetic",
        description="a file (.jsonl .json .csv .tsv .parquet .txt), a folder of them, the hub's org/name, a generator",
    )
    sources: tuple[DataSource, ...] = Field(
        (), description="several sources, mixed by their weights, instead of source"
    )
    args: dict[str, Any] = Field({}, description="the generator's own settings")
    curriculum: CurriculumSettings | None = Field(None, description="raise the difficulty with measured accuracy")
    eval_source: str | None = Field(None, description="held-out data; without it, held_out rows of source")
    eval_args: dict[str, Any] | None = Field(None, description="the held-out generator's settings; without it, args")
    held_out: int = Field(200, ge=0, description="rows kept from source for evaluation, never trained on")
    columns: dict[str, str] = Field(
        {}, description="our name: the file's column, for prompt, answer, response, messages, …"
    )
    split: str | None = Field(None, description="split of a dataset folder; none: train")
    eval_split: str | None = Field(None, description="split of eval_source (or of source) used as held-out data")
    answer_pattern: str | None = Field(
        None, description="regular expression; its first group is the answer within the column answer"
    )
    rewrite: dict[str, tuple[tuple[str, str], ...]] = Field(
        {}, description="by column (prompt, answer, response): pairs of a regular expression and its replacement"
    )
    template: str | None = Field(None, description="prompt text with {column} in it, instead of the column prompt")
    system: str | None = Field(None, description="system message, for chat models")
    chat: Literal["auto", "on", "off"] = Field(
        "auto", description="use the tokenizer's chat template; auto: when it has one"
    )
    chat_args: dict[str, Any] = Field({}, description="arguments of the chat template, such as enable_thinking: false")
    learn_turns: Literal["last", "all"] = Field(
        "last", description="what sft learns from a conversation: the assistant's last turn, or all its turns"
    )
    images: ImageSettings | None = Field(
        None, description="how prompts show images; none: set where the data's rows have some"
    )
    max_prompt_tokens: Places = Field(1024, description="a longer prompt is a bad row")
    stream: Literal["auto"] | bool = Field(
        "auto", description="read rows when their turn comes, for files larger than memory; auto: from 1 GB on"
    )
    on_bad_row: Literal["fail", "skip"] = Field("fail", description="what to do with a row that cannot be used")
    shuffle: bool = Field(True, description="reshuffle for each pass over the data")
    fit: bool = Field(
        False, description="take sizes, columns and rewards that are not set from the model and the data's rows"
    )

    @property
    def called(self) -> str:
        """The source's name, or the names of several."""
        return ", ".join(entry.name or entry.source for entry in self.sources) or self.source
