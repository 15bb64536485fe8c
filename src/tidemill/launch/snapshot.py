"""Pack code and recipe into one archive named by its content, so that a job runs exactly what was launched."""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import ConfigError

RECIPE = "recipe.yaml"
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Snapshot:
    path: Path
    digest: str  # SHA-256 of the tar before compression: the same files give the same digest anywhere
    files: int

    @property
    def name(self) -> str:
        return self.digest[:12]


def pack(recipe: str, into: Path, include: Sequence[Path] = (), package: Path | None = None) -> Snapshot:
    """Write `into/HASH.tar.gz`: the package under src/, the included files where they lie, and the recipe."""
    package = package or PACKAGE
    files = {f"src/tidemill/{path.relative_to(package).as_posix()}": path for path in tracked(package)}
    for given in include:
        files |= _included(given)
    if RECIPE in files:
        raise ConfigError(f"--include would replace the recipe's own file {RECIPE}", "rename the included file")
    data = _tar({name: path.read_bytes() for name, path in files.items()} | {RECIPE: recipe.encode()})
    digest = hashlib.sha256(data).hexdigest()
    into.mkdir(parents=True, exist_ok=True)
    target = into / f"{digest[:12]}.tar.gz"
    aside = target.with_suffix(".tmp")
    aside.write_bytes(gzip.compress(data, compresslevel=6, mtime=0))
    aside.replace(target)
    return Snapshot(target, digest, len(files) + 1)


def tracked(folder: Path) -> list[Path]:
    """The files under `folder` that git tracks or would add; outside a checkout, every file but caches."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard", "."],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    names = [name for name in listed.split("\0") if name]
    found = [folder / name for name in names] if names else sorted(folder.rglob("*"))
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _included(given: Path) -> dict[str, Path]:
    """The names of included files in the archive: relative to this folder, which a job's folder stands for."""
    here = Path.cwd().resolve()
    path = given.expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"--include {given}: there is no such file or folder")
    if not path.is_relative_to(here):
        raise ConfigError(f"--include {given} lies outside {here}", "launch from a folder that holds all it needs")
    files = tracked(path) if path.is_dir() else [path]
    return {file.relative_to(here).as_posix(): file for file in files}


def _tar(contents: dict[str, bytes]) -> bytes:
    """A tar without times, owners or order of its own."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(contents):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(contents[name]), 0o644
            archive.addfile(entry, io.BytesIO(contents[name]))
    return buffer.getvalue()
