"""Which engine a recipe asks for, with the environment or the programs that it talks to."""

from __future__ import annotations

from pathlib import Path

from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config
from tidemill.rollout.engine import RolloutEngine
from tidemill.rollout.make import make_apart, make_plain, with_turns


def make_engine(
    loaded: LoadedModel, config: Config, run: Path | None = None, writer: str = "0", is_copy: bool = False
) -> RolloutEngine:
    """`run`: the run's folder, for what conversations keep there; `writer`: this worker's name; `is_copy`: the model is
    one of the learner's, which sends its weights."""
    plain = (make_apart if is_copy else make_plain)(loaded, config)
    return conversing(plain, loaded, config, run, writer)


def conversing(
    engine: RolloutEngine, loaded: LoadedModel, config: Config, run: Path | None = None, writer: str = "0"
) -> RolloutEngine:
    """The engine as it is, with the recipe's environment, or behind an endpoint for the recipe's program."""
    if config.environment is None or config.environment.program is None:
        return with_turns(engine, loaded, config, run, writer)
    from tidemill.serve.programs.engine import ProgramsEngine

    return ProgramsEngine(engine, loaded, config)


def close_engine(engine: RolloutEngine | None) -> None:
    """Give back what an engine holds beside memory: its endpoint and its programs."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()
