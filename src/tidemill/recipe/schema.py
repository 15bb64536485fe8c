"""The tree of settings as data: all dotted keys, what each accepts, and suggestions for unknown keys."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from tidemill.recipe.config import Config, Section

# Names that other tools use for our keys. Only for suggestions: the names themselves are refused like any unknown key.
WORDS_FROM_ELSEWHERE = {
    "learning_rate": "learn.lr",
    "batch_size": "train.prompts_per_step",
    "train_batch_size": "train.prompts_per_step",
    "rollout_batch_size": "train.prompts_per_step",
    "micro_batch_size": "train.tokens_per_microbatch",
    "num_generations": "train.samples_per_prompt",
    "group_size": "train.samples_per_prompt",
    "n_samples_per_prompt": "train.samples_per_prompt",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "total_epochs": "train.epochs",
    "ppo_epochs": "train.passes_per_step",
    "num_iterations": "train.passes_per_step",
    "lora_r": "learn.lora_rank",
    "target_modules": "learn.lora_modules",
    "chat_template_kwargs": "data.chat_args",
    "max_tokens": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "beta": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "max_grad_norm": "learn.clip_norm",
    "grad_clip": "learn.clip_norm",
    "gradient_checkpointing": "learn.recompute",
    "model_name": "model.path",
    "dataset": "data.source",
    "reward": "rewards.functions",
    "output_dir": "folder",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One place in the tree: a setting, or a section of settings."""

    name: str  # dotted
    field: FieldInfo

    @property
    def section(self) -> type[Section] | None:
        return _section_among(_members(self.field.annotation))

    @property
    def element(self) -> type[Section] | None:
        """Return the section that a list holds, as in `rewards.functions`."""
        return next((_section_among(_elements(m)) for m in _members(self.field.annotation) if _elements(m)), None)

    @property
    def is_mapping(self) -> bool:
        return any(get_origin(m) is dict for m in _members(self.field.annotation))

    @property
    def is_text(self) -> bool:
        return str in _members(self.field.annotation)

    @property
    def allows_none(self) -> bool:
        return type(None) in _members(self.field.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the words that the setting, or each element of its list, may be."""
        members = [m for member in _members(self.field.annotation) for m in (member, *_elements(member))]
        return tuple(c for m in members if get_origin(m) is Literal for c in get_args(m))

    @property
    def help(self) -> str:
        return self.field.description or ""

    @property
    def wants(self) -> str:
        """Say what is accepted: 'a whole number of at least 1, or none'."""
        kinds = [_in_words(m) for m in _members(self.field.annotation) if m is not type(None)]
        text = " or ".join(kinds) + _bounds(self.field.metadata)
        if self.section is not None:
            first = [f"{self.name}.{name}" for name in self.section.model_fields][:3]
            text = f"settings of its own ({', '.join(first)}, …)"
        text = f"{text}, or none" if self.allows_none else text
        extra = self.field.json_schema_extra
        return f"{text} ({extra['reason']})" if isinstance(extra, dict) and "reason" in extra else text

    @property
    def element_wants(self) -> str:
        """Say what one element of a list may be."""
        kinds = [_in_words(_elements(m)[0]) for m in _members(self.field.annotation) if _elements(m)]
        return " or ".join(kinds) or self.wants


def fields(section: type[Section], prefix: str = "") -> dict[str, Key]:
    """Return the section's own keys by their short names."""
    return {name: Key(f"{prefix}{name}", field) for name, field in section.model_fields.items()}


def walk(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """Return every key under the section, sections before what they hold."""
    for key in fields(section, prefix).values():
        yield key
        if key.section is not None:
            yield from walk(key.section, f"{key.name}.")


@cache
def tree() -> dict[str, Key]:
    return {key.name: key for key in walk()}


def keys() -> list[str]:
    """Return the dotted names of all settings (not of the sections that hold them)."""
    return [name for name, key in tree().items() if key.section is None]


def nearest_keys(unknown: str, n: int = 3) -> list[str]:
    """Suggest dotted keys for an unknown one, best first, from anywhere in the tree."""
    last = unknown.rsplit(".", 1)[-1]
    by_last: dict[str, list[str]] = {}
    for name in tree():
        by_last.setdefault(name.rsplit(".", 1)[-1], []).append(name)

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, unknown, name).ratio()

    found = [WORDS_FROM_ELSEWHERE[last]] if last in WORDS_FROM_ELSEWHERE else []
    found += sorted(by_last.get(last, []), key=likeness, reverse=True)
    if not found:
        similar = difflib.get_close_matches(unknown, tree(), n=n, cutoff=0.7)
        for word in difflib.get_close_matches(last, by_last, n=n, cutoff=0.7):
            similar += sorted(by_last[word], key=likeness, reverse=True)
        found = sorted(similar, key=lambda name: _best_likeness(unknown, last, name), reverse=True)
    return list(dict.fromkeys(found))[:n]


def _best_likeness(unknown: str, last: str, name: str) -> float:
    short = difflib.SequenceMatcher(None, last, name.rsplit(".", 1)[-1]).ratio()
    return max(difflib.SequenceMatcher(None, unknown, name).ratio(), short)


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _elements(member: Any) -> tuple[Any, ...]:
    return get_args(member) if get_origin(member) in (tuple, list) else ()


def _section_among(members: tuple[Any, ...]) -> type[Section] | None:
    for member in members:
        if isinstance(member, type) and issubclass(member, Section):
            return member
    return None


def _in_words(annotation: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything"}
    if annotation in plain:
        return plain[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is dict:
        return "a mapping (name: value)"
    if origin in (tuple, list):
        if (len(args) == 2 and args[1] is Ellipsis) or origin is list:
            return "a list"
        return f"a list of {len(args)} ({', '.join(_in_words(a) for a in args)})"
    return "a section of settings"


def _plain(bound: Any) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def _bounds(metadata: list[Any]) -> str:
    lowest = next((rule.ge for rule in metadata if isinstance(rule, Ge)), None)
    highest = next((rule.le for rule in metadata if isinstance(rule, Le)), None)
    if lowest is not None and highest is not None:
        return f" from {_plain(lowest)} to {_plain(highest)}"
    parts = []
    for rule in metadata:
        match rule:
            case Ge(ge=bound):
                parts.append(f"of at least {_plain(bound)}")
            case Gt(gt=bound):
                parts.append(f"above {_plain(bound)}")
            case Le(le=bound):
                parts.append(f"of at most {_plain(bound)}")
            case Lt(lt=bound):
                parts.append(f"below {_plain(bound)}")
            case MinLen(min_length=1):
                parts.append("that is not empty")
    return (" " + " and ".join(parts)) if parts else ""
