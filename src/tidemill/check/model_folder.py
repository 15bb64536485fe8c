"""Whether a folder holds a model that can be opened, as far as a look at its files tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.models.box import find

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def folder_problems(key: str, path: str) -> Iterator[str]:
    """Of the folder that `key` names."""
    folder = find.look(path)
    if not folder.exists() and find.is_fetchable(path):
        yield find.not_here(key, path)
        return
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        yield f"{key}={path} {what}; give a folder with config.json, *.safetensors and a tokenizer"
        return
    yield from _config(key, folder)
    yield from _weights(key, folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        yield (f"{key}={folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json of the model into it")


def _config(key: str, folder: Path) -> Iterator[str]:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"{key}={folder} has no config.json; copy the model's config.json into it"
    except (OSError, ValueError) as error:
        yield f"{key}={folder}: config.json cannot be read ({error}); copy the model's own again"
    else:
        unknown = unknown_layers(raw.get("text_config") or raw) if isinstance(raw, dict) else ""
        if unknown:
            yield f"{key}={folder} has layers of {unknown}, which cannot be trained; docs/models.md lists what can"


def unknown_layers(settings: dict[str, Any]) -> str:
    """The kinds of a model's layers that are not attention as it is known here."""
    kinds = settings.get("layer_types")
    found = {str(kind) for kind in kinds} - ATTENTION_LAYERS if isinstance(kinds, list | tuple) else set()
    return ", ".join(sorted(found))


def _weights(key: str, folder: Path) -> Iterator[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            yield f"{key}={folder}: {index.name} cannot be read; copy the model's own again"
            return
        missing = [s for s in shards if not (folder / s).exists()]
        if missing:
            yield (
                f"{key}={folder} lacks {len(missing)} of {len(shards)} weight files, the first {missing[0]}; "
                "copy them into it"
            )
    elif not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        advice = "it has pickled weights, which can run code: save the model again with safe_serialization=True"
        yield f"{key}={folder} has no *.safetensors; {advice if pickled else 'copy the weights into it'}"
