"""What a new user sees in the first hour: folders used again, whole answers, history, pictures, plain English."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.test_first_hour import recipe
from tidemill import show
from tidemill.cli import app, generate
from tidemill.dock import view
from tidemill.errors import DockError
from tidemill.flow.records import Answered, Evaluation
from tidemill.models.box import known
from tidemill.observe import curve
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe import load as recipes
from tidemill.run import start as launch

SOURCE = Path(recipes.__file__).parents[1]
SPOKEN = ("check", "recipe", "cli", "run", "data", "reward")  # folders whose texts a user reads
# Phrases that earlier messages had, and what they became.
UNIDIOMATIC = {
    r"(?<!there )\bis no (?:source|model|reward model|folder|text|file|valid)\b": "is not a",
    r"\bholds no\b": "has no",
    r"\b(?:text|AdamW|turn) alone\b": "only",
    r"\bsteps? (?:is|are) made\b": "is done",
    r"\bknown are\b": "it can be",
    r"\bis not to be\b": "cannot be",
    r"\b(?:sums|adds up|writes) .*(?:otherwise|in another order)": "differently",
    r"\bnames no problems\b": "has no problems of its own",
    r"\b(?<![\d,.])1 (?:steps|tokens|rows|samples|problems)\b": "the singular",
    r"\b(?:mend|mends) (?:it|the)\b": "fix",
    r"\bgo on with it\b": "continue it",
    r"^written: ": "was written to",
}


def test_a_folder_without_a_step_is_used_again(tmp_path: Path) -> None:
    over = recipe(tmp_path, eval={"size": 0}, train={"steps": 1})
    with RunFolder.create(recipes.load(over).config) as killed:  # before its first step
        assert killed.path == tmp_path / "runs" / "small"
    launch.train(over)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["small"]
    launch.train(over)  # a folder with a step is kept
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_whole_prompts_and_answers_are_shown_on_request() -> None:
    answers = (Answered("question " * 40, "7", "first " * 40 + "last", False, 0.0, 41),)
    for full in (False, True):
        screen = io.StringIO()
        Console(file=screen, width=1000).print(show.evaluation_table(Evaluation(0.0, answers=answers), full))
        assert ("last" in screen.getvalue()) is full and ("…" in screen.getvalue()) is not full
        assert (screen.getvalue().count("question") == 40) is full


def test_a_chat_has_line_editing_and_the_lines_of_earlier_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    readline.clear_history()
    with generate._history():
        readline.add_history("what is 2+2?")
    readline.clear_history()
    with generate._history():
        assert readline.get_history_item(readline.get_current_history_length()) == "what is 2+2?"
    readline.clear_history()


def test_the_picture_has_held_out_points_whole_steps_accuracy_and_the_raw_line_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append(self))
    steps = [{"step": n, "reward": (n % 3) / 3, "accuracy": n / 20} for n in range(1, 21)]
    looks = [{"step": n, "eval/reward": 0.5, "eval/accuracy": 0.4} for n in (0, 20)]
    lines = [curve.lines_of([*steps, *looks], name) for name in ("one", "two")]
    curve.save_png(tmp_path / "a.png", {measure: [each[measure] for each in lines] for measure in lines[0]})
    panels = drawn[0].axes
    assert [axes.get_ylabel() for axes in panels] == ["reward", "accuracy"]
    for axes in panels:
        raw, smooth, held_out = axes.lines[:3]
        assert raw.get_alpha() < 1 and len(raw.get_xdata()) == 20 and smooth.get_alpha() is None
        assert max(smooth.get_ydata()) <= max(raw.get_ydata()) and list(smooth.get_ydata()) != list(raw.get_ydata())
        assert list(held_out.get_xdata()) == [0, 20] and held_out.get_linestyle() == "None"
        shown = [t for t in axes.get_xticks() if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
        assert shown and all(float(tick).is_integer() for tick in shown)
        assert {text.get_text() for text in axes.get_legend().get_texts()} >= {"one", "two", "one, held out"}


def test_what_to_try_next_is_copied_whole_from_80_columns(tmp_path: Path) -> None:
    screen = io.StringIO()
    config = recipes.load("quickstart").config
    Console(file=screen, width=80).print(show.next_steps(config, Path("runs/quickstart")))
    assert "tidemill train own model.path=FOLDER data.source=FILE" in screen.getvalue()
    assert "tidemill resume runs/quickstart train.steps=" in screen.getvalue()


def spoken(folder: str) -> list[tuple[str, str]]:
    """The texts of a folder's code with a place: every string but docstrings."""
    found = []
    for file in sorted((SOURCE / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
                found.append((f"{file.name}:{node.lineno}", node.value))
    docs = {doc for file in (SOURCE / folder).rglob("*.py") for doc in _docstrings(file)}
    return [(place, text) for place, text in found if text not in docs]


def _docstrings(file: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node, clean=False)) is not None]


@pytest.mark.parametrize("folder", SPOKEN)
def test_messages_are_plain_english(folder: str) -> None:
    texts = spoken(folder)
    assert len(texts) > 20
    wrong = [
        f"{place}: {text!r}: {better}"
        for place, text in texts
        for phrase, better in UNIDIOMATIC.items()
        if re.search(phrase, text)
    ]
    assert wrong == []


def test_models_are_listed_whole_at_80_columns() -> None:
    result = CliRunner().invoke(app, ["models", "list"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    for name, model in known.KNOWN.items():
        assert name in result.output and model.about in result.output


def test_a_run_in_one_process_has_no_dock_to_show_and_is_told_which_have(tmp_path: Path) -> None:
    with pytest.raises(DockError, match="no dock has left its address") as error:
        view.look(tmp_path)
    assert "cluster.executor=processes or ray" in error.value.remedy
