"""Reward functions by name. `is_quick`: linear time and ours, so it runs in a thread here; others in workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import built_in, check_arguments, is_import_path, is_kept_here, load
from tidemill.reward.api import RewardFunction, is_batched
from tidemill.reward.lists import over_samples, takes_lists

if TYPE_CHECKING:
    from tidemill.recipe.config import Rewards


Reads = Callable[[Mapping[str, Any]], Sequence[str]]


def columns(*names: str) -> Reads:
    """The same whatever the reward's arguments. `a|b`: one of the two is enough."""
    return lambda args: names


NOTHING = columns()


@dataclass(frozen=True, slots=True)
class BuiltIn:
    path: str  # module:function; imported when first used
    is_quick: bool
    wants_device: bool = False  # is told the run's device
    reads: Reads = NOTHING  # the row's columns it cannot do without, by its arguments


@dataclass(frozen=True, slots=True)
class Missing:
    """A column that a reward reads and a row lacks."""

    reward: str
    column: str
    sources: tuple[str, ...] = ()  # whose samples the reward judges; none: all

    def __str__(self) -> str:
        return f"the reward {self.reward!r} reads the column {self.column.replace('|', ' or ')}"


ANSWER = columns("answer")
BUILT_IN: dict[str, BuiltIn] = {
    "exact": BuiltIn("tidemill.reward.verifiers.answers:exact", True, reads=ANSWER),
    "last_number": BuiltIn("tidemill.reward.verifiers.answers:last_number", True, reads=ANSWER),
    "numeric": BuiltIn("tidemill.reward.verifiers.answers:numeric", True, reads=ANSWER),
    "choice": BuiltIn("tidemill.reward.verifiers.answers:choice", True, reads=ANSWER),
    "math": BuiltIn("tidemill.reward.math.verdict:math", False, reads=ANSWER),
    "regex": BuiltIn(  # in a worker, because a user's pattern can take for ever
        "tidemill.reward.verifiers.text:regex",
        False,
        reads=lambda args: ("answer",) if "{answer}" in str(args.get("pattern")) else (),
    ),
    "json_schema": BuiltIn(  # so can a pattern in a schema
        "tidemill.reward.verifiers.text:json_schema",
        False,
        reads=lambda args: ("schema",) if args.get("schema") is None else (),
    ),
    "format": BuiltIn("tidemill.reward.verifiers.text:format", True),
    "length": BuiltIn("tidemill.reward.verifiers.text:length", True),
    "stopped": BuiltIn("tidemill.reward.verifiers.text:stopped", True),
    "repetition": BuiltIn("tidemill.reward.verifiers.text:repetition", True),
    "countdown": BuiltIn(  # in a worker, because deep nesting costs the parser its stack
        "tidemill.reward.verifiers.countdown:countdown", False, reads=columns("numbers", "target")
    ),
    "equations": BuiltIn("tidemill.reward.verifiers.equations:equations", False),  # as countdown
    "finance": BuiltIn("tidemill.reward.domains.finance:finance", False, reads=columns("value", "unit", "figures")),
    "health": BuiltIn("tidemill.reward.domains.health:health", True, reads=columns("level", "codes")),
    "industry": BuiltIn("tidemill.reward.domains.industry:industry", True, reads=columns("machine", "fault", "action")),
    "service": BuiltIn("tidemill.reward.domains.service:service", True, reads=columns("decision", "clause")),
    "record": BuiltIn("tidemill.reward.domains.record:record", False, reads=columns("answer", "schema")),
    "reply": BuiltIn("tidemill.reward.domains.reply:reply", True, reads=columns("name", "number", "remedy")),
    "reasoning_gym": BuiltIn(
        "tidemill.reward.verifiers.gym:reasoning_gym", False, reads=columns("reasoning_gym", "seed")
    ),
    "code": BuiltIn("tidemill.reward.verifiers.code:code", False, reads=columns("tests|answer")),
    "environment": BuiltIn("tidemill.reward.verifiers.played:environment", True),
    "ocr": BuiltIn("tidemill.reward.verifiers.ocr:ocr", False),
    "judge": BuiltIn("tidemill.reward.verifiers.judge:judge", False),
    "model": BuiltIn("tidemill.reward.verifiers.model:model", False, wants_device=True),
}


def reads_of(name: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns a reward cannot do without: of a built-in one by its arguments, of your own as `@reads` declares."""
    if name in BUILT_IN:
        return tuple(BUILT_IN[name].reads(args))
    return tuple(getattr(find(name), "reads", ()))


def columns_read(rewards: Rewards) -> list[Missing]:
    """Return every column that a recipe's rewards read, as it would be reported if a row lacked it."""
    return [
        Missing(spec.function, column, spec.sources)
        for spec in rewards.functions
        for column in reads_of(spec.function, spec.args)
    ]


def missing_of(read: Sequence[Missing], row: Mapping[str, Any]) -> list[Missing]:
    """Return which of these columns a row (`answer` and the other columns) lacks, or has empty."""
    return [one for one in read if all(is_empty(row.get(name)) for name in one.column.split("|"))]


def missing_columns(rewards: Rewards, row: Mapping[str, Any]) -> list[Missing]:
    """Return the columns that a recipe's rewards read and a row lacks."""
    return missing_of(columns_read(rewards), row)


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def is_quick(name: str) -> bool:
    return name in BUILT_IN and BUILT_IN[name].is_quick


def runs_here(name: str, function: RewardFunction) -> bool:
    """Whether a reward runs in the process that scores, in a thread, where nothing can kill it."""
    return is_quick(name) or is_batched(function) or is_kept_here(name)


def wants_device(name: str) -> bool:
    return name in BUILT_IN and BUILT_IN[name].wants_device


def find(name: str) -> RewardFunction:
    """The function a recipe names; a name that does not exist is a ConfigError with the nearest ones."""
    if name in BUILT_IN:
        found: RewardFunction = built_in(BUILT_IN[name].path)
        return found
    if is_import_path(name):
        found = load(name, ConfigError, "rewards")
        if not callable(found):
            raise ConfigError(
                f"rewards: {name!r} is not a function but of type {type(found).__name__}", "name a function(sample)"
            )
        return over_samples(found) if takes_lists(found) else found
    raise ConfigError(
        f"rewards: there is no reward {name!r}{did_you_mean(name, BUILT_IN)}",
        f"the built-in rewards are {', '.join(BUILT_IN)}; your own is package.module:function",
    )


def check_args(name: str, function: RewardFunction, args: Mapping[str, Any]) -> None:
    check_arguments(f"rewards: {name!r}", function, args, ConfigError)
