"""Where a model's folder is: the one place where `model.path` becomes a path.

`model.path` is a folder, the name of a known model (`tidemill models list`), or `org/name` on the Hugging Face hub,
with `@revision` behind it if need be. `look` never leaves this machine; `resolve` fetches what is not here yet.
"""

from __future__ import annotations

import re
from pathlib import Path

from tidemill.errors import ModelError, did_you_mean

# First parts of paths that people give to folders of their own: one that is missing is a slip, not a wish to download.
OWN_FOLDERS = frozenset({"models", "model", "runs", "checkpoints", "outputs", "data"})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def look(path: str | Path) -> Path:
    """Find the model's folder on this machine. What is not here is given back as the folder it would be."""
    name, folder = str(path), Path(path).expanduser()
    if folder.exists():
        return folder
    return (_here(name) if is_fetchable(name) else None) or folder


def resolve(path: str | Path) -> Path:
    """Find the model's folder; fetch a known model or one of the hub first, where it is not here yet."""
    name, folder = str(path), look(path)
    if folder.exists() or not is_fetchable(name):
        return folder
    from tidemill.models.box import hub, known

    return known.get(name) if name in known.KNOWN else hub.fetch(name)


def get(name: str) -> Path:
    """Resolve a name, and refuse anything else."""
    from tidemill.models.box import known

    if not is_fetchable(name):
        raise ModelError(
            f"there is no model called {name!r}{did_you_mean(name, known.KNOWN)}",
            f"known: {', '.join(known.KNOWN)}; others come from the Hugging Face hub as org/name",
        )
    return resolve(name)


def for_others(path: str) -> str:
    """Give what other programs can open: our own names mean nothing to them."""
    from tidemill.models.box.known import KNOWN

    return str(look(path)) if path in KNOWN else path


def is_fetchable(path: str | Path) -> bool:
    """Tell whether this names a model that can be fetched. `org/x` does not where there is a folder `org` here."""
    from tidemill.models.box.known import KNOWN

    name = str(path)
    if name in KNOWN or HUB_ID.fullmatch(name) is None:
        return name in KNOWN
    first = Path(name).parts[0]
    return first not in OWN_FOLDERS and not Path(first).is_dir()


def not_here(key: str, path: str) -> str:
    """Say what is wrong with a setting that names a model which is still to be fetched."""
    return f"{key}={path} does not exist here yet; `tidemill models get {path}` fetches it, and so does training"


def _here(name: str) -> Path | None:
    from tidemill.models.box import hub, known

    return known.here(name) if name in known.KNOWN else hub.here(name)
