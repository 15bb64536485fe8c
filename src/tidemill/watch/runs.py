"""What a run's folder says of it: settings, state, warnings, checkpoints, stages and workers. Nothing is written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tidemill.observe import control, health
from tidemill.observe.lock import is_held
from tidemill.recipe import dialect
from tidemill.watch.series import Series

DEPTH = 2  # folders below the one that is watched in which runs are looked for
LIVE_S = 60.0  # a run of another machine whose files moved within this time is taken to be running


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The recipes' dialect by libyaml: ten times as fast, which a list of many runs needs."""

    yaml_implicit_resolvers = dialect._Loader.yaml_implicit_resolvers


class Run:
    """One run. Its curves are kept; everything else is read when it is asked for."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.series = Series(path / "metrics.jsonl")

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    def config(self) -> dict[str, Any]:
        file = self.path / "config.yaml"
        return _config(file, file.stat().st_mtime_ns)

    def state(self) -> str:
        """running, finished, stopped, or ended where nothing says how."""
        if is_held(self.path / "lock"):
            return "running"
        summary = read_json(self.path / "summary.json")
        if summary:
            return "stopped" if summary.get("is_stopped") else "finished"
        return "running" if time.time() - _touched(self.path) < LIVE_S and self.status() else "ended"

    def status(self) -> dict[str, Any]:
        """What the driver of workers last said; nothing for a run in one process."""
        return read_json(self.path / "status.json")

    def warnings(self) -> list[str]:
        return health.warnings(self.series.telling())

    def brief(self) -> dict[str, Any]:
        """One line of the list of runs."""
        config, last = self.config(), self.series.last()
        return {
            "name": self.name,
            "state": self.state(),
            "step": int(last.get("step", 0)),
            "steps": int(config.get("train", {}).get("steps", 0)),
            "algorithm": config.get("algorithm", {}).get("name", ""),
            "about": config.get("about") or "",
            "touched": _touched(self.path),
        }

    def overview(self) -> dict[str, Any]:
        done = control.records(self.path)
        return self.brief() | {
            "metrics": self.series.names(),
            "last": self.series.last(),
            "warnings": self.warnings(),
            "films": sorted(file.name for file in self.path.glob("images/episode-*.gif")),
            "summary": read_json(self.path / "summary.json"),
            "control": [r.plain() for r in done[-50:]],
            "is_paused": control.is_paused(done),
            "resume": f"tidemill resume {self.path}",
        }

    def checkpoints(self) -> list[dict[str, Any]]:
        found = []
        for folder in sorted((self.path / "checkpoints").glob("step-*")):
            about = read_json(folder / "manifest.json")
            if about:
                size = sum(int(f.get("bytes", 0)) for f in about.get("files", {}).values())
                kept = {name: about.get(name) for name in ("step", "best", "metric")}
                found.append(kept | {"bytes": size, "written": folder.stat().st_mtime})
        return found


class Runs:
    """The runs in a folder, or one run and its neighbours."""

    def __init__(self, root: Path, chosen: str = "") -> None:
        self.root, self.chosen = root, chosen
        self._open: dict[str, Run] = {}

    @classmethod
    def at(cls, where: Path) -> Runs:
        """`where`: a run's folder, whose neighbours are offered too, or a folder of runs."""
        where = where.expanduser().resolve()
        if holds_run(where):
            return cls(where.parent, where.name)
        return cls(where)

    def names(self) -> list[str]:
        found: list[tuple[float, str]] = []
        for depth in range(1, DEPTH + 1):
            for file in self.root.glob("/".join(["*"] * depth) + "/config.yaml"):
                found.append((_touched(file.parent), file.parent.relative_to(self.root).as_posix()))
        return [name for _, name in sorted(found, reverse=True)]

    def get(self, name: str) -> Run | None:
        """None: there is no such run in this folder, whatever path the name spells."""
        if name not in self._open:
            if name not in self.names():
                return None
            self._open[name] = Run(name, self.root / name)
        return self._open[name]

    def opened(self) -> list[Run]:
        return list(self._open.values())


def holds_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their whole key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


@lru_cache(maxsize=64)
def _config(file: Path, _: int) -> dict[str, Any]:
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _touched(path: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "status.json", "config.yaml"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
