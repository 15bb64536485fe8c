"""What a new user stumbles over in the first hour, and must not: one test a stumbling block."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.faults.test_resume import RECIPE
from tidemill import show
from tidemill.cli import app, explain, main
from tidemill.data.prompts import PromptTokens
from tidemill.data.source import Example
from tidemill.device import compiled, compiling
from tidemill.errors import ConfigError, DataError, ModelError, RewardError, TidemillError
from tidemill.flow.workers import Stopped
from tidemill.models import lora
from tidemill.models.load import make_tiny, save_folder
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Data, TinyModel
from tidemill.run import start as launch
from tidemill.run.trained import export, export_adapter, open_trained
from tidemill.run.watcher import Watcher

TINY = TinyModel(**RECIPE["model"]["tiny"])
REWARDS = """
def broken(sample):
    return 1 / 0

def sometimes(sample):
    return 1 / (sample.id % 2)
"""


class Listen(Watcher):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.seen: list[str] = []

    def noted(self, message: str) -> None:
        self.said.append(message)

    def doing(self, activity: Any) -> None:
        self.seen.append(activity.what)


def recipe(folder: Path, **over: Any) -> dict[str, Any]:
    made: dict[str, Any] = {**RECIPE, "folder": str(folder / "runs")}
    made["train"] = {**RECIPE["train"], "steps": 2}
    made["eval"] = {"size": 4}
    for section, values in over.items():
        before = made.get(section, {})
        both = isinstance(before, dict) and isinstance(values, dict)
        made[section] = {**before, **values} if both else values
    return made


def rows(file: Path, count: int = 12, **columns: Any) -> str:
    made = ({"prompt": f"{i}+1=", **{k: v(i) for k, v in columns.items()}} for i in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(file)


def answer(i: int) -> str:
    return str(i + 1)


@pytest.fixture
def own_rewards(tmp_path: Path) -> str:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    return f"{tmp_path}/own_rewards.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("made")
    launch.train(recipe(folder, checkpoint={"every": 1, "keep": 3}))
    return folder / "runs" / "small"


# 1 and 2: rewards


def test_rows_without_the_column_that_the_reward_reads_are_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.models.load.make_tiny", lambda *_: pytest.fail("a model was made"))
    source = rows(tmp_path / "a.jsonl", solution=answer)
    with pytest.raises(DataError, match=r"a.jsonl:\d+: the reward 'last_number' reads the column answer") as error:
        launch.train(recipe(tmp_path, data={"source": source, "args": {}, "held_out": 2}))
    assert "data.columns.answer" in error.value.remedy and "solution" in error.value.remedy
    assert not (tmp_path / "runs").exists()


def test_the_first_failure_of_a_reward_is_shown_with_sample_and_line_while_the_run_goes_on(
    tmp_path: Path, own_rewards: str
) -> None:
    watch = Listen()
    launch.train(recipe(tmp_path, rewards=f"{own_rewards}:sometimes", eval={"size": 0}), watch=watch)
    told = [s for s in watch.said if s.startswith("a reward failed")]
    assert len(told) == 1 and "sample 0" in told[0] and "ZeroDivisionError" in told[0] and "own_rewards.py:6" in told[0]


@pytest.mark.parametrize("size", [0, 4], ids=["in the first step", "in the first evaluation"])
def test_a_run_whose_every_reward_fails_stops_and_says_why(tmp_path: Path, own_rewards: str, size: int) -> None:
    with pytest.raises(RewardError, match="every reward failed") as error:
        launch.train(recipe(tmp_path, rewards=f"{own_rewards}:broken", eval={"size": size}))
    assert "own_rewards.py:3" in error.value.message
    assert not (tmp_path / "runs" / "small").exists()


def test_a_reward_too_large_for_float32_is_a_failure_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text("def huge(sample):\n    return 1e308 if sample.id % 2 else 1.0\n")
    watch = Listen()
    launch.train(recipe(tmp_path, rewards=f"{tmp_path}/huge.py:huge", eval={"size": 0}), watch=watch)
    assert any("returned 1e+308: rewards are at most 1e+09" in said for said in watch.said)
    lines = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert all(line["reward"] is not None and line["reward_errors"] == 8 for line in lines if "loss" in line)


def test_eval_counts_rewards_that_fail_and_ends_with_one_when_all_do(made: Path, own_rewards: str) -> None:
    for function, failed, code in (("sometimes", 4, 0), ("broken", 8, 1)):
        words = ["eval", str(made), "--json", f"rewards={own_rewards}:{function}"]
        result = CliRunner().invoke(app, words)
        told = json.loads(result.stdout.splitlines()[0])
        assert told["reward_errors"] == failed and "ZeroDivisionError" in told["first_reward_error"]
        assert result.exit_code == code


# 3: markup


@pytest.mark.parametrize("text", ["pip install 'tidemill[games]'", "data.source=[a, b]", "[/] and [bold]"])
def test_square_brackets_of_messages_are_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(ConfigError(text, f"see {text}")) == 1
    told = capsys.readouterr().err
    assert told == f"error: {text}\n  → see {text}\n"


# 4 and 6


def test_evaluations_count_tokens_not_characters(made: Path) -> None:
    evaluation = launch.evaluate(made)
    assert 0 < evaluation.response_tokens <= RECIPE["rollout"]["max_new_tokens"]
    assert evaluation.response_tokens == sum(a.tokens for a in evaluation.answers) / len(evaluation.answers)


def test_nan_in_a_folder_is_called_nan(tmp_path: Path) -> None:
    loaded = make_tiny(TINY, torch.float32, 0, torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds NaN"):
        launch.train(recipe(tmp_path, model={"path": str(tmp_path / "model")}))


# 8: lengths


def test_given_responses_are_limited_counted_and_told_of(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", answer=answer, response=lambda i: "1" * (30 if i % 4 == 0 else 3))
    watch, kept = Listen(), []
    with pytest.MonkeyPatch.context() as patch:
        usual = PromptTokens.response_tokens
        patch.setattr(PromptTokens, "response_tokens", lambda *args: kept.append(len(usual(*args))) or usual(*args))
        data = {"source": source, "args": {}, "held_out": 2}
        launch.train(recipe(tmp_path, data=data, algorithm="sft", train={"samples_per_prompt": 1}), watch=watch)
    assert max(kept) == RECIPE["rollout"]["max_new_tokens"]
    assert any("of 10 responses looked at are longer" in s and "max_new_tokens=31 would" in s for s in watch.said)


# 10: Ctrl-C


def test_ctrl_c_is_heard_during_an_evaluation_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    class StopInEvaluation(Listen):
        def doing(self, activity: Any) -> None:
            if activity.what == "evaluating" and "evaluating" not in self.seen:
                os.kill(os.getpid(), signal.SIGINT)
            super().doing(activity)

    for every, size in ((0, 4), (1, 4)):
        folder = tmp_path / f"{every}"
        watch = StopInEvaluation()
        summary = launch.train(recipe(folder, eval={"size": size, "every": every, "before": not every}), watch=watch)
        assert summary.is_stopped and summary.steps == every and summary.after is None
        summary = launch.resume(folder / "runs" / "small")
        assert summary.steps == 2 and summary.after is not None and not summary.is_stopped
        lines = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "eval/accuracy" in line] == ([1, 2] if every else [0, 2])


def test_ctrl_c_is_heard_while_feeding() -> None:
    from tidemill.flow.feed import Feed
    from tidemill.models.tiny import make_tokenizer

    class Slow:
        name, size = "slow", None
        asked = 0

        def example(self, index: int) -> Example:
            self.asked += 1
            return Example("1+1=", "2")

    source, config = Slow(), recipes.load({"train": {"prompts_per_step": 1000}}).config
    feed = Feed(source, config, PromptTokens(make_tokenizer(TinyModel(alphabet="12+=")), config.data))
    feed.stop = lambda: source.asked >= 5
    with pytest.raises(Stopped):
        feed.rows()
    assert source.asked == 5 and feed.state() == {"position": 0, "groups": 0}


def test_a_stopped_run_ends_with_130_and_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps(recipe(tmp_path, observe={"progress": "plain"})))

    def interrupt(watch: show.RunWatcher, step: int, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(show.RunWatcher, "stepped", interrupt)
    monkeypatch.setattr(sys, "argv", ["tidemill", "train", str(tmp_path / "r.yaml")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert "tidemill resume" in capsys.readouterr().out
    assert (tmp_path / "runs/small/checkpoints/step-000001").is_dir()


# 14 and 15: folders


def test_a_failed_start_moves_nothing(tmp_path: Path) -> None:
    launch.train(recipe(tmp_path))
    broken = tmp_path / "model"
    loaded = make_tiny(TINY, torch.float32, 0, torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    for over in (
        {"data": {"source": "absent.jsonl"}},
        {"device": "npu"},
        {"model": {"path": str(broken)}},
        {"rewards": "exakt"},
        {"rollout": {"engine": "vllm"}},
    ):
        with pytest.raises(TidemillError):
            launch.train(recipe(tmp_path, **over))
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["small"]
    assert (tmp_path / "runs/small/checkpoints/step-000002").is_dir()


def test_a_run_works_from_anywhere_and_after_it_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    rows(home / "a.jsonl", answer=answer)
    (home / "mine_from_home.py").write_text("def one(sample):\n    return 1.0\n")
    loaded = make_tiny(TINY, torch.float32, 0, torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, home / "model")
    over = recipe(
        tmp_path, data={"source": "a.jsonl", "args": {}, "held_out": 2}, model={"path": "model", "tiny": None},
        rewards="mine_from_home:one", eval={"size": 2},
    )  # fmt: skip
    launch.train({**over, "folder": "runs", "train": {**over["train"], "steps": 1}})
    monkeypatch.chdir(away)
    shutil.move(home / "runs" / "small", away / "kept")
    for name in [n for n in sys.modules if n == "mine_from_home"]:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(home)])
    assert launch.evaluate("kept").accuracy == 1.0
    assert launch.resume("kept", overrides=["train.steps=2"]).steps == 2
    export("kept", away / "exported")
    assert (away / "exported" / "config.json").exists()


# 16: going on, with changes


def test_more_steps_and_changed_settings_continue_a_finished_run(tmp_path: Path) -> None:
    launch.train(recipe(tmp_path))
    run = tmp_path / "runs" / "small"
    watch = Listen()
    summary = launch.resume(run, watch=watch, overrides=["train.steps=4", "learn.lr=1e-3"])
    assert summary.steps == 4 and "changed: train.steps 2 → 4" in watch.said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert rates == {1: 1e-2, 2: 1e-2, 3: 1e-3, 4: 1e-3}
    kept = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
    assert [(c["after_step"], c["key"]) for c in kept] == [(2, "train.steps"), (2, "learn.lr")]


def test_a_run_is_a_model_to_start_from_by_step_and_by_best(made: Path, tmp_path: Path) -> None:
    for which in ("", "@1", "@best"):
        watch = Listen()
        over = recipe(tmp_path, model={"path": f"{made}{which}", "tiny": None}, train={"steps": 1}, name=f"from{which}")
        launch.train(over, watch=watch)
        assert any(f"model.path={made}{which}: step" in s for s in watch.said)
    first = open_trained(f"{made}@1", "cpu")
    assert first.step == 1
    with pytest.raises(TidemillError, match="no checkpoint of step 7") as error:
        open_trained(f"{made}@7", "cpu")
    assert "1, 2" in error.value.remedy


def test_export_eval_and_generate_take_a_step_or_the_best(made: Path, tmp_path: Path) -> None:
    for option in (["--step", "1"], ["--best"]):
        for words in (
            ["export", str(made), "--to", str(tmp_path / option[0])],
            ["eval", str(made), "--json"],
            ["generate", str(made), "1+1=", "--max-tokens", "2"],
        ):
            result = CliRunner().invoke(app, [*words, *option])
            assert result.exit_code == 0, result.output
    wrong = CliRunner().invoke(app, ["export", str(made), "--to", str(tmp_path / "x"), "--step", "9"])
    assert isinstance(wrong.exception, TidemillError)


def test_eval_of_a_model_folder_shows_a_few_answers(made: Path, tmp_path: Path) -> None:
    export(made, tmp_path / "model")
    (tmp_path / "r.yaml").write_text(json.dumps(recipe(tmp_path)))
    result = CliRunner().invoke(app, ["eval", str(tmp_path / "model"), "--recipe", str(tmp_path / "r.yaml")])
    assert result.exit_code == 0, result.output
    assert "problem" in result.output and "response" in result.output and ("✗" in result.output or "✓" in result.output)


# 17: exports


def test_exports_keep_the_dtype_that_the_model_began_with(tmp_path: Path) -> None:
    loaded = make_tiny(TINY, torch.bfloat16, 0, torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, tmp_path / "base")
    over = recipe(tmp_path, model={"path": str(tmp_path / "base"), "tiny": None}, learn={"lora_rank": 2})
    launch.train({**over, "train": {**over["train"], "steps": 1}})
    run = tmp_path / "runs" / "small"
    export(run, tmp_path / "same")
    export(run, tmp_path / "wide", dtype="float32")
    found = {n: next(iter(load_file(tmp_path / n / "model.safetensors").values())).dtype for n in ("same", "wide")}
    assert found == {"same": torch.bfloat16, "wide": torch.float32}
    export_adapter(run, tmp_path / "adapter")
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.parametrize("dora", [False, True])
def test_checkpoints_with_adapters_hold_what_is_learned_alone(tmp_path: Path, dora: bool) -> None:
    loaded = make_tiny(TINY, torch.float32, 0, torch.device("cpu"))
    save_folder(loaded.model, loaded.tokenizer, tmp_path / "base")
    over = recipe(
        tmp_path, model={"path": str(tmp_path / "base"), "tiny": None}, learn={"lora_rank": 1, "dora": dora, "ema": 0.5}
    )
    summary = launch.train({**over, "train": {**over["train"], "steps": 2}})
    run = tmp_path / "runs" / "small"
    names = load_file(next((run / "checkpoints" / "step-000002").glob("*.safetensors")))
    assert not any(name.startswith("model.") for name in names)
    kept = sum(t.nbytes for t in names.values())
    assert kept < sum(p.nbytes for p in loaded.model.parameters()) / 2
    again = launch.evaluate(run)
    assert summary.after is not None and [a.response for a in again.answers] == [
        a.response for a in summary.after.answers
    ]
    shutil.move(tmp_path / "base", tmp_path / "gone")
    with pytest.raises(TidemillError, match="has only adapters, and their base model cannot be opened"):
        open_trained(run, "cpu")


# 18 to 20: what is shown


def test_the_watcher_hears_what_the_run_is_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.run.interrupt.TELL_EVERY_S", 0.0)
    watch = Listen()
    launch.train(recipe(tmp_path), watch=watch)
    assert watch.seen[:2] == ["checking settings and data", "loading the model"]
    assert {"evaluating", "rolling out", "learning"} <= set(watch.seen)


def test_what_is_done_is_counted_anew_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Count(Listen):
        step, heard = 0, list[tuple[int, Any]]()

        def beginning(self, step: int) -> None:
            self.step = step

        def doing(self, activity: Any) -> None:
            self.heard.append((self.step, activity))

    monkeypatch.setattr("tidemill.run.interrupt.TELL_EVERY_S", 0.0)
    watch = Count()
    launch.train(recipe(tmp_path, train={"steps": 3}), watch=watch)
    for step in (1, 2, 3):
        rolled = [a for at, a in watch.heard if at == step and a.what == "rolling out"]
        assert rolled and all(a.total == 16 and 0 <= a.done < 16 for a in rolled), (step, rolled)
    assert all(a.done <= a.total for _, a in watch.heard), watch.heard


def test_the_version_is_shown() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("tidemill 0.")


CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


def test_prompts_of_chat_models_are_shown_as_the_users_last_message(tmp_path: Path) -> None:
    loaded = make_tiny(TINY, torch.float32, 0, torch.device("cpu"))
    loaded.tokenizer.chat_template = CHAT
    save_folder(loaded.model, loaded.tokenizer, tmp_path / "base")
    over = recipe(
        tmp_path, model={"path": str(tmp_path / "base"), "tiny": None}, data={"max_prompt_tokens": 56, "system": "add"}
    )
    summary = launch.train({**over, "train": {**over["train"], "steps": 1}})
    assert summary.after is not None and all("<|" not in a.prompt for a in summary.after.answers)
    kept = [json.loads(line) for line in (tmp_path / "runs/small/samples.jsonl").read_text().splitlines()]
    assert all("<|user|>" in sample["prompt"] for sample in kept)


def test_special_tokens_are_visible_in_samples(tmp_path: Path) -> None:
    few = {**RECIPE["model"]["tiny"], "alphabet": "0123456789+-="}
    end = make_tiny(TinyModel(**few), torch.float32, 0, torch.device("cpu")).tokenizer.eos_token
    launch.train(recipe(tmp_path, model={"tiny": few}, train={"steps": 1}, observe={"samples_per_step": 16}))
    kept = [json.loads(line) for line in (tmp_path / "runs/small/samples.jsonl").read_text().splitlines()]
    stopped = [sample for sample in kept if sample["finish"] == "stop"]
    assert stopped and all(sample["response"].endswith(end) for sample in stopped)


# 21: warm starts


def test_a_warm_start_is_found_again_by_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    warm = {**recipe(tmp_path), "algorithm": "sft", "train": {"steps": 1, "prompts_per_step": 4}, "about": "warm"}
    (tmp_path / "warm.yaml").write_text(json.dumps({**warm, "eval": {"size": 0}}))
    model = {"tiny": None, "warm_start": str(tmp_path / "warm.yaml")}

    def told(**over: Any) -> list[str]:
        watch = Listen()
        launch.train(recipe(tmp_path, model=model, eval={"size": 0}, train={"steps": 1}, **over), watch=watch)
        return [s for s in watch.said if s.startswith("warm start")]

    assert told() == ["warm start: warm"]
    assert "trained before" in told(name="other", learn={"lr": 1e-3})[0]
    assert told(name="third", seed=1) == ["warm start: warm"]
    shutil.rmtree(tmp_path / "cache")
    launch.resume(tmp_path / "runs" / "other", overrides=["train.steps=2"])


# 22: pictures


def test_runs_are_drawn_into_one_picture(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(made, tmp_path / "other")
    result = CliRunner().invoke(app, ["plot", str(made), str(tmp_path / "other"), "--to", str(tmp_path / "a.png")])
    assert result.exit_code == 0 and (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    missing = CliRunner().invoke(app, ["plot", str(made), "--to", str(tmp_path / "no" / "a.png")])
    assert isinstance(missing.exception, TidemillError)


# 23: settings


def test_environment_variables_stand_in_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    file = tmp_path / "r.yaml"
    file.write_text(
        "name: ${RUN:-mine}\ntrain: {steps: '${STEPS}'}\nlearn: {lr: ${RATE:-1e-4}}\n"
        "data: {template: 'costs $${price}'}\nfolder: ${RUN:-a}/b\n"
    )
    file.write_text(file.read_text().replace("'${STEPS}'", "${STEPS}"))
    config = recipes.load(file).config
    assert (config.name, config.train.steps, config.learn.lr, config.folder) == ("mine", 7, 1e-4, "a/b")
    assert config.data.template == "costs ${price}"
    file.write_text("a: 1\nname: ${NOWHERE_TO_BE_FOUND}\n")
    with pytest.raises(ConfigError, match=r"r.yaml:2.*NOWHERE_TO_BE_FOUND") as error:
        recipes.load(file)
    assert "NOWHERE_TO_BE_FOUND:-" in error.value.remedy


def test_the_chat_template_is_told_what_data_chat_args_says() -> None:
    loaded = make_tiny(TINY, torch.float32, 0, torch.device("cpu"))
    loaded.tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}=1{% else %}=0{% endif %}"
    texts = []
    for value in (True, False):
        tokens = PromptTokens(loaded.tokenizer, Data(chat_args={"enable_thinking": value})).encode(Example("2"))
        texts.append(loaded.tokenizer.decode(tokens))
    assert texts == ["2=1", "2=0"]


@pytest.mark.parametrize(
    ("modules", "expected"), [(("q_proj",), {"q_proj"}), (("*.mlp.*",), {"gate_proj", "up_proj", "down_proj"})]
)
def test_adapters_are_put_on_the_modules_that_are_named(modules: tuple[str, ...], expected: set[str]) -> None:
    model = make_tiny(TINY, torch.float32, 0, torch.device("cpu")).model
    lora.attach(model, 2, 4.0, modules=modules)
    assert {name.split(".")[-2] for name in lora.adapters(model)} == expected
    with pytest.raises(ModelError, match="q_projj"):
        lora.attach(make_tiny(TINY, torch.float32, 0, torch.device("cpu")).model, 2, 4.0, modules=("q_projj",))


def test_epochs_are_passes_over_the_rows(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", answer=answer)
    data = {"source": source, "args": {}, "held_out": 2}
    summary = launch.train(recipe(tmp_path, data=data, eval={"size": 2}, train={"epochs": 1.0}))
    assert summary.steps == 3  # ten rows, four a step
    with pytest.raises(ConfigError, match="endless"):
        launch.train(recipe(tmp_path, train={"epochs": 1.0}))


# What the rows lack, and what is cut


def test_rows_without_a_needed_column_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i}+1=", **({} if i in (3, 7) else {"answer": answer(i)})} for i in range(14)]
    (tmp_path / "a.jsonl").write_text("{broken\n" + "".join(json.dumps(line) + "\n" for line in lines))
    data = {"source": str(tmp_path / "a.jsonl"), "args": {}, "held_out": 2, "shuffle": False}
    with pytest.raises(DataError, match=r"a.jsonl:1: is not JSON"):
        launch.train(recipe(tmp_path, data=data))
    watch = Listen()
    summary = launch.train(recipe(tmp_path, data={**data, "on_bad_row": "skip"}, train={"epochs": 1}), watch=watch)
    assert "3 rows left out (data.on_bad_row=skip); the first: " in watch.said[0] and "a.jsonl:1:" in watch.said[0]
    assert (summary.bad_rows, summary.steps) == (3, 3)  # ten rows are left to learn from, four a step


def test_a_row_far_down_that_lacks_a_needed_column_is_named_before_the_run_starts(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{i}+1=", **({"answer": "1"} if i != 5000 else {})}) for i in range(5100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a.jsonl:5001: the reward 'last_number' reads the column answer") as error:
        launch.train(recipe(tmp_path, data={"source": str(tmp_path / "a.jsonl"), "args": {}, "held_out": 2}))
    assert "data.on_bad_row=skip" in error.value.remedy
    assert not (tmp_path / "runs").exists()


def test_pairs_without_a_rejected_response_can_be_skipped(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", answer=answer, response=answer, rejected=lambda i: None if i == 4 else "0")
    data = {"source": source, "args": {}, "held_out": 2}
    with pytest.raises(DataError, match=r"a.jsonl:5: algorithm dpo learns from the column rejected"):
        launch.train(recipe(tmp_path, data=data, algorithm="dpo"))
    over = {"algorithm": "dpo", "train": {"samples_per_prompt": 2, "steps": 1}}
    summary = launch.train(recipe(tmp_path, data={**data, "on_bad_row": "skip"}, **over))
    assert summary.bad_rows == 1


def test_responses_that_are_cut_are_counted_in_each_steps_metrics(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", answer=answer, response=lambda i: "1" * (30 if i % 2 else 3))
    data = {"source": source, "args": {}, "held_out": 0, "shuffle": False}
    train = {"samples_per_prompt": 1, "prompts_per_step": 6, "steps": 2}
    launch.train(recipe(tmp_path, data=data, algorithm="sft", train=train, eval={"size": 0}))
    lines = [json.loads(line) for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert [line["cut_responses"] for line in lines if "loss" in line] == [3, 3]


def test_ctrl_c_is_heard_while_the_answers_of_an_evaluation_are_scored(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef slow(sample):\n    time.sleep(0.2)\n    return 1.0\n")

    class StopWhileScoring(Listen):
        def doing(self, activity: Any) -> None:
            super().doing(activity)
            if activity.what == "scoring answers":
                os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    over = {"eval": {"size": 200}, "data": {"held_out": 200}, "rewards": f"{tmp_path}/slow.py:slow"}
    summary = launch.train(recipe(tmp_path, **over), watch=StopWhileScoring())
    assert summary.is_stopped and summary.steps == 0 and time.monotonic() - began < 20  # 40 s of scoring were ahead


def test_the_watcher_hears_when_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    heard: list[str] = []
    with compiling.announced(heard.append):
        made = compiled.library(source)
        again = compiled.library(source)
    assert made is not None and again is not None and made.one() == 1
    assert heard == ["compiling kernels"] and compiling.under_way() == ""


def test_torchs_own_compilations_are_announced() -> None:
    heard: list[str] = []
    compiling.follow_torch()
    with compiling.announced(lambda what: heard.append(f"{what} ({compiling.under_way()})")):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert heard == ["compiling layers (layers)"] and compiling.under_way() == ""
