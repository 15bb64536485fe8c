"""Whatever is wrong, the command line says what, where and what to do, in a few lines, and loses nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from tests import bad_inputs
from tests.faults.test_resume import RECIPE
from tidemill import cli, doctor
from tidemill.cli import app, explain, main
from tidemill.errors import ConfigError, DataError, ModelError, RewardError, TidemillError
from tidemill.recipe import load as recipes
from tidemill.recipe.config import TinyModel
from tidemill.run import start as launch
from tidemill.run.watcher import Watcher

WIDTH = 120  # columns of a terminal


def attempt(folder: Path, **over: Any) -> Any:
    recipe = {**RECIPE, "folder": str(folder / "runs")}
    recipe["train"] = {**recipe["train"], "steps": 2}
    for section, values in over.items():
        base = recipe.get(section, {})
        recipe[section] = {**base, **values} if isinstance(base, dict) and isinstance(values, dict) else values
    return launch.train(recipe)


def message(error: pytest.ExceptionInfo[TidemillError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= 8, text
    assert "Traceback" not in text
    return text


def test_a_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        attempt(tmp_path, train={"prompt_per_step": 4})
    assert "train.prompts_per_step" in message(error)


def test_a_key_of_another_section_is_found_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        attempt(tmp_path, lr=1e-3)
    assert "learn.lr" in message(error)


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"train": {"updates_per_step": 3}}, "train.updates_per_step"),
        ({"train": {"samples_per_prompt": 1}}, "samples_per_prompt"),
        ({"train": {"tokens_per_microbatch": 4}}, "tokens_per_microbatch"),
        ({"train": {"prompts_per_step": 0}}, "train.prompts_per_step"),
        ({"rollout": {"max_new_tokens": 500}}, "window"),
    ],
)
def test_impossible_batch_sizes_are_refused_before_any_model_loads(
    tmp_path: Path, over: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.models.load.make_tiny", lambda *_: pytest.fail("a model was made"))
    with pytest.raises(ConfigError) as error:
        attempt(tmp_path, **over)
    assert named in message(error)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TidemillError) as error:
        attempt(tmp_path, data={"source": str(tmp_path / "absent.jsonl")})
    assert "absent.jsonl" in message(error)


def test_an_empty_data_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(TidemillError) as error:
        attempt(tmp_path, data={"source": str(tmp_path / "empty.jsonl"), "args": {}})
    assert "empty.jsonl" in message(error)


def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(9)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:4], "{not json", *rows[4:]]))
    data = {"source": str(tmp_path / "bad.jsonl"), "args": {}, "held_out": 2}
    with pytest.raises(DataError) as error:
        attempt(tmp_path, data=data)
    assert "bad.jsonl:5" in message(error)
    attempt(tmp_path, data={**data, "on_bad_row": "skip"}, eval={"size": 2})


def test_a_prompt_longer_than_allowed_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1+" * (40 if i == 3 else 1) + f"{i}=", "answer": "2"} for i in range(12)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": str(tmp_path / "long.jsonl"), "args": {}, "held_out": 2, "shuffle": False}
    with pytest.raises(DataError) as error:
        attempt(tmp_path, data=data, eval={"size": 2})
    assert "long.jsonl:" in message(error) and "max_prompt_tokens" in message(error)
    summary = attempt(tmp_path, data={**data, "on_bad_row": "skip"}, eval={"size": 2})
    assert summary.bad_rows >= 1


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    import torch

    from tidemill.models.load import make_tiny

    make_tiny(TinyModel(), torch.float32, 0, torch.device("cpu")).model.save_pretrained(tmp_path / "model")
    with pytest.raises(TidemillError) as error:
        attempt(tmp_path, model={"path": str(tmp_path / "model")})
    assert "tokenizer" in message(error)


def test_a_broken_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises((ConfigError, ModelError)) as error:
        attempt(tmp_path, model={"path": str(tmp_path / "model")})
    assert "config.json" in message(error)


REWARDS = """
import math, time

def raises(sample):
    if sample.id % 5 == 0:
        raise ZeroDivisionError("one over nothing")
    return 1.0

def not_a_number(sample):
    return math.nan if sample.id % 5 == 0 else 1.0

def hangs(sample):
    if sample.id == 3:
        time.sleep(600)
    return float(sample.id % 2)
