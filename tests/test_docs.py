"""Every block of README and docs/ that is marked as runnable is run, page by page, as a reader would.

`<!-- runnable -->` before a block: its `tidemill` commands are run, its Python is executed, its YAML is a recipe that
loads. `<!-- runnable with a=1 b=2 -->` adds settings to `tidemill train`, so that a page takes seconds.
`<!-- runnable as mine.yaml -->` writes the block to that file first. A page's blocks share a folder, in which
`my-model` is a model and `problems.jsonl` has rows.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.models.load import make_tiny, save_folder
from tidemill.recipe import load as recipes
from tidemill.recipe.config import TinyModel

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(r"<!-- runnable(?: with (?P<settings>[^>]*?))?(?: as (?P<file>\S+))? -->\n+")


@dataclass(frozen=True)
class Block:
    kind: str  # python, yaml, or nothing: commands
    text: str
    settings: tuple[str, ...]
    file: str | None
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for marker in MARKER.finditer(text):
        rest = text[marker.end() :]
        fence = re.match(r"```(\w*)\n(.*?)```", rest, re.S)
        indented = re.match(r"(?:    .*\n|\n(?=    ))+", rest)
        assert fence or indented, f"{page}: a marker without a block behind it"
        kind, body = (fence[1], fence[2]) if fence else ("", indented[0]) if indented else ("", "")
        line = text[: marker.start()].count("\n") + 1
        found.append(Block(kind, body, tuple((marker["settings"] or "").split()), marker["file"], line))
    return found


def runnable() -> list[Path]:
    return [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", runnable(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_runnable_block_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_tiny(TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32), torch.float32, 0, CPU)
    save_folder(made.model, made.tokenizer, tmp_path / "my-model")
    rows = [{"question": f"{i}+{i}=", "answer": f"twice {i}: #### {2 * i}"} for i in range(24)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names: dict[str, object] = {}
    for block in blocks(page):
        run(block, names, f"{page.name}:{block.line}")


def run(block: Block, names: dict[str, object], where: str) -> None:
    if block.file is not None:
        Path(block.file).write_text(block.text)
    if block.kind == "python":
        exec(compile(block.text, where, "exec"), names)
    elif block.kind == "yaml":
        recipes.load(Path(block.file) if block.file else recipes.dialect.parse(block.text))
    elif not block.kind:
        for line in block.text.splitlines():
            command(line.strip(), block.settings, where)


def command(line: str, settings: tuple[str, ...], where: str) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    assert words[0] == "tidemill", f"{where}: {line}"
    added = settings if words[1] in ("train", "resume", "sft") else ()
    result = CliRunner().invoke(app, [*words[1:], *added], input="")
    assert result.exit_code == 0, f"{where}: {line}\n{result.output}\n{result.exception!r}"


def test_the_pages_of_a_first_hour_have_runnable_blocks() -> None:
    named = {page.name for page in runnable()}
    assert {"README.md", "quickstart.md", "recipes.md", "data.md", "rewards.md"} <= named


def test_every_page_that_a_message_names_is_there() -> None:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("recipes/**/*.yaml")]
    named = {page for file in files for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert named and not [page for page in sorted(named) if not (ROOT / page).exists()]


def test_every_file_that_a_page_names_is_there() -> None:
    files = {
        path.as_posix() for folder in ("src", "tests", "benchmarks", "recipes") for path in (ROOT / folder).rglob("*.*")
    }
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    named = [(page.name, f) for page in pages for f in re.findall(r"`([\w/]+\.(?:py|c|h))`", page.read_text("utf-8"))]
    assert named and not [one for one in named if not any(f.endswith(f"/{one[1]}") for f in files)]


CPU = torch.device("cpu")
