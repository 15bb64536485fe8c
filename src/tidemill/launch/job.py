"""A launched job: its record in a folder of its own, which every later command reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tidemill.errors import ConfigError, did_you_mean

ENV_FOLDER = "TIDEMILL_LAUNCHES"
RECORD = "job.json"
State = Literal["waiting", "running", "done", "failed", "stopped", "lost", "written", "unknown"]
ENDED: tuple[State, ...] = ("done", "failed", "stopped", "lost")


@dataclass(frozen=True, slots=True)
class Status:
    state: State
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """`folder` is the job's own here; `run` is where the run's folder will be, as the job sees it."""

    name: str
    where: str
    options: Mapping[str, Any]
    folder: Path
    archive: Path
    digest: str
    run: str
    reference: str = ""  # the job's name there
    launched: str = ""
    attempt: int = 1

    @property
    def label(self) -> str:
        """The name as Kubernetes and its kin allow it: lower case, digits, dashes, at most 40."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "job"

    @property
    def unique(self) -> str:
        """The label of this attempt, where a service refuses a name twice."""
        return self.label if self.attempt == 1 else f"{self.label}-{self.attempt}"

    def sent(self, reference: str) -> Job:
        return replace(self, reference=reference, launched=datetime.now().astimezone().isoformat(timespec="seconds"))

    def save(self) -> None:
        plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        aside = self.folder / f".{RECORD}.tmp"
        aside.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        aside.replace(self.folder / RECORD)


def home() -> Path:
    """Where the records of launched jobs are kept."""
    return Path(os.environ.get(ENV_FOLDER, "runs/.launch")).expanduser().resolve()


def next_folder(name: str) -> Path:
    """NAME-1, or the next number that is free."""
    number = 1
    while (folder := home() / f"{name}-{number}").exists():
        number += 1
    return folder


def new_folder(name: str) -> Path:
    """Claim the next free folder for one job alone."""
    while True:
        folder = next_folder(name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder


def load(name: str) -> Job:
    file = home() / name / RECORD
    if not file.exists():
        known = names()
        hint = f"launched jobs: {', '.join(known)}" if known else "`tidemill launch RECIPE --on WHERE` starts one"
        raise ConfigError(f"no job {name!r} was launched from here{did_you_mean(name, known)}", hint)
    found = json.loads(file.read_text(encoding="utf-8"))
    return Job(**found | {"folder": Path(found["folder"]), "archive": Path(found["archive"])})


def names() -> list[str]:
    return sorted(path.parent.name for path in home().glob(f"*/{RECORD}"))
