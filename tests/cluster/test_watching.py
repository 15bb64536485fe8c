"""What people see of workers: logs, status, stacks; what happens to those that hang; joining and leaving."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cluster.runs import Disturb, assert_same_learning, measured, train, worker
from tidemill.cli import app
from tidemill.cluster.driver import status
from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.driver.logs import LogStream
from tidemill.errors import ConfigError, TidemillError

pytest.importorskip("msgspec")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    train(folder, cluster={"executor": "local"})
    return measured(folder)


class Stop(Disturb):
    """Stops the victim without ending it: it hangs, as in a call that never comes back."""

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.at_step and not self.killed:
            assert self.workers is not None
            self.killed.append(self.victim(self.workers))
            threading.Thread(target=self._stop, args=(self.workers, step), daemon=True).start()

    def _stop(self, workers: Driver, step: int) -> None:
        """In the middle of the next step."""
        while workers.conductor.number <= step or "rollout" not in workers.conductor.open:
            time.sleep(0.001)
        os.kill(self.killed[0], signal.SIGSTOP)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_group_starts_again(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    watch = Stop(worker("learner-1"))
    train(tmp_path, watch, cluster={"learners": 2, "stall_s": 4.0, "collective_s": 60.0})
    assert_same_learning(measured(tmp_path), local)
    assert any("learner-1" in said and "stacks" in said for said in watch.said), watch.said
    stacks = (tmp_path / "small" / "logs" / "stall-1.txt").read_text()
    assert "missing in the agreement on the step's samples" in stacks and "== learner-0" in stacks


@pytest.mark.slow
def test_a_rollout_worker_that_hangs_loses_its_samples_to_another(tmp_path: Path, local: list[dict[str, Any]]) -> None:
    watch = Stop(worker("rollout-0"))
    train(tmp_path, watch, cluster={"rollouts": 2, "stall_s": 6.0, "collective_s": 5.0})
    assert_same_learning(measured(tmp_path), local)


@pytest.mark.slow
def test_a_rank_of_an_engine_that_hangs_is_named_and_its_engine_starts_again(
    tmp_path: Path, local: list[dict[str, Any]]
) -> None:
    watch = Stop(worker("rollout-1"))
    train(tmp_path, watch, rollout={"tp": 2}, cluster={"stall_s": 4.0, "collective_s": 60.0})
    assert_same_learning(measured(tmp_path), local)
    assert any("rollout-1" in said and "stacks" in said for said in watch.said), watch.said
    assert isinstance(watch.workers, Driver)
    assert {m.restarts for m in watch.workers.pool.of("rollout", ready=False)} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_rollout_workers_join_and_leave_while_a_run_goes_on(
    tmp_path: Path, local: list[dict[str, Any]], tp: int
) -> None:
    class Scale(Disturb):
        seen: tuple[list[str], ...] = ()

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            assert self.workers is not None
            self.seen += (sorted(m.name for m in self.workers.pool.of("rollout", ready=False)),)
            status.want_rollouts(tmp_path / "small", {1: 3, 2: 3, 3: 1}.get(step, 1))
            self.workers.look()  # do not wait for the next second

    watch = Scale(worker("rollout-0"))
    train(tmp_path, watch, rollout={"tp": tp})
    assert_same_learning(measured(tmp_path), local)
    assert [len(names) for names in watch.seen] == [tp, 3 * tp, 3 * tp, tp]


def test_status_and_stacks_show_every_worker_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With py-spy, and without it by the processes' own words."""
    run = tmp_path / "small"
    told: list[str] = []
    unaided: list[str] = []

    class Look(Disturb):
        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if step == 1:
                for command in ("status", "stacks"):
                    result = CliRunner().invoke(app, [command, str(run)])
                    assert result.exit_code == 0, result.output
                    told.append(result.stdout)
            if step == 2:
                monkeypatch.setattr(status, "which", lambda _: None)
                monkeypatch.setattr(status, "_beside_python", lambda _: None)
                unaided.extend(CliRunner().invoke(app, ["stacks", str(run)]).stdout.split("== ")[1:])

    train(tmp_path, Look(worker("rollout-0")))
    assert len(unaided) == 4 and "train_loop" in unaided[0]  # the driver's own
    assert all("host.py" in text for text in unaided[1:])
    assert "rollout" in told[0].split("stage", 1)[1]  # a table of stages, however short the steps are
    assert "step 4 of 4, all steps are done" in CliRunner().invoke(app, ["status", str(run)]).stdout
    assert "has ended, and all workers with it" in CliRunner().invoke(app, ["stacks", str(run)]).stdout
    with pytest.raises(ConfigError, match="is not running"):
        status.want_rollouts(run, 2)
    for name in ("learner-0", "rollout-0", "reward-0"):
        assert name in told[0] and name in told[1]
    assert "step 1 of 4, running" in told[0]
    assert told[1].count("host.py") >= 3  # every worker's own thread
    assert "its driver has ended" not in told[0]


