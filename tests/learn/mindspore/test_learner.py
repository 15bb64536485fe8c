"""MindSpore's learner computes what torch's does, and its run survives a killed process. `make test-mindspore`."""

from __future__ import annotations

import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cluster.runs import Disturb, assert_same, assert_same_learning, measured, recipe
from tests.learn.grouped import grouped
from tidemill.algorithms.shared.registry import get
from tidemill.errors import ConfigError, InterpreterError, ModelError
from tidemill.learn.engine import Learner
from tidemill.learn.mindspore.fleet import SUM
from tidemill.learn.mindspore.learner import USUAL, MindSporeLearner
from tidemill.models.load import load
from tidemill.recipe.config import Config
from tidemill.run import start as launch
from tidemill.run.trained import export
from tidemill.run.watcher import Watcher

HERE = os.environ.get("TIDEMILL_MINDSPORE", USUAL)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path(HERE, "bin", "python").exists(), reason="no MindSpore here: `make mindspore`"),
]
IN_MINDSPORE = {"backend": "mindspore", "mindspore": {"python": HERE}}
SHAPES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}


def settings(architecture: str, algorithm: str, processes: int = 1, **learn: Any) -> Config:
    made = {
        "lr": 1e-2,
        "eps": 1e-4,
        "weight_decay": 0.1,
        "mindspore": {"python": HERE, "processes": processes},
        **learn,
    }
    return Config.model_validate(
        {
            "model": {"tiny": {"architecture": architecture, **SHAPES}},
            "algorithm": algorithm,
            "train": {"tokens_per_microbatch": 120},
            "threads": 1,
            "learn": made,
        }
    )


def both(config: Config, log: Path) -> tuple[Learner, MindSporeLearner]:
    model = load(config.model, seed=0, device=torch.device("cpu")).model
    algorithm = get(config.algorithm.name)
    mine = MindSporeLearner(copy.deepcopy(model), config, algorithm, 10, log / "mindspore.log")
    return Learner(model, config, algorithm, 10), mine


@pytest.mark.parametrize(
    ("architecture", "algorithm", "shares"),
    [("qwen3", "grpo", True), ("qwen2", "grpo", False), ("llama", "sft", False)],
)
def test_losses_gradients_and_weights_are_those_of_torch(
    architecture: str, algorithm: str, shares: bool, tmp_path: Path
) -> None:
    """Two processes, each with a part of the rows; of the gradient's sum, the first one's copy is looked at."""
    torch_s, mine = both(settings(architecture, algorithm, 2, share_prompts=shares), tmp_path)
    try:
        for i in range(2):
            batch = grouped(np.random.default_rng(i), 3 + 3 * i, 4, longest=6 + 6 * i)
            np.testing.assert_allclose(mine.logprobs(batch).values, torch_s.logprobs(batch).values, atol=1e-5)
            torch_s.accumulate(batch)
            mine.accumulate(batch)
            assert mine.fleet is not None
            mine.fleet.add_up()
            mine.fleet.give(SUM)
            for name, p in torch_s.model.named_parameters():
                wanted = torch_s.gradients.of(p)
                assert wanted is not None
                gap = (mine.fleet.own[SUM][name] - wanted).norm() / (wanted.norm() + 1e-6)
                assert gap < 1e-4, name
            torch_s.forget()
            mine.forget()
            torch_s.accumulate(batch)
            mine.accumulate(batch)
            wanted, found = torch_s.update(), mine.update()
            assert i > 0 or wanted["grad_norm"] > 1.0  # it is clipped
            for key in ("loss", "grad_norm", "entropy", "lr"):
                assert found[key] == pytest.approx(wanted[key], abs=1e-4, rel=1e-4), key
        mine.publish()
        for (name, p), q in zip(torch_s.model.named_parameters(), mine.model.parameters()):
            torch.testing.assert_close(q, p, atol=1e-4, rtol=1e-4, msg=name)
    finally:
        mine.close()


def test_a_gradient_that_is_not_finite_makes_no_step(tmp_path: Path) -> None:
    _, mine = both(settings("qwen3", "grpo"), tmp_path)
    try:
        batch = grouped(np.random.default_rng(0), 3, 4)
        before = {name: p.detach().clone() for name, p in mine.model.named_parameters()}
        mine.accumulate(batch.merge({"advantages": batch.values("advantages") * np.float32("inf")}))
        told = mine.update()
        assert told["skipped_updates"] == 1 and told["not_finite_tensors"] > 0
        mine.publish()
        for name, p in mine.model.named_parameters():
            torch.testing.assert_close(p, before[name], rtol=0, atol=0)
        mine.accumulate(batch)
        assert np.isfinite(mine.update()["grad_norm"])
    finally:
        mine.close()


