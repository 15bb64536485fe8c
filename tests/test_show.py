import io
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from rich.console import Console

from tidemill import doctor, show
from tidemill.data.survey import Lengths
from tidemill.observe.progress import Progress
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
    bad_rows: int = 0
    rewards: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    has_rewards: bool = True
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
    text = shown(show.config_table(loaded, width=200), width=200)
    assert all(key in text for key, *_ in recipe.describe(loaded))
    [line] = [line for line in text.splitlines() if line.startswith("train.steps ")]
    assert line.split()[1:4] == ["7", "command", "line"]
    assert "steps of the whole run" in line
    assert "{a: [1, 2]}" in text
    assert "{function: exact}" in text


def test_square_brackets_in_values_are_not_markup():
    text = shown(show.config_table(recipe.load({}, ["about=[red]x[/]"])))
    assert "[red]x[/]" in text


def test_recipes_and_findings_are_tables(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("about: learns to count\n")
    monkeypatch.setenv("TIDEMILL_RECIPES", str(tmp_path))
    assert "learns to count" in shown(show.recipes_table())
    well = [doctor.Finding("memory", "3 GB")]
    assert "runs will work on this machine" in shown(show.doctor_table(well))
    ill = [*well, doctor.Finding("torch", "not installed", "bad", "pip install torch")]
    assert "1 of these would make a run fail" in shown(show.doctor_table(ill))
    assert "pip install torch" in shown(show.doctor_table(ill))


def test_at_80_columns_every_key_is_whole_grouped_and_what_matters_comes_first():
    loaded = recipe.load({}, ["train.steps=7"])
    lines = shown(show.config_table(loaded, width=80), width=80).splitlines()
    heads = [line.split(" = ")[0] for line in lines if " = " in line and not line.startswith(" ")]
    assert {key for key, *_ in recipe.describe(loaded)} <= set(heads)
    assert heads[:3] == ["name", "model.path", "data.source"] and max(map(len, lines)) <= 80
    assert lines[0] == "what matters most" and "rollout" in lines


def test_only_changed_settings_are_shown_on_request():
    loaded = recipe.load({}, ["train.steps=7", "learn.lr=1e-5"])
    text = shown(show.config_table(loaded, changed=True), width=80)
    heads = [line.split(" = ")[0] for line in text.splitlines() if " = " in line]
    assert heads == ["train.steps", "learn.lr"]


def test_recipes_are_grouped_with_the_quickstart_first():
    lines = shown(show.recipes_table(), width=80).splitlines()
    first = [line.split()[0] for line in lines if line[:1].strip()]
    assert lines[0] == "start here" and first[1:3] == ["quickstart", "own"]
    at = [lines.index(title) for title in ("start here", "algorithms, seconds each on a CPU", "full size")]
    assert at == sorted(at)
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert all(name in names for name, _ in recipe.listing())


def test_a_run_without_rewards_has_its_loss_as_curve_and_a_reward_model_is_not_talked_to(tmp_path):
    for algorithm in ("dpo", "reward_model"):
        screen = io.StringIO()
        config = recipe.load({"name": "x", "algorithm": algorithm}).config
        summary = Summary(rewards=[-0.7, -0.6], has_rewards=False)
        show.ending(Console(file=screen, width=200), config, tmp_path, summary)
        lines = [line.strip() for line in screen.getvalue().splitlines()]
        assert "loss" in lines and "reward" not in lines and any(line.startswith("0.7") for line in lines)
        assert ("chat with the model" in screen.getvalue()) == (algorithm == "dpo")


def test_the_panel_says_what_is_done_and_how_long_it_takes():
    now = [0.0]
    progress = Progress("plain", 10, out=io.StringIO(), clock=lambda: now[0])
    progress.doing("evaluating", 0, 200)
    now[0] = 60.0
    progress.doing("evaluating", 120, 200)
    assert progress.activity() == "evaluating 120 of 200, 0:40 left"
    progress.doing("loading the model")
    assert progress.activity() == "loading the model"


def test_a_long_evaluation_is_heard_of_without_a_terminal():
    now, out = [0.0], io.StringIO()
    progress = Progress("plain", 10, out=out, clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        progress.doing("evaluating", second, 100)
    assert out.getvalue().splitlines() == ["evaluating 15 of 100, 1:25 left", "evaluating 30 of 100, 1:10 left"]


def test_foreign_warnings_do_not_tear_the_panel(monkeypatch):
    screen, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", terminal)
    logger = logging.getLogger("someone_else")
    handler = logging.StreamHandler(terminal)
    logger.addHandler(handler)
    try:
        console = Console(file=screen, force_terminal=True, width=80)
        with Progress("rich", 4, console=console):
            logger.warning("beware of the dog")
        assert "beware" not in terminal.getvalue() and "beware of the dog" in screen.getvalue()
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)


def test_the_plan_sees_how_long_the_data_is():
    config = recipe.load({"data": {"max_prompt_tokens": 100}, "rollout": {"max_new_tokens": 200}}).config
    text = shown(show.plan_table(config, lengths=Lengths(rows=9, longest_prompt=12, mean_prompt=8.0)), width=140)
    assert "at most 212" in text and "prompts up to 12" in text
    given = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"name": "sft"})})
    lengths = Lengths(rows=9, longest_prompt=12, mean_prompt=8.0, longest_response=300, cut=2)
    text = shown(show.plan_table(given, lengths=lengths), width=140)
    assert "responses up to 300, 2 of them cut" in text and "at most 212" in text


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
