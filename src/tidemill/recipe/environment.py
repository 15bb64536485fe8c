"""What the model talks to: environments, programs, and other players."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tidemill.recipe.section import Section


class LeagueSettings(Section):
    """Past versions of the policy as opponents (`environment/league.py`)."""

    share: float = Field(0.5, ge=0, le=1, description="share of groups that play past versions, not the policy itself")
    every: int = Field(10, ge=1, description="versions of the weights between members of the league")
    keep: int = Field(8, ge=1, description="members kept: the newest, and the first")
    slips: float = Field(0.0, ge=0, le=1, description="share of a network opponent's moves that are any legal ones")
    draw: Literal["uniform", "recent", "hard"] = Field(
        "uniform", description="which member plays: any, one of the four newest, or rather one that wins"
    )
    resident: int = Field(1, ge=1, description="members whose weights a rollout worker holds at once")
    evaluate: Literal["expert", "self", "auto"] = Field(
        "auto", description="opponent in evaluations: the game's own expert player, or the policy; auto: expert if any"
    )


class EnvironmentSettings(Section):
    """What the model talks to: each sample is a conversation of several turns."""

    name: str = Field(
        "",
        description="nim, nim_duel, tictactoe, tools, gem:GAME, gymnasium:GAME, textarena:GAME, skyrl:ID, openenv:URL, "
        "or package.module:Class; of a network policy bandit, connect_four, inventory, gymnasium:ID, pettingzoo:MODULE",
    )
    program: str | None = Field(
        None,
        description="in place of a name: an agent that is given an OpenAI endpoint, file.py:function or a command",
    )
    evaluator: str | None = Field(
        None, description="with a program: package.module:function that makes its reward of the task and its value"
    )
    python: str | None = Field(
        None, description="with a program: the interpreter that runs it, where its packages conflict with ours"
    )
    args: dict[str, Any] = Field({}, description="the environment's own settings")
    max_turns: int = Field(8, ge=1, description="limit of the model's turns in one conversation")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="token limit of one turn; none: what rollout.max_new_tokens leaves"
    )
    role: Literal["user", "tool"] = Field("user", description="role of the environment's messages, for chat models")
    workers: int = Field(
        0,
        ge=0,
        description="threads for environments that are slow to answer, 0: none; programs at once, 0: 32; of a network "
        "policy: processes beside rollout's own that step environments",
    )
    timeout_s: float = Field(60.0, gt=0, description="time limit of an environment in a thread, or of a whole program")
    max_calls: int = Field(64, ge=1, description="with a program: how often one sample may ask the model")
    max_trajectories: int = Field(
        8, ge=1, description="with a program: most conversations of one sample that are learned, the latest"
    )
    max_body: int = Field(8 << 20, ge=1024, description="with a program: largest request in bytes")
    players: int = Field(
        1, ge=1, le=64, description="of a game: each seat is a sample of its own, with a reward of its own"
    )
    league: LeagueSettings | None = Field(
        None, description="with several players: past versions of the policy as opponents, with Elo ratings"
    )
    goal: float = Field(0.0, description="of a network policy: return from which an episode counts as solved")
    film: bool = Field(True, description="of a network policy: show an episode of each evaluation as a moving picture")
    on_error: Literal["end", "fail"] = Field(
        "end", description="what an environment that raises or takes too long ends: the conversation, or the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_kind(self) -> EnvironmentSettings:
        if bool(self.name) == (self.program is not None):
            raise PydanticCustomError("one_kind", "give either environment.name or environment.program")
        if self.evaluator is not None and self.program is None:
            raise PydanticCustomError("no_program", "environment.evaluator needs environment.program")
        if self.python is not None and self.program is None:
            raise PydanticCustomError("no_program", "environment.python needs environment.program")
        if self.program is not None and self.players > 1:
            raise PydanticCustomError("one_player", "environment.players is for games: a program is one player")
        if self.league is not None and self.players == 1:
            raise PydanticCustomError("no_players", "environment.league needs environment.players above 1")
        return self
