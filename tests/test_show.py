import io
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from rich.console import Console

from tidemill import doctor, show
from tidemill.recipe import load as recipe


@dataclass
class Answered:
    prompt: str
    answer: str
    response: str
    correct: bool


@dataclass
class Evaluation:
    accuracy: float
    answers: list[Answered]
    pass_at: dict[int, float] = field(default_factory=dict)


@dataclass
class Summary:
    accuracy_before: float | None = 0.2
    accuracy_after: float | None = 0.9
    steps: int = 3
    seconds: float = 75.0
    tokens_per_s: float = 12345.0
    is_stopped: bool = False
    is_early: bool = False
    rewards: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    before: Evaluation | None = None
    after: Evaluation | None = None


def shown(*renderables, width: int = 120) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=width, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return screen.getvalue()


def test_config_shows_key_value_source_and_help_of_every_setting():
    loaded = recipe.load({}, ["train.steps=7", "data.args.a=[1, 2]"])
    text = shown(show.config_table(loaded), width=200)
    assert all(key in text for key, *_ in recipe.describe(loaded))
    [line] = [line for line in text.splitlines() if line.startswith("train.steps ")]
    assert line.split()[1:4] == ["7", "command", "line"]
    assert "steps of the whole run" in line
    assert "{a: [1, 2]}" in text
    assert "{function: exact}" in text


def test_square_brackets_in_values_are_not_markup():
    text = shown(show.config_table(recipe.load({}, ["about=[red]x[/]"])), width=200)
    assert "[red]x[/]" in text


def test_recipes_and_findings_are_tables(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("about: learns to count\n")
    monkeypatch.setenv("TIDEMILL_RECIPES", str(tmp_path))
    assert "learns to count" in shown(show.recipes_table())
    well = [doctor.Finding("memory", "3 GB")]
    assert "nothing here keeps a run from working" in shown(show.doctor_table(well))
    ill = [*well, doctor.Finding("torch", "not installed", "bad", "pip install torch")]
    assert "1 of these will make a run fail" in shown(show.doctor_table(ill))
    assert "pip install torch" in shown(show.doctor_table(ill))


def test_the_plan_is_one_table():
    assert "samples per step" in shown(show.plan_table(recipe.load({}).config, 1000))


def evaluation(*correct: bool, accuracy: float = 0.5) -> Evaluation:
    return Evaluation(accuracy, [Answered(f"p{i}", "1", f"r{i}", c) for i, c in enumerate(correct)], {1: 0.25})


def test_the_ending_shows_accuracy_problems_curve_and_what_next(tmp_path):
    screen = io.StringIO()
    before, after = evaluation(False, False, False, True), evaluation(True, True, False, True)
    config = recipe.load({"name": "x"}).config
    show.ending(Console(file=screen, width=120), config, tmp_path, Summary(before=before, after=after))
    text = screen.getvalue()
    for words in ("20.0 %", "90.0 %", "pass@1", "3 steps in 1:15", "✗ r0", "✓ r0", "reward", "┤", "tidemill export"):
        assert words in text
    assert "✗ r2" in text  # one it still gets wrong
    assert "p3" not in text
    rows = shown(show.problems_table(evaluation(False, False).answers, evaluation(False, False).answers))
    assert rows.count("p0") == rows.count("p1") == 1
    pytest.importorskip("matplotlib")
    assert (tmp_path / "curve.png").exists()


def test_a_stopped_run_says_how_to_go_on(tmp_path):
    screen = io.StringIO()
    config = recipe.load({}).config
    show.ending(Console(file=screen, width=200), config, tmp_path, Summary(is_stopped=True))
    assert f"tidemill resume {tmp_path}" in screen.getvalue()


def test_the_watcher_draws_a_warm_start_and_then_the_run():
    screen = io.StringIO()
    warm = recipe.load({"name": "warm", "train": {"steps": 2}, "observe": {"progress": "plain"}}).config
    main = recipe.load({"name": "main", "train": {"steps": 5}, "observe": {"progress": "plain"}}).config
    with show.RunWatcher(Console(file=screen, width=120), main) as watch:
        watch.noted("warm start: [soon]")
        watch.started(SimpleNamespace(config=warm, parameters=10), 0)
        watch.stepped(1, {"loss": 2.0})
        watch.started(SimpleNamespace(config=main, parameters=10), 3)
        watch.evaluated(3, evaluation(True, accuracy=0.5))
        watch.stepped(4, {"reward": 0.5})
    text = screen.getvalue()
    assert "warm start: [soon]" in text
    assert "step 1/2  loss 2.000" in text
    assert "step 3: held-out accuracy 50.0 %, pass@1 25.0 %" in text
    assert "step 4/5  reward 0.500" in text
    assert str(watch.folder) == "runs/main"


def test_showing_needs_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, tidemill.show; assert 'torch' not in sys.modules"], check=True)
