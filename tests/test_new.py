"""`tidemill new` writes a project whose tests pass, and a shell is offered what can follow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.errors import ConfigError
from tidemill.recipe import load as recipes
from tidemill.scaffold.make import make

SRC = Path(__file__).resolve().parents[1] / "src"


def test_a_new_project_has_a_recipe_that_makes_a_step_and_tests_that_pass(tmp_path):
    result = CliRunner().invoke(app, ["new", str(tmp_path / "sums")])
    assert result.exit_code == 0 and "tidemill train recipe.yaml" in result.output
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "sums", env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr


def test_a_model_that_is_named_is_the_recipes(tmp_path):
    make(tmp_path / "mine", "org/model")
    assert recipes.load(tmp_path / "mine" / "recipe.yaml").config.model.path == "org/model"


@pytest.mark.parametrize(("name", "says"), [("full", "is not empty"), ("a b", "cannot name a run")])
def test_a_folder_that_cannot_be_a_project_is_refused(tmp_path, name, says):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ConfigError, match=says):
        make(tmp_path / name)
    assert (tmp_path / "full" / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tidemill tra", {"train"}),
        ("tidemill train quickstart-s", {"quickstart-sft"}),
        ("tidemill train mi", {"mine.yaml"}),
        ("tidemill train quickstart learn.lr", {"learn.lr="}),
        ("tidemill eval runs/", {"runs/first"}),
        ("tidemill watch runs/f", {"runs/first"}),
    ],
)
def test_a_shell_is_offered_what_can_follow(tmp_path, words, offered):
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("name: first\n")
    asked = {"_TIDEMILL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "tidemill"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SRC)} | asked, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert set(done.stdout.split()) == offered, done.stdout + done.stderr