def test_models_devices_and_pythons_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"knows LlamaForCausalLM, .* not Gemma2ForCausalLM"):
        both(settings("gemma2", "grpo"), tmp_path)
    with pytest.raises(ConfigError, match="there is no Python at nowhere"):
        both(settings("qwen3", "grpo", mindspore={"python": "nowhere"}), tmp_path)


# Runs


def run(folder: Path, watch: Watcher | None = None, **over: Any) -> list[dict[str, Any]]:
    launch.train(recipe(folder, **{"cluster": {"executor": "local"}, **over}), watch=watch)
    return measured(folder)


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("torch"), learn={"eps": 1e-4})


MINE = {**IN_MINDSPORE, "eps": 1e-4}
# A busy machine takes long to start and to compile.
PATIENT = {"executor": "processes", "stall_s": 600.0, "start_s": 900.0, "lease_s": 60.0}


@pytest.mark.parametrize("cluster", [{"executor": "local"}, PATIENT], ids=["one process", "worker processes"])
def test_a_run_measures_what_torchs_does(
    cluster: dict[str, Any], tmp_path: Path, by_torch: list[dict[str, Any]]
) -> None:
    assert_same_learning(run(tmp_path, learn=MINE, cluster=cluster), by_torch, 1e-4)


@pytest.mark.parametrize("first", ["torch", "mindspore"])
def test_a_run_goes_on_under_the_other_backend(first: str, tmp_path: Path, by_torch: list[dict[str, Any]]) -> None:
    second = "mindspore" if first == "torch" else "torch"
    run(tmp_path, learn={**MINE, "backend": first}, train={"steps": 2})
    config = tmp_path / "small" / "config.yaml"
    text = config.read_text().replace("  steps: 2", "  steps: 4")
    config.write_text(text.replace(f"backend: {first}", f"backend: {second}") if "backend:" in text else text)
    assert f"backend: {second}" in config.read_text()
    (tmp_path / "small" / "summary.json").unlink()
    launch.resume(tmp_path / "small")
    found = [line for line in measured(tmp_path) if line["step"] > 2]
    assert_same_learning(found, [line for line in by_torch if line["step"] > 2], 1e-4)


class KillMindSpore(Watcher):
    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            for pid in children(os.getpid()):
                os.kill(pid, signal.SIGKILL)


def children(of: int) -> list[int]:
    """Processes of MindSpore's that this one has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if parent == of and "mindspore.child" in command:
            found.append(int(folder.name))
    return found


def test_a_killed_process_ends_a_run_of_one_process_and_it_is_resumed(
    tmp_path: Path, by_torch: list[dict[str, Any]]
) -> None:
    with pytest.raises(InterpreterError, match="MindSpore's process 0 was killed by SIGKILL"):
        run(tmp_path, KillMindSpore(), learn=MINE)
    launch.resume(tmp_path / "small")
    assert_same_learning(measured(tmp_path), by_torch, 1e-4)


def test_a_killed_process_is_started_anew_with_its_worker(tmp_path: Path, by_torch: list[dict[str, Any]]) -> None:
    watch = Disturb(lambda workers: children(workers.pool.members["learner-0"].pid)[0])
    found = run(tmp_path, watch, learn=MINE, cluster=PATIENT)
    assert watch.killed and any("newest checkpoint" in said for said in watch.said)
    assert_same_learning(found, by_torch, 1e-4)


def test_what_was_learned_is_a_model_folder_that_torch_reads(tmp_path: Path) -> None:
    run(tmp_path, learn=MINE, train={"steps": 2})
    export(tmp_path / "small", tmp_path / "model")
    again = {"model": {"path": str(tmp_path / "model"), "tiny": None}}
    lines = json.loads((tmp_path / "small" / "summary.json").read_text())
    assert lines["steps"] == 2
    found = run(tmp_path / "again", learn=MINE, train={"steps": 1}, **again)
    wanted = run(tmp_path / "torch", learn={"eps": 1e-4}, train={"steps": 1}, **again)
    assert_same(found, wanted, 1e-4)
