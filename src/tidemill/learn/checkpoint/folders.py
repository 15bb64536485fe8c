"""Folders of checkpoints: written aside and renamed, with a checksum of every file. Needs no torch.

A folder that is named `step-…` was complete when it got its name; whatever dies, an older one is never touched before
the new one is safe on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import CheckpointError, human

BLOCK_BYTES = 4 << 20
Entry = dict[str, Any]  # of a file in the manifest: bytes, sha256
MANIFEST, STATE = "manifest.json", "state.json"
ASIDE, REPLACED = ".tmp-", ".replaced"


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    step: int
    skipped: list[tuple[Path, str]]  # newer ones that could not be used, and why


@dataclass(frozen=True, slots=True)
class Saving:
    """One checkpoint that is being written, by one process or several."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    keep: int
    best: bool = False
    metric: float | None = None

    @property
    def target(self) -> Path:
        return self.folder / f"step-{self.step:06d}"

    @property
    def aside(self) -> Path:
        return self.folder / f"{ASIDE}{self.target.name}-saving"

    def begin(self) -> None:
        """Make a place to write aside."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.folder)
            self.aside.mkdir()
        except OSError as error:
            raise explain(error, self.folder, 0) from error

    def finish(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Once all files are on disk: the manifest, then the name that says it is whole. `parts`: each writer's files
        and which box of which tensor lies in them."""
        files: dict[str, Entry] = {}
        tensors: dict[str, list[Any]] = {}
        for part in parts:
            files |= part["files"]
            for name, found in part["tensors"].items():
                tensors.setdefault(name, []).extend(found)
        try:
            files[STATE] = write_file(self.aside / STATE, [json.dumps(self.state, indent=1).encode()])
            marks = {"step": self.step, "best": self.best, "metric": self.metric}
            manifest = json.dumps({**marks, "files": files, "tensors": tensors})  # in one line: it may be long
            write_file(self.aside / MANIFEST, [manifest.encode()])
            put_in_place(self.aside, self.target)
            prune(self.folder, self.keep)
        except OSError as error:
            raise explain(error, self.folder, 0) from error


def latest(folder: Path) -> Found | None:
    """The newest checkpoint whose files are all as they were written; newer, broken ones are reported in `skipped`."""
    skipped: list[tuple[Path, str]] = []
    for path in _newest_first(folder):
        why = fault(path)
        if why is None:
            return Found(path, _step(path), skipped)
        skipped.append((path, why))
    if skipped:
        listed = "; ".join(f"{path.name}: {why}" for path, why in skipped)
        raise CheckpointError(
            f"no checkpoint in {folder} can be used ({listed})", "start the run again, or copy a good one in"
        )
    return None


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads every byte."""
    try:
        files: Mapping[str, Mapping[str, Any]] = read_manifest(path)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
        if _digest(file) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` and the best. A folder loses its name before its files: it is never half there."""
    saved = _newest_first(folder)
    kept = set(saved[:keep]) | {best for best in [_best(saved)] if best is not None}
    for path in saved:
        if path not in kept:
            gone = path.with_name(f"{ASIDE}{path.name}-old-{os.getpid()}")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def best(folder: Path) -> Path | None:
    """The checkpoint last saved as the best."""
    return _best(_newest_first(folder))


def _best(newest_first: Iterable[Path]) -> Path | None:
    for path in newest_first:
        try:
            if read_manifest(path).get("best"):
                return path
        except (OSError, ValueError):
            continue
    return None


# Writing


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> Entry:
    """One after another, synced before it counts. A block is hashed and written while it is still near the processor;
    neither holds Python's lock."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for low in range(0, len(part), BLOCK_BYTES):
                block = memoryview(part)[low : low + BLOCK_BYTES]
                digest.update(block)
                size += len(block)
                while block:
                    block = block[file.write(block) :]
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def put_in_place(aside: Path, target: Path) -> None:
    """Rename. A step saved before (a resumed run may save it again) stays findable until the new one has its name."""
    _sync_folder(aside)
    old = target.with_name(f"{target.name}{REPLACED}")
    if target.exists():
        target.rename(old)
    aside.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_leftovers(folder: Path) -> None:
    """What a killed save left behind. The run's lock makes sure that nobody else is saving here."""
    replaced = [p for p in folder.glob(f"step-*{REPLACED}") if p.with_suffix("").exists()]
    for leftover in [*folder.glob(f"{ASIDE}*"), *replaced]:
        shutil.rmtree(leftover, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def explain(error: OSError, folder: Path, needed: int) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(
            f"no room for a checkpoint in {folder}: it needs {human(needed)}, {human(_free(folder))} is free "
            f"({os.strerror(error.errno)}); older checkpoints are untouched",
            "free some space and resume, or set checkpoint.keep lower or folder to another disk",
        )
    return CheckpointError(
        f"a checkpoint cannot be written in {folder}: {error}", "check that the folder can be written"
    )


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# Reading


def _newest_first(folder: Path) -> list[Path]:
    saved = [path for path in folder.glob("step-*") if path.is_dir() and _step(path) >= 0]
    return sorted(saved, key=lambda path: (_step(path), not path.name.endswith(REPLACED)), reverse=True)


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(REPLACED)
    return int(digits) if digits.isdigit() else -1


def read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return manifest
