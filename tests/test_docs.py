"""Every block of README and docs/ with commands, Python or YAML is run, page by page, as a reader would, or it says why
it is not.

`<!-- runnable -->` before a block: its `tidemill` commands are run, its Python is executed, its YAML is a recipe or a
cluster's file that loads. `<!-- runnable with a=1 b=2 -->` adds settings to `tidemill train`, so that a page takes
seconds; `--steps 2` is added to the other commands. `<!-- runnable as mine.yaml -->` writes the block to that file
first. A page's blocks share a folder, in which `my-model` is a model and `problems.jsonl` has rows.

`<!-- run by tests/… -->`: that test runs it. `<!-- not run: … -->`: what it needs that a test does not have. The
commands of both are parsed: there are such commands, options, recipes and settings.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest
import torch
import typer
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.errors import ConfigError
from tidemill.models.load import make_tiny, save_folder
from tidemill.plan import hardware
from tidemill.recipe import load as recipes
from tidemill.recipe.config import TinyModel

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = re.compile(r"runnable(?: with (?P<settings>.*?))?(?: as (?P<file>\S+))?")
KINDS = ("python", "yaml")
COMMAND = re.compile(r"(?:\$ )?(tidemill .*)")


@dataclass(frozen=True)
class Block:
    kind: str  # python, yaml, or nothing: commands
    text: str
    line: int
    marker: str  # what the comment before it says

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [found[1] for line in joined.splitlines() if (found := COMMAND.match(line.strip()))]


def blocks(page: Path) -> list[Block]:
    """Find the blocks of a page that have commands, Python or YAML, fenced or indented."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found, marker, at = [], "", 0
    while at < len(lines):
        first, line = at, lines[at]
        at += 1
        if line.startswith("```"):
            end = lines.index("```", at)
            block, at = Block(line[3:], "\n".join([*lines[at:end], ""]), first + 1, marker), end + 1
        elif line.startswith("    ") and not lines[first - 1].strip() and not line.startswith("     "):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            block = Block("", "\n".join(lines[first:at]), first + 1, marker)
        else:
            if comment := re.fullmatch(r"<!-- (.*) -->", line):
                marker = marker or comment[1]  # another test may have a comment of its own
            elif line.strip():
                marker = ""
            continue
        marker = ""
        if block.kind in KINDS or (not block.kind and block.commands):
            found.append(block)
    return found


def runnable() -> list[Path]:
    return [page for page in PAGES if any(RUNNABLE.fullmatch(block.marker) for block in blocks(page))]


@pytest.mark.parametrize("page", runnable(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_runnable_block_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_tiny(TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32), torch.float32, 0, CPU)
    save_folder(made.model, made.tokenizer, tmp_path / "my-model")
    rows = [{"question": f"{i}+{i}=", "answer": f"twice {i}: #### {2 * i}"} for i in range(24)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names: dict[str, object] = {}
    for block in blocks(page):
        if marked := RUNNABLE.fullmatch(block.marker):
            settings = tuple((marked["settings"] or "").split())
            run(block, settings, marked["file"], names, f"{page.name}:{block.line}")


def run(block: Block, settings: tuple[str, ...], file: str | None, names: dict[str, object], where: str) -> None:
    if file is not None:
        Path(file).write_text(block.text)
    if block.kind == "python":
        exec(compile(block.text, where, "exec"), names)
    elif block.kind == "yaml" and file is not None and "\nlevels:" in block.text:
        assert hardware.load(file).topology.levels
    elif block.kind == "yaml":
        recipes.load(Path(file) if file else recipes.dialect.parse(block.text))
    for line in [] if block.kind else block.commands:
        command(line, settings, where)


def command(line: str, settings: tuple[str, ...], where: str) -> None:
    words = shlex.split(line, comments=True)
    is_training = words[1] in ("train", "resume", "sft")
    options = [i for i, word in enumerate(settings) if word.startswith("--")]
    added = (
        settings[: min(options, default=len(settings))]
        if is_training
        else settings[min(options, default=len(settings)) :]
    )
    result = CliRunner().invoke(app, [*words[1:], *added], input="")
    assert result.exit_code == 0, f"{where}: {line}\n{result.output}\n{result.exception!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        where, marker = f"{page.name}:{block.line}", block.marker
        assert RUNNABLE.fullmatch(marker) or re.fullmatch(r"(?:run by|not run:) .{8,}", marker), f"{where}: {marker!r}"
        for named in re.findall(r"(?:tests|docs|src|recipes)/[\w/.-]+", marker):
            assert (ROOT / named).exists(), f"{where}: there is no {named}"
        for line in block.commands if not block.kind else ():
            parsed(line, where)


def parsed(line: str, where: str) -> None:
    """Check that the command, its options, its recipe and the recipe's settings exist. Words in capitals stand for what
    the reader names; square brackets are around what may be left out."""
    words = shlex.split(re.sub(r"[\[\]…]", " ", line) if " [" in line else line, comments=True)[1:]
    group = typer.main.get_command(app)
    context = click.Context(group, info_name="tidemill")
    while (commands := getattr(group, "commands", None)) is not None and words[0] != "--install-completion":
        assert words[0] in commands or "start" in commands, f"{where}: {line}: no command {words[0]}"
        group, words = (commands[words[0]], words[1:]) if words[0] in commands else (commands["start"], words)
    known = {
        option for parameter in group.get_params(context) for option in [*parameter.opts, *parameter.secondary_opts]
    }
    unknown = [word for word in words if word.startswith("-") and word != "--" and word not in known]
    assert not unknown, f"{where}: {line}: {unknown}"
    settings = [word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", word)]
    if group.name in ("train", "config", "plan") and words[0] in known_recipes():
        recipes.load(words[0], settings)


@cache
def known_recipes() -> set[str]:
    return {name for name, _ in recipes.listing()}


def test_a_block_without_a_marker_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("text\n\n    tidemill train x\n\n<!-- runnable -->\n\n```yaml\na: 1\n```\n\n```\nshown\n```\n")
    assert [(b.kind, b.marker) for b in blocks(page)] == [("", ""), ("yaml", "runnable")]
    with pytest.raises(AssertionError, match="--stepz"):
        parsed("tidemill eval runs/x --stepz 3", "a.md:3")
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        parsed("tidemill train quickstart train.stepz=3", "a.md:3")


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
