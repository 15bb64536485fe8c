"""The stages that algorithms share, as table rows. Columns of tokens are jagged over the response unless noted."""

from __future__ import annotations

from dataclasses import replace

from tidemill.batch import GROUP, ID, LENGTH, VERSION
from tidemill.graph import Graph, Stage
from tidemill.recipe.config import Config
from tidemill.tiles import PROMPT_COLUMNS, TURN_COLUMNS

# What each row has when it enters: prompt tokens (int32, jagged) and the text columns of its example.
SOURCE = (ID, GROUP, "prompt", "answer", "meta", "where")
# What a row has that comes with its tokens (prompt and response): nothing is rolled out.
OFFLINE = (ID, GROUP, "tokens", "prompt_length", "mask", LENGTH)
FINISH = ("stop", "length", "error", "cancelled")  # the column `finish` is an index into this


def rollout(config: Config, *more: str) -> Stage:
    """tokens: prompt and response. mask: 1 where the model made the token. logprobs: of the policy that made it.
    played: what a conversation with an environment came to, as JSON."""
    reads: tuple[str, ...] = (ID, GROUP, "prompt")
    writes: tuple[str, ...] = ("tokens", "prompt_length", "logprobs", "versions", "mask", "finish", VERSION, LENGTH)
    if config.environment is not None:
        reads, writes = (*reads, "answer", "meta", "where"), (*writes, "played", *turns(config))
    return Stage("rollout", "rollout", (*reads, *more), (*writes, *routes(config), *starts(config)), "group")


def with_images(graph: Graph, config: Config) -> Graph:
    """The table with the columns of images, for every stage that calls a model. No algorithm says anything of them."""
    if config.data.images is None:
        return graph
    turns = TURN_COLUMNS if config.environment is not None else ()
    stages = []
    for stage in graph.stages:
        if stage.name == "rollout":
            stage = replace(stage, reads=(*stage.reads, *PROMPT_COLUMNS), writes=(*stage.writes, *turns))
        elif stage.role == "reward":
            stage = replace(stage, reads=(*stage.reads, *PROMPT_COLUMNS)) if config.rewards.images else stage
        elif "tokens" in stage.reads:
            stage = replace(stage, reads=(*stage.reads, *PROMPT_COLUMNS, *turns))
        stages.append(stage)
    return replace(graph, source=(*graph.source, *PROMPT_COLUMNS), stages=tuple(stages))


def routes(config: Config) -> tuple[str, ...]:
    """The experts that each token but the last went through in rollout, where learning goes the same way."""
    return ("routes",) if config.learn.moe.replay else ()


def starts(config: Config) -> tuple[str, ...]:
    """Where further trajectories of a sample begin, if programs make several: places in `tokens`."""
    return ("starts",) if config.environment is not None and config.environment.program is not None else ()


def turns(config: Config) -> tuple[str, ...]:
    """Of a conversation: its seat in a game, where its turns begin in the response, and what each of them earned."""
    return ("seat", "turns", "turn_rewards") if config.environment is not None else ()


def reward(config: Config) -> Stage:
    """parts: a JSON object of each reward function's own value, as text."""
    reads: tuple[str, ...] = (ID, GROUP, "tokens", "prompt_length", "versions", "finish", "answer", "meta", "where")
    if config.environment is not None:
        reads = (*reads, "mask", "played")
    return Stage("reward", "reward", reads, ("reward", "correct", "parts"))


def policy_logprobs(config: Config) -> tuple[Stage, ...]:
    """Columns that only some settings need: recomputed old log-probabilities, the reference's."""
    stages = []
    if config.algorithm.old_logprobs == "recompute":
        stages.append(old_logprobs(config))
    if config.algorithm.kl.coef > 0:
        stages.append(reference(config))
    return tuple(stages)


def old_logprobs(config: Config | None = None) -> Stage:
    reads: tuple[str, ...] = (GROUP, "tokens", "prompt_length", LENGTH)
    reads += (*routes(config), *starts(config)) if config is not None else ()
    return Stage("old_logprobs", "actor", reads, ("old_logprobs",))


def reference(config: Config | None = None) -> Stage:
    reads = (GROUP, "tokens", "prompt_length", LENGTH, *(starts(config) if config is not None else ()))
    return Stage("reference", "reference", reads, ("ref_logprobs",))


def advantage(config: Config, *more: str, writes: tuple[str, ...] = ("advantages",)) -> Stage:
    settings = config.algorithm
    reads: tuple[str, ...] = (ID, GROUP, "reward", "mask", *more)
    if settings.kl.coef > 0 and settings.kl.place == "reward":
        reads += (old_column(config), "ref_logprobs")
    if settings.overlong.drop_truncated:
        reads += ("finish",)
    if settings.covariance.mode != "none":
        reads += (old_column(config),)
        writes += ("held_back",)
    if config.environment is not None and config.environment.players > 1:
        reads += ("seat",)
    if settings.credit.by == "turn":
        reads += ("turns", "turn_rewards")
    return Stage("advantage", "reward", unique(reads), writes, "group")


def learn(config: Config, *more: str) -> Stage:
    settings = config.algorithm
    reads: tuple[str, ...] = (
        ID,
        GROUP,
        LENGTH,
        "tokens",
        "prompt_length",
        "mask",
        "logprobs",
        "versions",
        "advantages",
    )
    if settings.old_logprobs == "recompute":
        reads += ("old_logprobs",)
    if settings.kl.coef > 0:
        reads += ("ref_logprobs",)
    if settings.covariance.mode != "none":
        reads += ("held_back",)
    reads += (*routes(config), *starts(config))
    return Stage("learn", "actor", unique(reads + more), scope="group")


def old_column(config: Config) -> str:
    return "old_logprobs" if config.algorithm.old_logprobs == "recompute" else "logprobs"


def unique(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
