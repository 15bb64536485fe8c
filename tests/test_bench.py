import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import tidemill
from tidemill import bench
from tidemill.errors import ConfigError

MODULE = """
ABOUT = "counts sheep"
OPTIONS = {"sheep": 3}
PEERS = {"dog": "json", "wolf": "not_a_module"}

def run(options):
    print("a library chats")
    result = {"sheep_per_s": {"median": 1000.0 * options["sheep"], "spread": 0.1, "runs": [1.0]}, "legs": 4}
    return {**result, "peers": {p: {"sheep_per_s": {"median": 1500.0}, "legs": 4} for p in options["peers"]}}
"""


@pytest.fixture
def sheep(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "sheep.py").write_text(MODULE)
    monkeypatch.setattr(bench, "folder", lambda: tmp_path / "benchmarks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {k: v for k, v in sys.modules.items() if k.split(".")[0] == "benchmarks"}
    for name in before:
        del sys.modules[name]
    yield
    for name in [k for k in sys.modules if k.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_benchmarks_are_listed_with_what_they_are_about(sheep):
    assert bench.listing() == [("sheep", "counts sheep")]


def test_a_name_of_pythons_library_is_kept_in_a_file_with_an_underscore(sheep, tmp_path):
    (tmp_path / "benchmarks" / "math_.py").write_text(MODULE)
    assert [name for name, _ in bench.listing()] == ["math", "sheep"]
    assert bench.run("math", {"sheep": 5})["bench"] == "math"


def test_a_result_carries_options_machine_and_versions(sheep):
    result = bench.run("sheep", {"sheep": 5})
    assert result["bench"] == "sheep"
    assert result["sheep_per_s"]["median"] == 5000
    assert result["options"] == {"repeats": 3, "peers": [], "sheep": 5}
    assert result["machine"]["cores"] >= 1
    assert "python" in result["versions"]


def test_peers_have_the_same_keys_and_missing_ones_are_named_with_the_command(sheep):
    result = bench.run("sheep", {"peers": ["dog", "wolf"]})
    assert result["peers"].keys() == {"dog"}
    assert result["peers"]["dog"].keys() == {"sheep_per_s", "legs"}
    assert result["missing_peers"] == {"wolf": "pip install 'tidemill[peers]'"}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("shep", {}, "did you mean sheep"),
        ("sheep", {"shep": 1}, "no option 'shep'; did you mean sheep"),
        ("sheep", {"peers": ["dgo"]}, "no peer 'dgo'; did you mean dog"),
    ],
)
def test_misspelt_names_are_refused_with_the_nearest(sheep, name, options, words):
    with pytest.raises(ConfigError, match=words):
        bench.run(name, options)


def test_the_table_shows_every_measure_its_peer_and_the_ratio(sheep):
    screen = io.StringIO()
    Console(file=screen, width=100).print(bench.render(bench.run("sheep", {"peers": ["dog", "wolf"]})))
    shown = screen.getvalue()
    assert "3,000 ± 5 %" in shown
    assert "1,500" in shown
    assert "2.00×" in shown
    assert "wolf is not installed: pip install" in shown


def test_repeats_give_median_spread_and_every_run():
    values = iter([9.0, 1.0, 3.0, 2.0])
    assert bench.repeat(lambda: next(values), 3, warmup=1) == {"median": 2.0, "spread": 1.0, "runs": [1.0, 3.0, 2.0]}
    assert bench.repeat(lambda: {"a": 1, "b": 2}, 2)["b"]["runs"] == [2.0, 2.0]
    assert 0 < bench.repeat(lambda: None, 1)["median"] < 1


def test_options_of_the_command_line_are_yaml():
    assert bench.parse_options(["a=1", "--b=[x, y]", "c=1e-3"]) == {"a": 1, "b": ["x", "y"], "c": 1e-3}
    with pytest.raises(ConfigError):
        bench.parse_options(["a"])


def test_with_json_one_object_is_all_there_is_on_standard_output():
    code = (
        "import os; from tidemill import bench\n"
        "with bench.only_result_on_stdout():\n"
        "    print('python chats'); os.write(1, b'C chats\\n')\n"
        "    result = bench.run('checkpoint', {'megabytes': 1, 'repeats': 1, 'peers': ['torch']})\n"
        "print(bench.as_json(result))\n"
    )
    root = Path(bench.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )
    result = json.loads(done.stdout)
    assert "C chats" in done.stderr and "python chats" in done.stderr
    assert result["save_gb_per_s"]["median"] > 0
    assert result["peers"]["torch"]["save_gb_per_s"]["median"] > 0


def test_a_peer_runs_without_what_importing_tidemill_set_but_with_what_the_user_set(monkeypatch):
    for name, value in tidemill.OPENMP.items():
        monkeypatch.setenv(name, value)
    assert not tidemill.OPENMP.keys() & bench.peer_environment().keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert bench.peer_environment()["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_peer_of_the_step_loads_torch_before_tidemill():
    code = "import sys, benchmarks.step; sys.exit('tidemill' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_bench_control_solves_several_tasks_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import control

    def solved(*words: object) -> dict[str, object]:
        return {"seconds": float(words[-2]) + 1.0, "steps": 10, "solved": True}  # type: ignore[arg-type]

    monkeypatch.setattr(control, "solved_by_us", solved)
    monkeypatch.setattr(control, "solved_by_peer", solved)
    options = {**control.OPTIONS, "tasks": ["cartpole", "pendulum"], "seeds": [0, 1, 2], "sb3": "python"}
    ours, peer = control.solve(options)
    each = {"0": 1.0, "1": 2.0, "2": 3.0}
    assert ours["seconds"] == peer["seconds"] == {"cartpole": each, "pendulum": each}
    assert ours["pendulum_median_seconds"] == 2.0
    assert ours["sb3_seconds_over_ours"] == {"cartpole": 1.0, "pendulum": 1.0}
