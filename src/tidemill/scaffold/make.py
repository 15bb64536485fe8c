"""Write a project to begin with: a recipe, a reward, data and tests that pass."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from tidemill.errors import ConfigError, did_you_mean
from tidemill.models.box import find, known

FILES = ("recipe.yaml", "rewards.py", "test_project.py", "README.md")
TINY = "tiny: {hidden: 64, layers: 2, heads: 4, kv_heads: 2, intermediate: 128, window: 32}   # or path: FOLDER"


def make(folder: Path, model: str | None = None) -> list[Path]:
    """Write the files of a new project; return them. `model`: a folder, a known name or `org/name`; none: a small model
    that is made on the spot."""
    name = folder.resolve().name
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise ConfigError(f"{name!r} cannot name a run", "use letters, digits, - and _")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", "name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "name a new folder")
    if model is not None and not find.look(model).exists() and not find.is_fetchable(model):
        raise ConfigError(
            f"--model {model} is neither a folder nor a model's name{did_you_mean(model, known.KNOWN)}",
            "`tidemill models list` shows names; org/name is fetched from the Hugging Face hub",
        )
    folder.mkdir(parents=True, exist_ok=True)
    words = {
        "name": name,
        "model": TINY if model is None else f"path: {json.dumps(model)}",
        "prompt_tokens": "8" if model is None else "64",
        "response_tokens": "4" if model is None else "32",
        "lr": "1.0e-3" if model is None else "1.0e-6",
    }
    written = []
    for file in FILES:
        text = resources.files("tidemill.scaffold").joinpath("files", f"{file}.txt").read_text(encoding="utf-8")
        written.append(folder / file)
        written[-1].write_text(text.format(**words), encoding="utf-8")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    written.append(folder / "problems.jsonl")
    written[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return written
