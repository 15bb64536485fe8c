"""Pages that are made when the site is built: the README as its first page, the Python reference, commands, settings.

Every page of results is listed, so that a new one needs no line in mkdocs.yml.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TIDEMILL_PYTHON", sys.executable)


def tidemill(*words: str) -> str:
    environment = os.environ | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [PYTHON, "-m", "tidemill", *words], capture_output=True, text=True, check=True, env=environment
    ).stdout.rstrip()


def on_config(config: Any) -> Any:
    results = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md"))
    for entry in config.nav:
        if entry.get("Measured") == "results":
            entry["Measured"] = [f"results/{name}" for name in results]
    return config


def on_files(files: Files, config: Any) -> Files:
    made = {"index.md": home(), "reference.md": reference(), "commands.md": commands(), "settings.md": settings()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def home() -> str:
    """The README, with links to where the site has those pages."""
    text = (ROOT / "README.md").read_text()
    text = text.replace("](docs/results/)", "](results/rollout.md)")
    return re.sub(r"\]\(docs/", "](", text)


def reference() -> str:
    names = subprocess.run(
        [PYTHON, "-c", "import tidemill; print(*tidemill.__all__)"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    ).stdout.split()  # fmt: skip
    homes = re.search(r"_HOMES = {(.*?)}", (ROOT / "src/tidemill/__init__.py").read_text(), re.S)
    assert homes is not None
    where = dict(re.findall(r'"(\w+)": "([\w.]+)"', homes[1]))
    parts = [f"::: {where.get(name, 'tidemill')}.{name}" for name in names if not name.startswith("_")]
    return "\n\n".join(["# Python reference", "What `import tidemill` offers; everything else may change.", *parts])


def commands() -> str:
    overview = tidemill("--help")
    names = re.findall(r"^[│|]?\s{1,3}([a-z]+)\s{2,}\S", overview.split("Commands", 1)[1], re.M)
    parts = [f"## tidemill {name}\n\n```text\n{tidemill(name, '--help')}\n```" for name in dict.fromkeys(names)]
    return "\n\n".join(["# Commands", f"```text\n{overview}\n```", *parts])


def settings() -> str:
    says = "Every key of a recipe with its default (`tidemill config`)."
    return f"# Settings\n\n{says}\n\n```text\n{tidemill('config')}\n```\n"
