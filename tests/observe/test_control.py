"""Steering: commands are checked, done once, recorded, and repeated by a resumed run."""

import json
from pathlib import Path

import pytest

from tidemill.errors import ConfigError
from tidemill.observe import control
from tidemill.observe.control import Steering, ask, command, records

TINY = {
    "name": "steered",
    "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 32}},
    "data": {"source": "arithmetic", "held_out": 4, "max_prompt_tokens": 16},
    "train": {"steps": 5, "prompts_per_step": 2, "samples_per_prompt": 2},
    "rollout": {"max_new_tokens": 6},
    "algorithm": {"name": "grpo", "kl": {"coef": 0.01}},
    "learn": {"lr": 1e-4},
    "eval": {"size": 0, "before": False, "after": False},
    "checkpoint": {"every": 2},
    "observe": {"tensorboard": False, "progress": "off"},
    "threads": 1,
}


class Loop:
    """What a loop does with steering, step by step."""

    def __init__(self, folder: Path, first: int = 0, refusal: str = "") -> None:
        self.changes: list[tuple[int, str, float]] = []
        self.done: list[str] = []
        self.step = first
        actions = {"save": lambda: self.done.append("save"), "evaluate": lambda: self.done.append("evaluate")}
        self.steering = Steering(folder, first, self._change, actions)
        self.refusal = refusal

    def _change(self, changes) -> str:
        self.changes += [(self.step, key, value) for key, value in changes.items()]
        return self.refusal

    def begin(self, step: int) -> bool:
        self.step = step
        return self.steering.begin(step)


def test_a_command_is_done_at_the_next_step_once_and_recorded(tmp_path):
    loop = Loop(tmp_path)
    assert not loop.begin(1)
    ask(tmp_path, command("set", "learn.lr", 3e-6, by="test"))
    ask(tmp_path, command("save"))
    loop.begin(2)
    loop.begin(3)
    assert loop.changes == [(2, "learn.lr", 3e-6)] and loop.done == ["save"]
    assert [(r.command.kind, r.step, r.refused) for r in records(tmp_path)] == [("set", 2, ""), ("save", 2, "")]


def test_a_resumed_run_repeats_changes_at_their_steps_and_nothing_else(tmp_path):
    loop = Loop(tmp_path)
    for step, (kind, key, value) in {
        2: ("set", "learn.lr", 1e-6),
        5: ("set", "rollout.temperature", 0.7),
        6: ("evaluate", "", 0.0),
    }.items():
        ask(tmp_path, command(kind, key, value))
        loop.begin(step)
    again = Loop(tmp_path, first=4)  # from a checkpoint between the two changes
    for step in range(5, 9):
        again.begin(step)
    assert again.changes == [(5, "learn.lr", 1e-6), (5, "rollout.temperature", 0.7)] and again.done == []
    assert len(records(tmp_path)) == 3


def test_a_refused_change_is_recorded_and_not_repeated(tmp_path):
    loop = Loop(tmp_path, refusal="there is no reference model")
    ask(tmp_path, command("set", "algorithm.kl.coef", 0.1))
    loop.begin(1)
    assert records(tmp_path)[0].refused == "there is no reference model"
    again = Loop(tmp_path)
    again.begin(1)
    assert again.changes == []


def test_stop_ends_the_run_at_the_next_step(tmp_path):
    loop = Loop(tmp_path)
    ask(tmp_path, command("stop"))
    assert loop.begin(1)


def test_a_pause_lasts_until_it_is_ended(tmp_path, monkeypatch):
    loop, looks = Loop(tmp_path), []

    def sleep(_: float) -> None:
        looks.append(control.is_paused(records(tmp_path)))
        if len(looks) == 3:
            ask(tmp_path, command("resume"))

    monkeypatch.setattr("time.sleep", sleep)
    ask(tmp_path, command("pause"))
    assert not loop.begin(1)
    assert looks == [True, True, True] and not control.is_paused(records(tmp_path))


def test_what_was_asked_of_a_dead_run_does_not_stop_the_next(tmp_path):
    ask(tmp_path, command("stop"))
    ask(tmp_path, command("pause"))
    loop = Loop(tmp_path)
    assert not loop.begin(1)
    assert {r.refused for r in records(tmp_path)} == {control.LATE}


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"kind": "stop"}', b'{"id": "a", "kind": "boom"}', b"\xff"])
def test_a_line_that_is_no_command_is_passed_over(tmp_path, line):
    (tmp_path / control.ASKED).write_bytes(line + b"\n")
    ask(tmp_path, command("save"))
    loop = Loop(tmp_path)
    loop.steering._since = 0.0
    loop.begin(1)
    assert loop.done == ["save"]


def test_a_wrong_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"learn\.lr"):
        command("set", "learn.lrr", 1.0)


# In a real run


def train(tmp_path, name: str, commands: dict[int, control.Command], steps: int = 5, interrupt: int = 0, more=()):
    from tidemill.recipe import load as recipe
    from tidemill.run import start
    from tidemill.run.watcher import Watcher

    folder = tmp_path / name

    class Steered(Watcher):
        def stepped(self, step, metrics) -> None:
            if step in commands:
                ask(folder, commands[step])
            if step == interrupt:
                raise KeyboardInterrupt

    loaded = recipe.load(TINY, [f"name={name}", f"folder={tmp_path}", f"train.steps={steps}", *more])
    try:
        start.train(loaded, watch=Steered())
    except KeyboardInterrupt:
        start.resume(folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_changed_learning_rate_is_in_the_next_steps_metrics_and_in_a_resumed_runs(tmp_path):
    changes = {2: command("set", "learn.lr", 5e-6), 3: command("set", "rollout.temperature", 0.5)}
    plain = train(
        tmp_path, "plain", {2: command("set", "learn.lr", 5e-6), 3: command("set", "rollout.temperature", 0.5)}
    )
    assert [m["lr"] for m in plain] == [1e-4, 1e-4, 5e-6, 5e-6, 5e-6]
    killed = train(tmp_path, "killed", changes, interrupt=4)  # goes on from the checkpoint of step 2
    numbers = ("reward", "loss", "entropy", "grad_norm", "lr")
    assert [[m[n] for n in numbers] for m in killed] == [[m[n] for n in numbers] for m in plain]
    unsteered = train(tmp_path, "unsteered", {})
    assert [m["entropy"] for m in unsteered][3:] != [m["entropy"] for m in plain][3:]


def test_a_kl_weight_changes_where_there_is_a_reference_and_is_refused_where_there_is_none(tmp_path):
    for name, more, refused in (("kl", (), ""), ("none", ("algorithm.kl.coef=0",), "the run has no reference model")):
        train(tmp_path, name, {1: command("set", "algorithm.kl.coef", 0.5)}, 2, more=more)
        assert [r.refused[: len(refused)] for r in records(tmp_path / name)] == [refused]
        assert bool(records(tmp_path / name)[0].refused) == bool(refused)


@pytest.mark.slow
def test_workers_in_processes_of_their_own_change_as_one_process_does(tmp_path):
    changes = {2: command("set", "learn.lr", 5e-6), 3: command("set", "rollout.temperature", 0.5)}
    one = train(tmp_path, "one", changes)
    many = train(tmp_path, "many", changes, more=("cluster.executor=processes",))
    assert [m["lr"] for m in many] == [1e-4, 1e-4, 5e-6, 5e-6, 5e-6]
    for name in ("reward", "entropy", "loss"):
        assert [m[name] for m in many] == pytest.approx([m[name] for m in one], rel=1e-4, abs=1e-5)
