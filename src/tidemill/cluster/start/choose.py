"""Which executor a recipe asks for: every role in this process, or roles as processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidemill.flow.workers import Workers
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe.config import Config


def start(
    config: Config, model_path: Path | None, folder: RunFolder, note: Callable[[str], None] = lambda text: None
) -> Workers:
    """`model_path`: a finished warm start. `note` hears what the user should know while it runs."""
    if config.cluster.executor == "local":
        from tidemill.cluster.start import local

        return local.start(config, model_path)
    from tidemill.cluster.driver import remote

    return remote.start(config, model_path, folder, note)
