"""A GRPO script for TRL, moved over by changing its imports and five lines: it runs, and it learns."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tidemill import Trainer
from tidemill.models.load import make_tiny, save_folder
from tidemill.recipe.config import TinyModel

EXAMPLE = Path(__file__).parent / "trl_example"
STEPS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small model, in which the scripts are run."""
    shape = TinyModel(hidden=48, layers=1, heads=4, kv_heads=2, intermediate=96, window=32)
    made = make_tiny(shape, torch.float32, 0, torch.device("cpu"))
    save_folder(made.model, made.tokenizer, tmp_path / "my-model")
    return tmp_path


def changed(theirs: str, ours: str) -> tuple[int, int]:
    """Count changed lines: of imports, and others."""
    told = difflib.ndiff(theirs.splitlines(), ours.splitlines())
    lines = [line for line in told if line.startswith("+ ") and line.strip() != "+"]
    imports = sum(line.startswith(("+ from ", "+ import ")) for line in lines)
    return imports, len(lines) - imports


class Rows(list):
    """What `datasets.Dataset.from_list` gives, for an environment without that package."""

    @classmethod
    def from_list(cls, rows):
        return cls(rows)


def test_imports_and_five_lines_move_a_script_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = ((EXAMPLE / name).read_text() for name in ("theirs.py", "ours.py"))
    assert changed(theirs, ours) == (1, 5)
    if "datasets" not in sys.modules:
        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Rows))
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "ours"}
    exec(compile(ours, "ours.py", "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, Trainer)
    rewards = [value for value in trainer.metrics["reward"] if value == value]  # evaluations have rows of their own
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards


@pytest.mark.slow
def test_the_script_runs_in_trl_as_it_is(folder: Path) -> None:
    pytest.importorskip("trl")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = (EXAMPLE / "theirs.py").read_text().replace("GRPOConfig(", "GRPOConfig(bf16=False, ")  # on a CPU
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
