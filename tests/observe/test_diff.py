"""Two runs of one recipe give the same bits; where two differ, the first step, stage and tensor are named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.faults.test_resume import RECIPE
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.errors import TidemillError
from tidemill.flow.dump import file_of
from tidemill.learn import checkpoint
from tidemill.recipe.config import Config
from tidemill.run import diff
from tidemill.run import start as launch


def run(folder: Path, **over: Any) -> Path:
    recipe = {**RECIPE, "folder": str(folder), "observe": {"dump": [1, 2], "tensorboard": False}}
    for section, values in over.items():
        recipe[section] = {**recipe.get(section, {}), **values} if isinstance(values, dict) else values
    recipe["train"] = {**recipe["train"], "steps": 2}
    launch.train(recipe)
    return folder / "small"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("plain"), deterministic=True)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.use_deterministic_algorithms(False)


def test_two_deterministic_runs_are_equal_bit_for_bit(plain, tmp_path):
    again = run(tmp_path, deterministic=True)
    found = diff.compare(plain, again)
    assert found.first is None and found.dumped == (1, 2) and found.saved
    assert diff.render(found).startswith("no difference")
    one, other = (checkpoint.load(checkpoint.latest(p / "checkpoints").path)[0] for p in (plain, again))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_another_learning_rate_shows_in_the_weights_of_the_first_step_and_not_before(plain, tmp_path):
    other = run(tmp_path, learn={"lr": RECIPE["learn"]["lr"] * 2})
    found = diff.compare(plain, other)
    assert any(line.startswith("learn.lr") for line in found.settings)
    assert (found.dumps.step, found.dumps.stage) == (1, "learn")
    assert found.dumps.tensor.startswith("weight/")  # its gradients are equal
    assert "values" in found.dumps.how


def test_another_seed_shows_where_its_data_enters(plain, tmp_path):
    found = diff.compare(plain, run(tmp_path, seed=7))
    assert (found.first.step, found.first.stage) in {(1, "source"), (0, "metrics")}
    assert found.dumps.stage == "source"


def test_a_value_changed_in_a_dump_is_found_where_it_is(plain, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    other = run(tmp_path, deterministic=True)
    path = file_of(other, 2)
    with safe_open(path, "pt") as file:
        tensors, about = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["advantage/advantages"][3] += 1
    save_file(tensors, path, about)
    found = diff.compare(plain, other)
    assert (found.first.step, found.first.stage, found.first.tensor) == (2, "advantage", "advantages")
    assert "first at [3]" in found.first.how


def test_a_run_cut_short_is_a_difference(plain, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(plain, short)
    lines = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(json.loads(line)["step"] for line in lines)
    (short / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < last))
    found = diff.compare(plain, short).metrics
    assert found is not None and (found.step, found.how) == (last, "only the first run has the step")


def test_a_shorter_run_differs_in_the_step_it_lacks_and_not_in_the_evaluation_at_its_end(tmp_path):
    def written(name, *records):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return tmp_path / name

    steps = [{"step": step, "loss": 0.5} for step in (1, 2)]
    (found,) = diff._metrics(written("long", *steps), written("short", steps[0], {"step": 1, "eval/accuracy": 0.25}))
    assert (found.step, found.tensor) == (2, "all")
    one, other = ({"step": 1, "eval/accuracy": x} for x in (0.25, 0.5))
    assert [d.tensor for d in diff._metrics(written("a", one), written("b", other))] == ["eval/accuracy"]


def test_a_section_that_one_run_alone_has_is_told_whichever_run_it_is():
    without, with_one = (Config.model_validate(given) for given in ({}, {"environment": {"name": "nim"}}))
    for pair in ((without, with_one), (with_one, without)):
        assert any(line.startswith("environment.name: ") and "'nim'" in line for line in diff._settings(*pair))
    assert not list(diff._settings(with_one, with_one))


@pytest.mark.parametrize(("has_more", "which"), [("a", "first"), ("b", "second")])
def test_a_tensor_that_one_checkpoint_alone_has_is_named(tmp_path, has_more, which):
    for run_name in ("a", "b"):
        tensors = {"model.x": torch.ones(2)} | ({"ema.x": torch.ones(2)} if run_name == has_more else {})
        checkpoint.save(tmp_path / run_name, 1, tensors, {}, keep=1)
    (found,) = diff._checkpoints(tmp_path / "a", tmp_path / "b", 1)
    assert found.tensor == "ema.x" and which in found.how


def test_the_command_says_it_and_ends_with_one(plain, tmp_path):
    other = run(tmp_path, learn={"lr": 0.5})
    result = CliRunner().invoke(app, ["diff", str(plain), str(other)])
    assert result.exit_code == 1 and "first difference: step 1, learn, weight/" in result.stdout
    as_json = CliRunner().invoke(app, ["diff", str(plain), str(plain), "--json"])
    assert as_json.exit_code == 0 and json.loads(as_json.stdout)["first"] is None


def altered(run: Path, to: Path, *names: str) -> Path:
    """A copy of a run in whose first dump these tensors are other."""
    shutil.copytree(run, to)
    path = file_of(to, 1)
    with safe_open(path, "pt") as file:
        told = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in names:
        tensors[name] = tensors[name] + 1
    save_file(tensors, path, told)
    return to


def test_a_dump_cut_short_is_named(plain, tmp_path):
    other = altered(plain, tmp_path / "short")
    file_of(other, 1).write_bytes(file_of(plain, 1).read_bytes()[:500])
    with pytest.raises(TidemillError, match=r"step-000001.safetensors cannot be read"):
        diff.compare(plain, other)


def test_of_several_updates_in_a_step_the_first_that_differs_is_named(plain, tmp_path):
    later, head = "learn/gradient/1/model.layers.0.mlp.up_proj.weight", "learn/weight/0/model.norm.weight"
    other = altered(plain, tmp_path / "both", later, head, "learn/weight/1/model.norm.weight")
    assert diff.compare(plain, other).dumps.tensor == "weight/0/model.norm.weight"
    other = altered(plain, tmp_path / "later", later, "learn/weight/1/model.embed_tokens.weight")
    assert diff.compare(plain, other).dumps.tensor == "gradient/1/model.layers.0.mlp.up_proj.weight"
    order = {"rollout": 0, "learn": 1}
    names = ["learn/gradient/10/a", "learn/gradient/2/a", "learn/weight/2/a", "rollout/weight", "learn/weight/10/a"]
    assert sorted(names, key=lambda n: diff._when(n, order)) == [names[i] for i in (3, 1, 2, 0, 4)]


def test_of_one_updates_tensors_the_first_of_the_model_is_named(plain, tmp_path):
    first, second = (f"learn/weight/0/model.layers.1.mlp.{n}.weight" for n in ("up_proj", "down_proj"))
    found = diff.compare(plain, altered(plain, tmp_path / "other", second, first)).dumps
    assert f"learn/{found.tensor}" == first


def test_a_profiled_step_is_a_trace_with_the_stages_in_it(tmp_path):
    recipe = {**RECIPE, "folder": str(tmp_path), "train": {**RECIPE["train"], "steps": 2, "profile": [2]}}
    launch.train(recipe)
    traces = list((tmp_path / "small" / "profile").iterdir())
    assert [t.name for t in traces] == ["step-000002.json"]
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert {"stage rollout", "stage learn", "stage advantage"} <= names


def test_evaluation_sees_the_running_mean_and_learning_does_not(tmp_path):
    plain, averaged = (run(tmp_path / str(ema), learn={"ema": ema}) for ema in (0.0, 0.9))
    found = diff.compare(plain, averaged)
    assert found.dumps is None  # the same gradients and weights
    tensors, _ = checkpoint.load(checkpoint.latest(averaged / "checkpoints").path)
    means = {n.removeprefix("ema."): t for n, t in tensors.items() if n.startswith("ema.")}
    assert means and any(not torch.equal(means[n], tensors[f"model.{n}"]) for n in means)
