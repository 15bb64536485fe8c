"""Checks by its files alone whether a folder holds a model that can be opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tidemill.errors import did_you_mean
from tidemill.models.box import find
from tidemill.models.box.known import KNOWN

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
INDEX = "model.safetensors.index.json"
PICKLED = "it has pickled weights, which can run code: save the model again with safe_serialization=True"


def folder_problems(key: str, path: str) -> Iterator[str]:
    """Check the folder that `key` names."""
    folder = find.look(path)
    if not folder.exists() and find.is_fetchable(path):
        yield find.not_here(key, path)
        return
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else f"does not exist{did_you_mean(path, KNOWN)}"
        yield f"{key}={path} {what}; give a folder with config.json, *.safetensors and a tokenizer"
        return
    for what, advice in _lacking(folder):
        yield f"{key}={folder} has no {what}; {advice}"
    yield from _unusable(key, folder)


def _lacking(folder: Path) -> Iterator[tuple[str, str]]:
    """Say which files are missing, and what to do."""
    if not (folder / "config.json").exists():
        yield "config.json", "copy the model's config.json into it"
    if not ((folder / INDEX).exists() or any(folder.glob("*.safetensors"))):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        yield "*.safetensors", PICKLED if pickled else "copy the weights into it"
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        yield "tokenizer", "copy tokenizer.json and tokenizer_config.json of the model into it"


def _unusable(key: str, folder: Path) -> Iterator[str]:
    for name in ("config.json", INDEX):
        try:
            found = _look(folder, name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, AttributeError) as error:
            yield f"{key}={folder}: {name} cannot be read ({error}); copy the model's original file again"
            continue
        if found:
            yield f"{key}={folder} {found}"


def _look(folder: Path, name: str) -> str:
    """Say what is wrong inside a file that can be read; "": nothing."""
    raw = json.loads((folder / name).read_text(encoding="utf-8"))
    if name != INDEX:
        return ""
    shards = sorted(set(raw["weight_map"].values()))
    missing = [s for s in shards if not (folder / s).exists()]
    lacks = f"lacks {len(missing)} of {len(shards)} weight files, the first" if missing else ""
    return lacks and f"{lacks} {missing[0]}; copy them into it"