NOBODY = 1 << 23  # no process has a number as large


def told_by(written: float, machine: str = "elsewhere", **worker: Any) -> status.RunStatus:
    own = {"state": "ready", "host": "10.9.9.9", "node": "n1", "doing": "rollout", "for_s": 1.0, **worker}
    workers = (status.WorkerStatus(name="rollout-0", pid=NOBODY, **own),)
    return status.RunStatus(
        step=1, steps=4, open=("rollout",), since=written, written=written, where="Ray at 127.0.0.1:1", driver=NOBODY,
        machine=machine, workers=workers, ray="127.0.0.1:1", home="n0",
    )  # fmt: skip


def test_a_worker_on_another_host_that_cannot_be_reached_has_a_line_that_says_why(tmp_path: Path) -> None:
    driver, told = status.all_stacks(tmp_path, told_by(time.time()))
    assert driver == ("driver", "on elsewhere: run the command there")
    assert told[0] == f"rollout-0 (pid {NOBODY} on 10.9.9.9)"
    assert told[1].startswith("on 10.9.9.9, which cannot be reached: Ray at 127.0.0.1:1: ")
    assert "refused" in told[1]


def test_who_shares_the_drivers_node_is_looked_at_by_its_process(tmp_path: Path) -> None:
    """Whatever address the node goes by: a host's name need not resolve to it."""
    here = replace(told_by(time.time(), socket.gethostname(), node="n0"), driver=os.getpid())
    assert status.all_stacks(tmp_path, here)[1] == (f"rollout-0 (pid {NOBODY})", "the process has ended")


def test_a_driver_on_another_machine_is_judged_by_its_last_word() -> None:
    assert "running on elsewhere" in status.render(told_by(time.time()))
    assert "no report from its driver on elsewhere for 30" in status.render(told_by(time.time() - 300))


def test_a_run_without_rollout_workers_cannot_be_scaled(tmp_path: Path) -> None:
    """It would wait for a word that nobody hears."""
    found = told_by(time.time())
    status.write(tmp_path, replace(found, workers=(replace(found.workers[0], name="learner-0"),)))
    with pytest.raises(ConfigError, match="colocated with the learners"):
        status.want_rollouts(tmp_path, 2)


def test_a_worker_that_is_silent_is_shown_so() -> None:
    assert "ready, silent for 42 s" in status.render(told_by(time.time(), silent_s=42.0))
    assert "silent" not in status.render(told_by(time.time(), silent_s=2.0))


def test_one_stream_has_role_and_rank_and_counts_what_repeats(tmp_path: Path) -> None:
    stream = LogStream(tmp_path)
    for rank in range(3):
        (tmp_path / f"rollout-{rank}.log").write_text(f"Warning: 0x{rank:x} is slow\nrank {rank} only says\n")
    (tmp_path / "reward-0.log").write_text("something else\nan unfinished li")
    stream.look()
    stream.close()
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "all.log").read_text().splitlines()]
    assert "[rollout 0] Warning: 0x0 is slow" in lines and "[reward 0] something else" in lines
    assert "[all] Warning: 0x0 is slow  (and 2 times more)" in lines
    assert not any("unfinished" in line for line in lines)


def test_a_breakpoint_in_a_worker_says_what_to_do(tmp_path: Path) -> None:
    told = r"breakpoint\(\) at .*breaks.py:\d+ in (rollout|reward)-0, which has no terminal"
    with pytest.raises(TidemillError, match=told) as raised:
        train(tmp_path, rewards={"functions": [{"function": "tests.cluster.breaks:reward"}], "on_error": "fail"})
    assert "cluster.executor=local" in str(raised.value)
