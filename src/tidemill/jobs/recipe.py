"""Recipes as jobs of the queue, and what the queue has to share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.check import precheck
from tidemill.errors import ConfigError
from tidemill.jobs.state import Spec
from tidemill.launch.send import ON_RAY
from tidemill.recipe import load as recipes


def recipe_job(
    queue: Path, recipe: str, overrides: Sequence[str], *, priority: int, slots: int, group: str, on_ray: bool = False
) -> Spec:
    """A recipe under the same supervisor that launches use: it resumes, and saves when it is asked to leave."""
    config = recipes.load(recipe, [*overrides, *(ON_RAY if on_ray else ())]).config
    config = config.model_copy(update={"folder": str(Path(config.folder).expanduser().resolve())})
    precheck.check(config)
    folder = queue.expanduser().resolve() / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir()))
    while True:
        file = folder / f"{config.name}-{number}.yaml"
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(recipes.dump(config))
            break
        except FileExistsError:
            number += 1
    command = (sys.executable, "-m", "tidemill.launch.node", "--recipe", str(file))
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return Spec(command, config.name, priority, slots, group, is_resumable=True, folder=os.getcwd(), env=path)


def capacity(slots: int, ray_address: str) -> tuple[int, str]:
    """How many slots there are, and the variable that tells a job which devices are its own."""
    if ray_address:
        return slots or _ray_devices(ray_address), "TIDEMILL_SLOTS"  # Ray itself gives jobs their devices
    from tidemill import device

    kind, count = device.count()
    return (slots or count, device.VISIBLE[kind]) if count else (slots or 1, "TIDEMILL_SLOTS")


def _ray_devices(address: str) -> int:
    import ray

    from tidemill import device

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        found = ray.cluster_resources()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
    counts = [int(found[name]) for name in device.RESOURCES.values() if found.get(name)]
    return max(counts, default=int(found.get("CPU", 1)))


def parse_limits(words: Sequence[str]) -> dict[str, int]:
    limits = {}
    for word in words:
        group, equals, count = word.partition("=")
        if not equals or not count.isdigit():
            raise ConfigError(f"--limit {word}: a limit is GROUP=K", "for example --limit alice=2")
        limits[group] = int(count)
    return limits
