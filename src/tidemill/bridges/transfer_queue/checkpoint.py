"""The whole queue as a folder: what it knows, and the bytes of its chunks. A folder is written aside and renamed, so
that it is whole or not there."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.bridges.transfer_queue.client import TransferQueueClient

METADATA, STATE, CHUNKS = "metadata.json", "queue.state", "chunks"


def save(client: TransferQueueClient, folder: Path, metadata: dict[str, Any] | None) -> None:
    aside, before = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    (aside / CHUNKS).mkdir(parents=True)
    try:
        state, chunks = client.saved()
        (aside / STATE).write_bytes(state)
        for key, raw in chunks.items():
            raw.tofile(aside / CHUNKS / str(key))
        (aside / METADATA).write_text(json.dumps({"storage_saved": True, "user_metadata": metadata or {}}, indent=2))
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        _restore(folder, before)
        raise
    shutil.rmtree(before, ignore_errors=True)


def load(client: TransferQueueClient, folder: Path) -> None:
    _restore(folder, folder.with_name(f"{folder.name}.old"))
    if not folder.exists():
        raise FileNotFoundError(f"there is no checkpoint {folder}")
    for name in (METADATA, STATE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"the checkpoint {folder} has no {name}")
    chunks = {int(path.name): np.fromfile(path, np.uint8) for path in sorted((folder / CHUNKS).iterdir())}
    client.restore((folder / STATE).read_bytes(), chunks)


def _restore(folder: Path, before: Path) -> None:
    """Bring back the checkpoint before, where its replacement was cut off."""
    if not folder.exists() and before.exists():
        with suppress(OSError):
            before.rename(folder)
