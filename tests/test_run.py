import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.check import precheck
from tidemill.errors import ConfigError, TidemillError
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe import load as recipe


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(recipe.__file__).resolve().parents[2]))
    monkeypatch.chdir(tmp_path)


def make(*overrides: str, **options) -> RunFolder:
    loaded = recipe.load({"name": "x"}, overrides)
    return RunFolder.create(loaded.config, loaded.sources, **options)


def test_a_run_opens_again_by_path_and_by_name_with_an_equal_config():
    with make("train.steps=3", "data.template={q}?\n") as run:
        config = run.config
    for where in ("runs/x", "x", Path("runs/x")):
        with RunFolder.open(where) as again:
            assert again.config == config


def test_the_readme_says_what_ran_how_to_resume_and_what_was_set():
    with make("train.steps=3", "about=adds numbers") as run:
        text = (run.path / "README.md").read_text()
        assert "adds numbers" in text
        assert "tidemill resume runs/x" in text
        assert "| `train.steps` | `3` | command line |" in text
        assert "learn.lr" not in text
        run.write_summary({"accuracy_before": 0.2, "accuracy_after": 0.9})
        assert "| accuracy_after | 0.9 |" in (run.path / "README.md").read_text()
        assert run.read_summary()["accuracy_after"] == 0.9


def test_an_older_run_of_the_name_is_moved_aside_and_nothing_is_lost():
    for number in range(3):
        with make(f"seed={number}") as run:
            (run.path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": number}) + "\n")
            expected = [None, Path("runs/x.1"), Path("runs/x.2")][number]
            assert run.moved == expected
    kept = [RunFolder.open(f"runs/{n}", exclusive=False).metrics()[0]["reward"] for n in ("x.1", "x.2", "x")]
    assert kept == [0, 1, 2]


def test_a_folder_without_a_step_is_used_again():
    for number in range(3):
        with make(f"seed={number}") as run:
            run.metrics_file.write_text(json.dumps({"step": 0, "eval/accuracy": 0.5}) + "\n")
            (run.path / "notes.txt").write_text("mine")
            assert run.moved is None
    assert [p.name for p in Path("runs").iterdir()] == ["x"] and Path("runs/x/notes.txt").exists()


def test_a_discarded_start_leaves_the_older_run_in_its_place():
    with make("seed=1") as run:
        run.metrics_file.write_text(json.dumps({"step": 1}) + "\n")
    with make("seed=2") as run:
        assert run.moved == Path("runs/x.1")
        assert run.discard() is None
    assert [p.name for p in Path("runs").iterdir()] == ["x"]
    assert RunFolder.open("runs/x").config.seed == 1


def test_a_discarded_start_keeps_the_logs_of_its_workers_once():
    for number in range(3):
        with make(f"seed={number}") as run:
            (run.path / "logs").mkdir()
            assert run.discard() == Path("runs/x.failed")
    assert [p.name for p in Path("runs").iterdir()] == ["x.failed"]


def test_a_run_that_was_moved_knows_where_it_is():
    make("train.steps=3").close()
    Path("runs/x").rename("elsewhere")
    config = RunFolder.open("elsewhere", exclusive=False).config
    assert (config.name, config.folder) == ("elsewhere", ".")


def test_settings_change_on_resuming_with_a_record_and_unsound_ones_are_refused():
    with make("train.steps=3", "data.max_prompt_tokens=64", "rollout.max_new_tokens=64") as run:
        changes = run.change(["train.steps=6", "learn.lr=1e-4"], 3, precheck.check)
        assert [str(c) for c in changes] == ["train.steps 3 → 6", "learn.lr 1e-06 → 0.0001"]
        kept = [json.loads(line) for line in (run.path / "changes.jsonl").read_text().splitlines()]
        assert next((c["after_step"], c["key"], c["from"], c["to"]) for c in kept) == (3, "train.steps", 3, 6)
        with pytest.raises(ConfigError, match=r"seed, model\.path cannot change"):
            run.change(["model.path=x", "seed=4"], 3, precheck.check)
    again = RunFolder.open("runs/x", exclusive=False).config
    assert (again.train.steps, again.learn.lr, again.seed) == (6, 1e-4, 0)


def test_without_fresh_an_older_run_is_refused():
    make().close()
    with pytest.raises(ConfigError, match="already holds a run"):
        make(fresh=False)


def test_a_missing_run_names_the_nearest():
    make("name=quickstart").close()
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        RunFolder.open("runs/quikstart")


def test_two_writers_of_one_run_are_refused_but_a_reader_is_not():
    with make():
        with pytest.raises(TidemillError, match=f"process {os.getpid()}"):
            RunFolder.open("runs/x")
        with pytest.raises(TidemillError, match="is being written"):
            make()
        assert RunFolder.open("runs/x", exclusive=False).config.name == "x"
    RunFolder.open("runs/x").close()


def test_a_killed_writer_blocks_nobody():
    code = (
        "import os, signal\n"
        "from tidemill.recipe import load as recipe; from tidemill.observe.run_folder import RunFolder\n"
        "run = RunFolder.create(recipe.load({'name': 'x'}).config)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert Path("runs/x/lock").exists()
    RunFolder.open("runs/x").close()


def test_a_killed_writers_orphan_blocks_nobody():
    code = (
        "import os, signal, time\n"
        "from tidemill.recipe import load as recipe; from tidemill.observe.run_folder import RunFolder\n"
        "run = RunFolder.create(recipe.load({'name': 'x'}).config)\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(60)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        orphan = int(process.stdout.readline())
        process.wait()
        try:
            RunFolder.open("runs/x").close()
        finally:
            os.kill(orphan, 9)


def test_truncating_drops_later_steps_and_half_written_lines():
    with make() as run:
        lines = [json.dumps({"step": s, "reward": s / 10}) for s in (1, 2, 2, 3, 4)]
        run.metrics_file.write_text("\n".join(lines) + '\n{"step": 5, "rew')
        run.samples_file.write_text('{"step": 1}\n{"st\n{"step": 2}')
        run.truncate(2)
        assert [m["step"] for m in run.metrics()] == [1, 2, 2]
        assert run.metrics_file.read_text().endswith("}\n")
        assert run.samples_file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_summary_is_replaced_at_once(monkeypatch):
    with make() as run:
        run.write_summary({"steps": 1})

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TidemillError, match="No space left on device"):
            run.write_summary({"steps": 2})
        assert run.read_summary() == {"steps": 1}
        assert not list(run.path.glob(".*.tmp"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        make()


def test_run_folders_need_no_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, tidemill.observe.run_folder; assert 'torch' not in sys.modules"], check=True
    )
