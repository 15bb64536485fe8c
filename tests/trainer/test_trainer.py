"""The Python trainer: the same run as a recipe's, from objects, by hand, with callbacks, on every executor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import tidemill
from tests.trainer import rewards_of_mine
from tidemill import Callback, Table, Trainer
from tidemill.errors import ConfigError, TidemillError
from tidemill.observe.metrics import is_computed

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
SMALL = {
    "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 32}},
    "train": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4},
    "rollout": {"max_new_tokens": 4},
    "eval": {"size": 4, "before": False, "after": False},
    "observe": {"tensorboard": False, "progress": "off"},
    "checkpoint": {"every": 0},
    "threads": 1,
}
RECIPE = {**SMALL, "name": "run", "data": {"source": "arithmetic", "held_out": 8, "max_prompt_tokens": 16}}


def small(folder: Path, recipe=RECIPE, **more) -> Trainer:
    return Trainer(recipe={**recipe, "folder": str(folder)}, **more)


def numbers(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if is_computed(name)} for row in rows]


digits = rewards_of_mine.digits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model folder of one small decoder."""
    folder = tmp_path_factory.mktemp("tiny")
    trainer = small(folder, callbacks=[])
    for step in trainer.steps():
        step.finish()
        trainer.save(folder / "model")
        break
    return folder / "model"


def test_the_trainer_repeats_a_recipes_run_bit_for_bit(tmp_path):
    named = {"function": "tests.trainer.rewards_of_mine:digits", "label": "digits"}
    recipe = {**RECIPE, "rewards": [named], "learn": {"lr": 1e-3}, "algorithm": "grpo"}
    tidemill.train({**recipe, "folder": str(tmp_path / "recipe")})
    by_arguments = Trainer(
        rewards=rewards_of_mine.digits,
        data="arithmetic",
        algorithm="grpo",
        recipe={**SMALL, "name": "run", "data": {"held_out": 8, "max_prompt_tokens": 16}},
        lr=1e-3,
        folder=str(tmp_path / "trainer"),
    )
    by_arguments.train()
    by_hand = Trainer(recipe={**recipe, "folder": str(tmp_path / "hand")})
    for step in by_hand.steps():
        assert [stage.name for stage in step.stages()] == ["rollout", "reward", "advantage", "learn"]
    wanted = numbers(tmp_path / "recipe" / "run")
    assert len(wanted) == 3 and wanted[-1]["grad_norm"] > 0
    assert numbers(tmp_path / "trainer" / "run") == wanted
    assert numbers(tmp_path / "hand" / "run") == wanted


