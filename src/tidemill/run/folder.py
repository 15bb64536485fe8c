"""A run's folder: everything a run made, one writer at a time, and a README that says what it is and how to go on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tidemill.device import host
from tidemill.errors import ConfigError, TidemillError, did_you_mean
from tidemill.observe.lock import Lock
from tidemill.observe.loggers.api import RunInfo
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config

RECORDED_PACKAGES = ("tidemill", "torch", "transformers", "safetensors", "numpy")


@dataclass(slots=True)
class RunFolder:
    """Holds the run's lock from `create` or `open` until `close`, unless opened only to read."""

    path: Path
    config: Config
    sources: Mapping[str, str] = field(default_factory=dict)
    moved: Path | None = None  # where an older run of this name went
    lock: Lock | None = None

    @classmethod
    def create(cls, config: Config, sources: Mapping[str, str] | None = None, *, fresh: bool = True) -> RunFolder:
        """A new folder. An older run of the name is moved aside when `fresh`, else refused; it is never lost."""
        path = Path(config.folder).expanduser() / config.name
        moved = None
        if _holds_run(path):
            if not fresh:
                raise ConfigError(
                    f"{path} already holds a run", f"`tidemill resume {path}` goes on with it; another name starts anew"
                )
            moved = _move_aside(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, config, sources or {}, moved, Lock.take(path / "lock"))
            run._write_config()
            run.write_readme()
        except OSError as error:
            raise ConfigError(
                f"folder={config.folder}: {path} cannot be written: {error}", "name another folder"
            ) from error
        return run

    @classmethod
    def open(cls, where: str | Path, *, exclusive: bool = True) -> RunFolder:
        """An existing run, by path or by name; `exclusive=False` to read it while another process may write it."""
        path = _find(where)
        config = recipe.load(path / "config.yaml").config
        return cls(path, config, lock=Lock.take(path / "lock") if exclusive else None)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def resume_command(self) -> str:
        return f"tidemill resume {self.path}"

    def truncate(self, step: int) -> None:
        """Drop what was logged after `step`, and lines that a kill cut short: the resumed run writes them again."""
        for file in (self.metrics_file, self.samples_file):
            if file.exists():
                _rewrite(file, [line for line in file.read_bytes().split(b"\n") if _is_up_to(line, step)])

    def metrics(self) -> list[dict[str, Any]]:
        """Every step's metrics so far; a line cut short is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines if _is_up_to(line, sys.maxsize)]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """All at once: a reader sees the old summary or the new one."""
        _replace(self.summary_file, json.dumps(summary, indent=2).encode() + b"\n")
        self.write_readme(summary)

    def read_summary(self) -> dict[str, Any]:
        if not self.summary_file.exists():
            return {}
        found: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        return found

    def write_readme(self, summary: Mapping[str, Any] | None = None) -> None:
        _replace(self.path / "README.md", _readme(self, summary or {}).encode())

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_config(self) -> None:
        head = "# The settings this run was started with, defaults included. `tidemill resume` reads them.\n"
        _replace(self.path / "config.yaml", (head + recipe.dump(self.config)).encode())


def info_of(path: Path, config: Config, first: int) -> RunInfo:
    """What loggers are told of a run."""
    observe = config.observe
    return RunInfo(
        config.name,
        path,
        first,
        dict(recipe.leaves(config)),
        project=observe.project,
        webhook=observe.webhook,
        port=observe.prometheus_port,
    )


# Finding and moving


def _holds_run(path: Path) -> bool:
    return (path / "config.yaml").exists()


def _find(where: str | Path) -> Path:
    given = Path(where).expanduser()
    for path in (given, Path("runs") / given):
        if _holds_run(path):
            return path
    beside = given.parent if given.parent != Path() else Path("runs")
    names = sorted(p.name for p in beside.iterdir() if _holds_run(p)) if beside.is_dir() else []
    known = f"runs in {beside}: {', '.join(names)}" if names else "`tidemill train RECIPE` makes one"
    raise ConfigError(f"there is no run {str(where)!r} (no config.yaml in it){did_you_mean(given.name, names)}", known)


def _move_aside(path: Path) -> Path:
    """NAME becomes NAME.1, or the next number that is free. Refused while another process writes it."""
    Lock.take(path / "lock").release()
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
    return target


# Files


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def _rewrite(file: Path, lines: list[bytes]) -> None:
    _replace(file, b"".join(line + b"\n" for line in lines))


def _replace(file: Path, data: bytes) -> None:
    aside = file.with_name(f".{file.name}.tmp")
    try:
        with aside.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise TidemillError(
            f"{file} cannot be written: {error.strerror or error}", "free some space and resume"
        ) from error


# The README


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _readme(run: RunFolder, summary: Mapping[str, Any]) -> str:
    config = run.config
    chosen = [
        f"| `{key}` | `{_cell(value)}` | {run.sources[key]} |"
        for key, value in recipe.leaves(config)
        if not run.sources.get(key, recipe.DEFAULT).startswith(recipe.DEFAULT)
    ]
    results = [f"| {key} | {_cell(value)} |" for key, value in summary.items() if isinstance(value, int | float | str)]
    parts = [
        f"# {config.name}",
        config.about or f"{config.algorithm.name} on {config.data.source}.",
        f"Last written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} on {host.processor()}, {host.cores()} cores; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
        + ".",
        "## Go on\n\n"
        f"    {run.resume_command}            # from the newest checkpoint\n"
        f"    tidemill export {run.path} --to FOLDER    # a Hugging Face folder\n"
        f"    tensorboard --logdir {run.path}/tensorboard",
        "## What is here\n\n"
        "| file | what it holds |\n|---|---|\n"
        "| `config.yaml` | every setting, defaults included |\n"
        "| `summary.json` | the result |\n"
        "| `metrics.jsonl` | one line a step |\n"
        "| `samples.jsonl` | prompts, responses, rewards and weight versions of some samples |\n"
        "| `tensorboard/` | the metrics as TensorBoard events |\n"
        "| `checkpoints/` | safetensors and JSON, with checksums; the newest and the best |",
    ]
    if results:
        parts.insert(3, "## Result\n\n| | |\n|---|---|\n" + "\n".join(results))
    if chosen:
        parts.append("## Settings that are not defaults\n\n| key | value | from |\n|---|---|---|\n" + "\n".join(chosen))
    return "\n\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("|", "\\|").replace("\n", "\\n").replace("`", "'")[:200]