"""


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize("function", ["raises", "not_a_number", "hangs"])
def test_a_reward_that_fails_names_the_sample_and_the_run_goes_on(tmp_path: Path, function: str) -> None:
    rewards = {"functions": [f"own_rewards:{function}"], "timeout_s": 1.0}
    summary = attempt(tmp_path, rewards=rewards, eval={"size": 0, "before": False, "after": False})
    assert summary.steps == 2
    kept = [json.loads(line) for line in (tmp_path / "runs" / "small" / "samples.jsonl").read_text().splitlines()]
    failed = [s for s in kept if "error" in s]
    assert failed and all(f"sample {s['id']}" in s["error"] for s in failed)


@pytest.mark.usefixtures("own_rewards")
def test_a_failing_reward_ends_the_run_when_told_to(tmp_path: Path) -> None:
    rewards = {"functions": ["own_rewards:raises"], "on_error": "fail"}
    with pytest.raises(RewardError) as error:
        attempt(tmp_path, rewards=rewards, eval={"size": 0, "before": False, "after": False})
    assert "one over nothing" in message(error) and "sample 0" in message(error)


@pytest.mark.usefixtures("own_rewards")
def test_a_failing_reward_drops_its_group_when_told_to(tmp_path: Path) -> None:
    rewards = {"functions": ["own_rewards:raises"], "on_error": "drop"}
    summary = attempt(tmp_path, rewards=rewards, eval={"size": 0, "before": False, "after": False})
    assert summary.steps == 2


def test_a_full_disk_while_saving_loses_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.errors import CheckpointError
    from tidemill.learn import checkpoint, engine

    real, calls, said = engine.save_whole, [0], list[str]()

    def fills_up(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise CheckpointError("the disk is full", "free some space")
        return real(*args, **kwargs)

    class Listen(Watcher):
        def noted(self, text: str) -> None:
            said.append(text)

    monkeypatch.setattr(engine, "save_whole", fills_up)
    recipe = {**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 3}}
    summary = launch.train(recipe, watch=Listen())
    assert summary.steps == 3 and any("disk is full" in s for s in said)
    assert checkpoint.latest(tmp_path / "small" / "checkpoints").step == 3


def test_non_finite_weights_end_the_run_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(TidemillError) as error:
        attempt(tmp_path, learn={"lr": 1e38, "clip_norm": None}, train={"steps": 6})
    assert "learn.lr" in message(error)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the table's files, and a good run that no bad input may move or lose."""
    folder = tmp_path_factory.mktemp("bad")
    bad_inputs.prepare(folder)
    launch.train(recipes.load(folder / "base.yaml", [f"folder={folder / 'runs'}"]))
    return folder


def contents(folder: Path) -> dict[str, int]:
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in files}


def refused(words: str, named: str, place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command in the folder: it must fail in a few lines that name what is wrong and what to do."""
    before = contents(place)
    result = CliRunner().invoke(app, [w.replace("~", " ") for w in words.split(" ")], standalone_mode=False)
    assert result.exception is not None, (words, result.output)
    assert explain(result.exception) == 1
    told = capsys.readouterr().err
    assert told.startswith("error:") and lines_on_a_terminal(told) <= 8 and "Traceback" not in told, told
    assert named in told, (words, told)
    assert has_remedy(told), (words, told)
    assert contents(place) == before, words
    return told


def lines_on_a_terminal(told: str) -> int:
    return sum(max(1, math.ceil(len(line) / WIDTH)) for line in told.splitlines())


def has_remedy(told: str) -> bool:
    """An arrow with what to do, or words that say what would be right."""
    verbs = ("use", "set", "give", "name", "write", "lower", "raise", "check", "copy", "free", "fix")
    ways = ("→", "would do", "did you mean", "but wants", "but can be", *(f"; {verb} " for verb in verbs))
    return any(way in told for way in ways)


@pytest.mark.parametrize(("words", "named"), bad_inputs.SETTINGS, ids=lambda case: str(case)[:60])
def test_a_bad_setting_is_refused_with_its_key_a_remedy_and_nothing_lost(
    words: str, named: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    refused(f"train base.yaml {words}", named, place, capsys)


@pytest.mark.parametrize(("words", "named"), bad_inputs.COMMANDS, ids=lambda case: str(case)[:60])
def test_a_bad_command_is_refused_with_what_it_names_a_remedy_and_nothing_lost(
    words: str, named: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    refused(words, named, place, capsys)


@pytest.mark.parametrize(("words", "named"), bad_inputs.USAGE, ids=lambda case: str(case)[:60])
def test_words_that_no_command_knows_are_told_in_a_few_lines(
    words: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tidemill", *words.split()])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capsys.readouterr().err
    assert left.value.code == 2 and "Usage: tidemill" in shown and len(shown.splitlines()) <= 8
    assert named in shown


def test_the_table_has_at_least_150_cases() -> None:
    cases = [*bad_inputs.SETTINGS, *bad_inputs.COMMANDS, *bad_inputs.USAGE]
    assert len({words for words, _ in cases}) == len(cases) >= 150


def test_what_a_command_ends_with_is_the_programs_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_healthy", lambda _: False)
    monkeypatch.setattr(sys, "argv", ["tidemill", "doctor"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1


def test_help_is_complete_everywhere() -> None:
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0 and command.callback.__doc__  # type: ignore[union-attr]


def test_square_brackets_of_help_are_shown() -> None:
    """Help texts go through rich markup, which swallows `[steps]`."""
    for command in app.registered_commands:
        assert command.callback is not None
        texts = [command.callback.__doc__ or "", *(o.help or "" for o in _options(command.callback))]
        assert [t for t in texts if Text.from_markup(t).plain != t] == []


def _options(command: Any) -> list[Any]:
    hints = typing.get_type_hints(command, include_extras=True).values()
    return [o for hint in hints for o in typing.get_args(hint)[1:] if hasattr(o, "help")]


def test_every_file_of_commands_is_listed() -> None:
    files = {file.stem for file in Path(cli.__file__).parent.glob("[a-z]*.py")}
    assert files - {"frame", "complete"} == set(cli.FILES)


def test_the_command_starts_without_importing_torch() -> None:
    code = "import sys; import tidemill.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