def test_a_closure_a_list_of_rows_and_a_model_object_make_a_run(tmp_path, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    calls = []

    def reward(sample) -> float:
        calls.append(sample.answer)
        return digits(sample)

    model = AutoModelForCausalLM.from_pretrained(tiny)
    before = next(model.parameters()).clone()
    made = Trainer(
        model,
        rewards=[reward, (lambda sample: 1.0, 0.25)],
        data=ROWS,
        tokenizer=AutoTokenizer.from_pretrained(tiny),
        folder=str(tmp_path),
        steps=2,
        prompts_per_step=4,
        samples_per_prompt=4,
        max_new_tokens=4,
        lr=1e-3,
        **{"eval.size": 2, "observe.tensorboard": False, "observe.progress": "off", "threads": 1},
    )
    result = made.train()
    assert made.folder == tmp_path / "run" and result.summary.steps == 2
    assert len(calls) >= 32 and set(calls) <= {row["answer"] for row in ROWS}
    last = [row for row in result.metrics if "reward" in row][-1]
    assert last["reward/reward"] == pytest.approx(last["reward"] - 0.25)
    assert made.model is model and not (next(model.parameters()) == before).all()
    assert isinstance(made.generate("1+1=", temperature=0.0), str)
    assert [len(n) for n in made.generate(["1+1=", "2+2="], n=3)] == [3, 3]
    assert 0 <= made.evaluate().accuracy <= 1


def test_a_function_that_workers_can_import_gives_the_same_bits_on_processes(tmp_path):
    runs = {}
    for executor in ("local", "processes"):
        made = small(tmp_path / executor, rewards=digits, cluster={"executor": executor})
        made.train()
        runs[executor] = numbers(made.folder)
    assert [row["reward"] for row in runs["local"]] == [row["reward"] for row in runs["processes"]]
    assert [row["grad_norm"] for row in runs["local"]] == pytest.approx([r["grad_norm"] for r in runs["processes"]])


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_a_closure_is_refused_where_other_processes_would_need_it(tmp_path, executor):
    with pytest.raises(ConfigError, match=r"cannot be imported by the processes of cluster.executor=") as refused:
        small(tmp_path, rewards=lambda sample: 1.0, cluster={"executor": executor})
    assert "cluster.executor=local" in refused.value.remedy


def test_callbacks_hear_every_moment_in_order(tmp_path):
    told = []

    class Ears(Callback):
        def on_start(self, trainer):
            told.append("start")

        def on_step_begin(self, trainer, step):
            told.append(f"begin {step}")

        def on_samples(self, trainer, step, samples):
            told.append(f"samples {step}")
            assert samples and {sample["step"] for sample in samples} == {step}

        def on_publish(self, trainer, step, version):
            told.append(f"publish {step} version {version}")

        def on_step_end(self, trainer, step, metrics):
            told.append(f"end {step}")

        def on_evaluate(self, trainer, step, evaluation):
            told.append(f"evaluate {step}")

        def on_save(self, trainer, step, checkpoint):
            told.append(f"save {step}")
            assert checkpoint.name == f"step-{step:06d}"

        def on_end(self, trainer, summary):
            told.append("over")

    seen = []
    made = small(
        tmp_path,
        callbacks=[Ears(), lambda trainer, step, metrics: seen.append(metrics["reward"])],
        **{"eval.every": 1, "checkpoint.every": 1, "train.steps": 2},
    )
    made.train()
    per_step = ["publish {0} version {0}", "samples {0}", "end {0}"]
    assert told == [
        "start",
        *["begin 1", *(text.format(1) for text in per_step), "evaluate 1", "save 1"],
        *["begin 2", *(text.format(2) for text in per_step), "save 2", "over"],
    ]
    assert len(seen) == 2


def test_a_callback_stops_the_run_which_then_goes_on_as_if_it_had_not(tmp_path):
    def stop_after_two(trainer, step, metrics):
        if step == 2:
            trainer.stop()

    first = small(tmp_path / "a", callbacks=[stop_after_two], steps=4).train()
    assert first.summary.is_stopped and first.summary.steps == 2
    again = Trainer.from_run(tmp_path / "a" / "run").train()
    assert again.summary.steps == 4 and not again.summary.is_stopped
    small(tmp_path / "b", steps=4).train()
    assert numbers(tmp_path / "a" / "run") == numbers(tmp_path / "b" / "run")


def test_a_setting_changed_from_a_callback_holds_from_the_next_step_and_after_resuming(tmp_path):
    def change(trainer, step, metrics):
        if step == 1:
            trainer.set("learn.lr", 5e-4)

    made = small(tmp_path, callbacks=[change], lr=1e-3)
    assert made.train().metrics["lr"].tolist() == [1e-3, 5e-4, 5e-4]


def test_leaving_the_loop_over_steps_saves_the_run(tmp_path):
    made = small(tmp_path, steps=5)
    for step in made.steps():
        assert math.isfinite(step.metrics["reward"]) and step.samples
        if step.number == 2:
            break
    assert json.loads((made.folder / "summary.json").read_text())["is_stopped"]
    assert Trainer.from_run(made.folder, steps=3).train().summary.steps == 3


def test_an_error_in_the_loop_leaves_nothing_locked(tmp_path):
    made = small(tmp_path)
    kept = None
    try:
        for _ in made.steps():
            raise ValueError("mine")
    except ValueError as error:
        kept = error  # as a notebook keeps the last traceback
    assert kept is not None
    assert made.train().summary.steps == 3


def test_a_trl_reward_gets_lists_and_the_rows_columns(tmp_path, tiny):
    got = {}

    def reward(prompts, completions, answer, level, **kwargs):
        got.update(prompts=prompts, completions=completions, answer=answer, level=level)
        return [float(a in c) if c else None for c, a in zip(completions, answer)]

    rows = [row | {"level": 3} for row in ROWS]
    made = Trainer(tiny, reward, rows, recipe={**RECIPE, "model": {}, "name": "trl", "folder": str(tmp_path)})
    made.train()
    assert len(got["prompts"]) == len(got["completions"]) == len(got["answer"]) > 1
    assert set(got["level"]) == {3} and isinstance(got["completions"][0], str)


def test_evaluating_and_saving_while_a_run_goes_on(tmp_path):
    made = small(tmp_path)
    for step in made.steps():
        step.finish()
        assert 0 <= made.evaluate(size=2).accuracy <= 1
        saved = made.save(tmp_path / f"model-{step.number}")
        assert (saved / "config.json").exists() and isinstance(made.generate("1+1="), str)
    assert (tmp_path / "model-3").exists()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"learning_rate": 1e-5}, "it is learn.lr here"),
        ({"reward_funcs": [digits]}, "reward_funcs=… is rewards=… here"),
        ({"stepz": 3}, "did you mean steps"),
        ({"eps": 1e-3}, None),
        ({"every": 3}, "write the whole key"),
        ({"rewards": 3}, "give a function"),
        ({"data": []}, "used up before"),
        ({"data": {"prompt": "1"}}, "give a list of rows"),
        ({"data": [3]}, "a row is a mapping"),
        ({"data": [{"prompt": {1, 2}}]}, "columns hold text"),
    ],
)
def test_what_a_trainer_cannot_use_is_said_before_anything_is_loaded(tmp_path, wrong, says):
    if says is None:
        small(tmp_path, **wrong)  # learn.eps is nearer than algorithm's
        return
    with pytest.raises(ConfigError) as refused:
        small(tmp_path, **wrong)
    assert says in f"{refused.value.message} {refused.value.remedy}"


def test_nothing_to_train_and_nothing_trained_are_told(tmp_path):
    with pytest.raises(ConfigError, match="nothing says what to train"):
        Trainer()
    with pytest.raises(TidemillError, match="nothing has been trained yet"):
        small(tmp_path).save(tmp_path / "model")


def test_a_run_whose_reward_was_a_closure_says_so_when_it_is_resumed_without_it(tmp_path):
    made = small(tmp_path, rewards=lambda sample: digits(sample), steps=2)
    made.train()
    from tidemill import imports

    imports._kept.clear()  # as in another process
    with pytest.raises(ConfigError, match="handed over as a Python object"):
        Trainer.from_run(made.folder, steps=3).train()
    assert Trainer.from_run(made.folder, rewards=lambda sample: digits(sample), steps=3).train().summary.steps == 3


def test_the_table_shows_columns_rows_and_curves():
    table = Table([{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5, "eval/accuracy": 1.0}])
    assert table["reward"].tolist() == [0.25, 0.5] and math.isnan(table["eval/accuracy"][0])
    assert table[1]["reward"] == 0.5 and len(table) == 2
    assert "<th>reward</th>" in table._repr_html_() and "2 rows × 3 metrics" in repr(table)
    assert table.plot("reward")._repr_html_().startswith("<svg")
    with pytest.raises(KeyError, match="there is no metric 'rewards'"):
        table["rewards"]
