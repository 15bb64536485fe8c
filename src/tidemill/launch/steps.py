"""What a launch sends, as data: files, commands and requests. A dry run shows the list; a launch performs it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import TidemillError

COMMAND_S = 600.0  # longest that one command of a launch may take: an upload over a slow line


class LaunchError(TidemillError):
    """A job could not be sent, asked about or stopped."""


@dataclass(frozen=True, slots=True)
class File:
    """Write a file on this machine."""

    path: Path
    text: str

    def show(self) -> str:
        return f"# file {self.path}\n{self.text.rstrip()}"

    def perform(self) -> str:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text, encoding="utf-8")
        return ""


@dataclass(frozen=True, slots=True)
class Token:
    """Write a new random token on this machine, readable by this user alone: what a job's own Ray cluster asks for."""

    path: Path

    def show(self) -> str:
        return f"# file {self.path}\n(a random token, made when the job is sent)"

    def perform(self) -> str:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # a resumed job keeps its token
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))
        return ""


@dataclass(frozen=True, slots=True)
class Command:
    """Run a program on this machine, with a file or a text on its standard input."""

    argv: tuple[str, ...]
    stdin: Path | str | None = None

    def show(self) -> str:
        line = shlex.join(self.argv)
        if isinstance(self.stdin, Path):
            return f"$ {line} < {self.stdin}"
        if self.stdin is not None:
            return f"$ {line} <<'END'\n{self.stdin.rstrip()}\nEND"
        return f"$ {line}"

    def perform(self) -> str:
        given = self.stdin.read_bytes() if isinstance(self.stdin, Path) else (self.stdin or "").encode()
        try:
            done = subprocess.run(self.argv, input=given, capture_output=True, timeout=COMMAND_S)
        except FileNotFoundError as error:
            raise _missing(self.argv[0]) from error
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"no answer within {COMMAND_S:g} s from: {shlex.join(self.argv)[:200]}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
            raise LaunchError(f"{self.argv[0]} failed with {done.returncode}: {said}", shlex.join(self.argv)[:300])
        return done.stdout.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Request:
    """Call a service with a body; `send` gives the job's name there."""

    what: str
    body: Mapping[str, Any]
    send: Callable[[Mapping[str, Any]], str]

    def show(self) -> str:
        return f"# request {self.what}\n{json.dumps(self.body, indent=2)}"

    def perform(self) -> str:
        return self.send(self.body)


Step = File | Token | Command | Request


def require(programs: Sequence[str]) -> None:
    """Refuse to begin where a program that sends the job is missing."""
    for program in programs:
        if shutil.which(program) is None:
            raise _missing(program)


def _missing(program: str) -> LaunchError:
    return LaunchError(f"{program} is not installed here", "install it, or add --dry-run and send the files yourself")


def show(steps: Sequence[Step]) -> str:
    return "\n\n".join(step.show() for step in steps)


def perform(steps: Sequence[Step]) -> str:
    """Perform the steps in order and give the last one's output."""
    output = ""
    for step in steps:
        output = step.perform()
    return output
