"""`data.fit`: sizes, columns and rewards that a recipe leaves open, taken from the model and the data's rows."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.check import precheck
from tidemill.errors import ConfigError
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config, RewardSpec
from tidemill.recipe.layer import COMMAND_LINE

PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "query", "input", "text")
ANSWERS = ("answer", "final_answer", "solution", "target", "label", "output", "completion")
MARKED = r"####\s*(.+)"  # how GSM8K marks the final answer of a worked solution
LONGEST_RESPONSE = 512  # tokens, where the model's window has room for them
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 200
USAGE = "tidemill train own model.path=FOLDER data.source=FILE"


def fitted(config: Config, sources: Mapping[str, str], note: Callable[[str], None]) -> Config:
    """Return the config with everything filled in that neither the command line nor a file of the user's sets."""
    if config.model.path is None:
        raise ConfigError("model.path is missing: which model is to be trained?", USAGE)
    if sources.get("data.source", recipes.DEFAULT).startswith(recipes.DEFAULT):
        raise ConfigError("data.source is missing: what is the model to learn from?", USAGE)
    fit = _Fit(config, sources)
    precheck.check(fit.without_sizes(), fetch=True)  # check folder, file and names before any of them is opened
    fit.columns()
    fit.rows()
    fit.lengths()
    if fit.chosen:
        note(
            "chosen to fit model and data:  " + ", ".join(f"{key}={_plain(value)}" for key, value in fit.chosen.items())
        )
    return fit.config()


class _Fit:
    """Keep what is chosen, by dotted key, over a config. What the user gave is never changed."""

    def __init__(self, config: Config, sources: Mapping[str, str]) -> None:
        self.base, self.sources = config, sources
        self.chosen: dict[str, Any] = {}

    def config(self) -> Config:
        made = self.base
        for key, value in self.chosen.items():
            section, name = key.split(".")
            made = made.model_copy(update={section: getattr(made, section).model_copy(update={name: value})})
        return Config.model_validate(made.model_dump())

    def set(self, key: str, value: Any) -> None:
        if not self.is_given(key) and value != _at(self.base, key):
            self.chosen[key] = value

    def is_given(self, key: str) -> bool:
        own = [where for name, where in self.sources.items() if name == key or name.startswith(f"{key}.")]
        return any(where == COMMAND_LINE or not (where.startswith(recipes.DEFAULT) or _is_ours(where)) for where in own)

    def columns(self) -> None:
        """Find the columns that hold prompt and answer, where they do not have our names."""
        names, answers = _first_rows(self.base)
        found = dict(self.base.data.columns)
        if self.base.data.template is None and not {"prompt", "messages"} & {*found, *names}:
            _take(found, "prompt", PROMPTS, names)
        if "answer" not in found and "answer" not in names:
            _take(found, "answer", ANSWERS, names)
        self.set("data.columns", found)
        answered = [row.get(found.get("answer", "answer")) for row in answers]
        texts = [str(text) for text in answered if text not in (None, "")]  # a row without an answer chooses no reward
        if texts and all(re.search(MARKED, text) for text in texts):
            self.set("data.answer_pattern", MARKED)
            texts = [match[1].strip() for text in texts if (match := re.search(MARKED, text))]
        if texts and "rewards.functions" not in self.chosen:
            self.set("rewards.functions", (RewardSpec(function=_reward(texts)),))

    def rows(self) -> None:
        from tidemill.data.source import open_source

        size = sum(s.size or 0 for s in open_source(self._with(held_out=1).data, self.base.seed))
        if size:
            aside = min(MOST_HELD_OUT, max(1, int(size * HELD_OUT_SHARE)))
            self.set("data.held_out", aside)
            self.set("eval.size", min(self.base.eval.size, aside))
            self.set("train.prompts_per_step", max(1, min(self.base.train.prompts_per_step, size - aside)))

    def lengths(self) -> None:
        """Make room for the longest prompt, and give the response what the model's window leaves."""
        from tidemill.data import survey
        from tidemill.data.source import open_source
        from tidemill.flow.feed import encoder_of
        from tidemill.models.load import load_tokenizer
        from tidemill.models.shape import shape_of

        config = self.config()
        shape = shape_of(config.model)
        window = (shape.window if shape else None) or 4096
        encode = encoder_of(config, load_tokenizer(config.model))
        training, held_out = open_source(config.data, config.seed)
        examples = [*survey.sampled(training), *survey.sampled(held_out)]
        longest = max(len(encode.prompt(example)) for example in examples)
        if longest > window - 8:
            longest = window // 2
            self.set("data.on_bad_row", "skip")
        prompt = config.data.max_prompt_tokens if self.is_given("data.max_prompt_tokens") else longest
        self.set("data.max_prompt_tokens", prompt)
        response = min(LONGEST_RESPONSE, window - prompt)
        if self.is_given("rollout.max_new_tokens"):
            response = config.rollout.max_new_tokens
        self.set("rollout.max_new_tokens", response)
        self.set("train.tokens_per_microbatch", max(self.base.train.tokens_per_microbatch, prompt + response))

    def without_sizes(self) -> Config:
        """Return the config with the smallest value of every size that is still to be chosen."""
        small = _Fit(self.base, self.sources)
        for key in ("data.max_prompt_tokens", "rollout.max_new_tokens"):
            small.set(key, 1)
        return small.config()

    def _with(self, **data: Any) -> Config:
        now = self.config()
        return now.model_copy(update={"data": now.data.model_copy(update=data)})


def _first_rows(config: Config) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the data's column names and some rows; none for a generator, whose columns have our names."""
    from itertools import islice

    from tidemill.data import generators, readers

    if generators.is_generator(config.data.source):
        return ["prompt", "answer"], []
    file = Path(config.data.source).expanduser()
    found = (row for one in readers.files_of(file, config.data.split) for row in readers.read_file(one))
    rows: list[Mapping[str, Any]] = [row[1] for row in islice(found, 100) if isinstance(row, tuple)]
    return list(dict.fromkeys(name for row in rows for name in row)), rows


def _take(found: dict[str, str], ours: str, theirs: Sequence[str], names: Sequence[str]) -> None:
    by_name = {name.lower(): name for name in names}
    for name in theirs:
        if name in by_name:
            found[ours] = by_name[name]
            return


def _reward(answers: Sequence[str]) -> str:
    """Choose the reward by what the answers look like."""
    if all(re.fullmatch(r"[-+]?[\d,]*\.?\d+", answer.strip()) for answer in answers):
        return "last_number"
    if all(re.fullmatch(r"\(?[A-J]\)?", answer.strip()) for answer in answers):
        return "choice"
    return "math" if importlib.util.find_spec("math_verify") else "exact"


def _at(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _is_ours(where: str) -> bool:
    """Say whether a setting comes from a bundled recipe, so that data.fit may change it."""
    file = Path(where.rpartition(":")[0]).absolute()
    return any(folder.resolve() in file.resolve().parents for folder in recipes.folders()[-1:])


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(spec.function for spec in value)
    return json.dumps(value) if isinstance(value, dict) else str(value)
