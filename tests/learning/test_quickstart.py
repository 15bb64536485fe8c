"""The quickstart learns: the same recipes with a smaller budget. `tidemill bench quickstart` runs it whole."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidemill


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_teaches_a_guessing_model_to_work_sums_out(tmp_path: Path) -> None:
    common = [f"folder={tmp_path}", "threads=1", "observe.progress=off", "observe.tensorboard=false"]
    tidemill.train("quickstart-worked", [*common, "name=worked", "train.steps=120"])
    export(tmp_path / "worked", tmp_path / "a")
    tidemill.train("quickstart-sft", [*common, "name=sft", f"model.path={tmp_path}/a", "eval.before=false"])
    export(tmp_path / "sft", tmp_path / "b")
    summary = tidemill.train(
        "quickstart", [*common, "name=rl", f"model.path={tmp_path}/b", "train.steps=24", "eval.every=0"]
    )
    assert summary.accuracy_before is not None and summary.accuracy_after is not None
    assert summary.accuracy_before < 0.4
    assert summary.accuracy_after > max(0.6, 2 * summary.accuracy_before)
    assert sum(summary.rewards[-4:]) > 1.5 * sum(summary.rewards[:4])


def export(run: Path, folder: Path) -> None:
    from tidemill.run.trained import export as write

    write(run, folder)
