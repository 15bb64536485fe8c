"""Warm starts: the model that a recipe trains first. It is trained once for its settings, kept in a cache, and
reused by every run that needs the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import closing
from functools import cache as cache_result
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.check import precheck
from tidemill.models.box.known import cache
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.run.watcher import Watcher

# Settings that change no weight.
WITHOUT_EFFECT = ("name", "about", "folder", "observe", "checkpoint", "reshard")


def warm_start(config: Config, folder: RunFolder, watch: Watcher) -> Path | None:
    """Return the folder of the model to start from: the run's own, the cache's, or one trained now. None: no warm
    start."""
    if config.model.path is not None or config.model.warm_start is None:
        return None
    own = settings_of(config, folder.path)
    made, kept = folder.path / "warm_start" / "model", cache() / "warm_starts" / key(own) / "model"
    if (made / "config.json").exists():
        return made
    if made.is_symlink():  # the cache was cleared since
        made.unlink()
    if (kept / "config.json").exists():
        watch.noted(f"warm start: {own.about or own.name} (trained before; kept in {kept.parent})")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.symlink_to(kept.resolve())
        return made
    watch.noted(f"warm start: {own.about or own.name}")
    precheck.check(own, fetch=True)
    train(own, made, watch.of_warm_start())
    keep(made, kept)
    return made


def settings_of(config: Config, folder: Path) -> Config:
    """Return the warm start's recipe, with the device and the seed of the run that needs it."""
    assert config.model.warm_start is not None
    threads = [f"threads={config.threads}"] if config.threads else []
    return recipe.load(
        config.model.warm_start,
        [f"seed={config.seed}", f"folder={folder}", "name=warm_start", f"device={config.device}", *threads],
    ).config


def key(own: Config) -> str:
    """Name a warm start by everything that its weights depend on, its own warm start included."""
    plain = own.model_dump(mode="json", exclude=set(WITHOUT_EFFECT))
    if own.model.warm_start is not None and own.model.path is None:
        plain["model"]["warm_start"] = key(settings_of(own, Path()))
    if (source := Path(own.data.source).expanduser()).exists():
        plain["data"]["written"] = source.stat().st_mtime_ns
    plain["code"] = _code()
    plain["versions"] = {name: metadata.version(name) for name in ("torch", "transformers")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:24]


@cache_result
def _code() -> str:
    """Hash this package's own source: other code may train other weights."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def train(own: Config, made: Path, watch: Watcher) -> None:
    from tidemill.cluster.start.choose import start
    from tidemill.data import survey
    from tidemill.run.interrupt import drained
    from tidemill.run.loop import train_loop

    own = survey.with_images(own, survey.checked(survey.open_rows(own)[0]))
    with RunFolder.create(own) as inner, closing(start(own, warm_start(own, inner, watch), inner)) as workers:
        if drained(train_loop(own, inner, workers, watch, None)).is_stopped:
            raise KeyboardInterrupt
        aside = made.with_name(".model")
        workers.save_model(aside)
        aside.rename(made)


def keep(made: Path, kept: Path) -> None:
    """Copy a finished warm start into the cache. Without space or permission there, the run continues all the same."""
    aside = kept.with_name(f".model-{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, aside)
        aside.rename(kept)
    except OSError:  # or another run finished first
        shutil.rmtree(aside, ignore_errors=True)
