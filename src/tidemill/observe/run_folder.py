"""A run's folder: everything a run made, one writer at a time, and a README that says what it is and how to go on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
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

# Everything that a run writes into its folder, but for logs: what a run that made no step may be cleared of.
OWN_FILES = (
    "config.yaml", "origin.json", "changes.jsonl", "README.md", "summary.json", "metrics.jsonl", "samples.jsonl",
    "tokens.jsonl", "images",
    "curve.png", "tensorboard", "checkpoints", "model", "warm_start", "dock", "status.json", "lock",
    "timeline", "control.jsonl", "steered.jsonl", "metrics.csv", "wandb", "mlruns", "trackio", "swanlog",
)  # fmt: skip
NOTES = "tokens.jsonl"  # what the learner made of samples, token by token
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
        """A new folder. An older run of the name is moved aside when `fresh`, else refused; it is never lost. A folder
        in which no step was made is used again."""
        path = Path(config.folder).expanduser() / config.name
        moved = None
        if _holds_run(path):
            if not fresh:
                raise ConfigError(
                    f"{path} already holds a run",
                    f"`tidemill resume {path}` continues it; another name starts a new one",
                )
            if has_steps(path):
                moved = _move_aside(path)
            else:
                Lock.take(path / "lock").release()  # refused while another process is about to make the first step
                _clear(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, config, sources or {}, moved, Lock.take(path / "lock"))
            run._write_config()
            _replace(path / "origin.json", json.dumps({"folder": str(Path.cwd())}).encode() + b"\n")
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
        # Where it is now: it may have been moved since it was started.
        config = config.model_copy(update={"folder": str(path.parent), "name": path.name})
        _find_modules_again(path)
        return cls(path, config, lock=Lock.take(path / "lock") if exclusive else None)

    def change(self, overrides: Sequence[str], step: int, check: Callable[[Config], None]) -> list[Change]:
        """Change settings of a run that is being resumed, if `check` allows them; changes.jsonl keeps what and when."""
        changed = recipe.load(self.config, overrides).config
        before = dict(recipe.leaves(self.config))
        changes = [Change(key, before.get(key), now) for key, now in recipe.leaves(changed) if before.get(key) != now]
        refuse_unsound(changes)
        if changes:
            check(changed)
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            with (self.path / "changes.jsonl").open("a", encoding="utf-8") as lines:
                for one in changes:
                    record = {"after_step": step, "at": now, "key": one.key, "from": one.before, "to": one.now}
                    lines.write(json.dumps(record, default=str) + "\n")
            self.config = changed
            self._write_config()
        return changes

    def discard(self) -> Path | None:
        """Undo `create` for a run that failed before its first step: the older run has its name again. Workers' logs
        are kept in NAME.failed; gives that folder, if there is one."""
        self.close()
        failed = None
        _clear(self.path)
        if self.path.exists():
            failed = self.path.with_name(f"{self.path.name}.failed")
            shutil.rmtree(failed, ignore_errors=True)
            self.path.rename(failed)
        if self.moved is not None:
            self.moved.rename(self.path)
        return failed

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
    def notes_file(self) -> Path:
        return self.path / NOTES

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def resume_command(self) -> str:
        return f"tidemill resume {self.path}"

    def truncate(self, step: int) -> None:
        """Drop what was logged after `step`, and lines that a kill cut short: the resumed run writes them again."""
        for file in (self.metrics_file, self.samples_file, self.notes_file):
            if file.exists():
                _rewrite(file, [line for line in file.read_bytes().split(b"\n") if _is_up_to(line, step)])

    def metrics(self) -> list[dict[str, Any]]:
        """Every step's metrics so far; a line cut short is left out."""
        return metrics_of(self.path)

    def samples_size(self) -> int:
        """Where the next sample will be written."""
        return self.samples_file.stat().st_size if self.samples_file.exists() else 0

    def samples_after(self, offset: int) -> list[dict[str, Any]]:
        """What was written of samples since the file had that size."""
        if not self.samples_file.exists():
            return []
        with self.samples_file.open("rb") as file:
            file.seek(offset)
            return [json.loads(line) for line in file.read().split(b"\n") if line]

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


# Changing settings of a run that is under way

# What a checkpoint, or the position in the data, would no longer fit.
FIXED = (
    "name", "folder", "seed", "model", "data.source", "data.args", "data.curriculum", "data.held_out", "data.shuffle",
    "data.split", "data.eval_source", "data.eval_split", "data.eval_args", "train.samples_per_prompt",
    "algorithm.name", "algorithm.critic.trunk", "environment", "learn.optimizer", "learn.lora_rank",
    "learn.lora_experts", "learn.lora_modules", "learn.dora", "learn.ema", "learn.moments", "learn.master",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} → {self.now}"


def refuse_unsound(changes: Sequence[Change]) -> None:
    """Refuse changes that the run's checkpoint or its place in the data does not fit."""
    bad = [c.key for c in changes if any(c.key == key or c.key.startswith(f"{key}.") for key in FIXED)]
    if bad:
        raise ConfigError(
            f"{', '.join(bad)} cannot change while a run is under way: its checkpoints and its place in the data "
            "depend on it",
            "start a new run from this one: tidemill train RECIPE model.path=RUN key=value",
        )


# Finding and moving


def has_steps(path: Path) -> bool:
    """Whether a run made anything that another could not make again at once."""
    if any(path.glob("checkpoints/step-*")):
        return True
    return any(int(line["step"]) > 0 for line in metrics_of(path))


def _clear(path: Path) -> None:
    """Remove what a run wrote, and the folder if nothing else is in it."""
    for name in OWN_FILES:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _find_modules_again(path: Path) -> None:
    """A run's own rewards are looked for where the run was started too."""
    try:
        origin = str(json.loads((path / "origin.json").read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if origin not in sys.path and Path(origin).is_dir():
        sys.path.append(origin)


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


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Every step's metrics in a run's folder; a line cut short is left out."""
    try:
        lines = (path / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    return [json.loads(line) for line in lines if _is_up_to(line, sys.maxsize)]


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
        config.about or f"{config.algorithm.name} on {config.data.called}.",
        f"Last written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} on {host.processor()}, {host.cores()} cores; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
        + ".",
        "## Continue\n\n"
        f"    {run.resume_command}            # from the newest checkpoint\n"
        f"    tidemill export {run.path} --to FOLDER    # a Hugging Face folder\n"
        f"    tensorboard --logdir {run.path}/tensorboard",
        "## What is here\n\n"
        "| file | what it holds |\n|---|---|\n"
        "| `config.yaml` | every setting, defaults included; `changes.jsonl`: those changed while resuming |\n"
        "| `summary.json` | the result |\n"
        "| `metrics.jsonl` | one line a step |\n"
        "| `timeline/` | when each worker did what, a file a worker |\n"
        "| `samples.jsonl` | prompts, responses, rewards and weight versions of some samples |\n"
        "| `tokens.jsonl`, `images/` | log-probability, ratio and advantage of their tokens; what they show |\n"
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
