"""The driver's side of workers: pauses that grow, names used again, waits that have an end, devices of their own."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill import device
from tidemill.algorithms.registry import get
from tidemill.cluster.driver import remote, stall, status
from tidemill.cluster.driver import worker_pool as crews
from tidemill.cluster.driver.placement import PlacementError, Post, check, place
from tidemill.cluster.driver.publish import Publisher
from tidemill.cluster.driver.remote import RemoteWorkers
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.report import Answer, WorkerReady, WorkerReport
from tidemill.cluster.start.processes import ProcessStarter
from tidemill.recipe.config import Config


class Handle:
    """A worker that answers what it can at once, and nothing else ever."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.is_dead = answers, False
        self.waiting: list[Future[Any]] = []

    def call(self, method: str, *_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method in self.answers:
            future.set_result(Answer(self.answers[method]))
        else:
            self.waiting.append(future)
        return future

    def kill(self) -> None:
        self.is_dead = True
        for future in self.waiting:
            if not future.done():
                future.set_exception(remote.WorkerLost("killed"))


class Starter:
    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def spawn(self, post: Post, logs: Path) -> Handle:
        self.handles.append(Handle({"where": ("node0", "127.0.0.1"), "stacks": "at nothing"}))
        return self.handles[-1]

    def release(self, post: Post) -> None: ...


def placed(tp: int = 1, **cluster: Any) -> Any:
    config = Config.model_validate({"cluster": cluster, "rollout": {"tp": tp}})
    return config, place(config, get("grpo").graph(config))


def crew_of(tmp_path: Path, tp: int = 1, **cluster: Any) -> WorkerPool:
    config, placement = placed(tp, **cluster)

    def equip(member: Member) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(Answer(WorkerReady(member.incarnation, "here")))
        return done

    starter: Any = Starter()
    crew = WorkerPool(config.cluster, placement, starter, tmp_path, print, equip, lambda m: None, lambda m, why: True)
    crew.start(crew.members)
    crew.wait_ready(list(crew.members))
    return crew


def test_pauses_grow_with_losses_and_begin_anew_with_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(crews, "time", SimpleNamespace(monotonic=lambda: now))  # a busy machine's pauses are its own
    crew = crew_of(tmp_path)
    member = crew.members["reward-0"]
    pauses = []
    for _ in range(4):
        crew.lose(member, "it crashed at its first sample")
        pauses.append(member.not_before - now)
        crew.again(member)
        crew.wait_ready([member.name])
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6])
    crew.step_made()
    crew.lose(member, "once more")
    assert member.not_before - now == pytest.approx(0.2) and crew.spent == 1


def test_a_worker_under_an_old_name_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, rollouts=2)
    before = crew.members["rollout-1"]
    crew.remove("rollout-1")
    assert crew.add(before.post).incarnation != before.incarnation


def test_the_ranks_of_an_engine_are_lost_together_and_counted_once(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, tp=2, rollouts=2)
    crew.lose(crew.members["rollout-3"], "ended by SIGKILL")
    assert [m.state for m in crew.of("rollout", ready=False)] == ["ready", "ready", "lost", "lost"]
    assert crew.lost_total == 1 and [m.name for m in crew.engines("rollout")] == ["rollout-0"]


def test_ranks_that_do_not_meet_start_again_together(tmp_path: Path) -> None:
    """A process joins one world in its life: asking the same ones once more could not help."""
    crew = crew_of(tmp_path, tp=2)
    handle: Any = crew.members["rollout-0"].handle
    handle.answers |= {"open_store": ("here", 1), "join_engine": None}
    with pytest.raises(remote.WorkerLost):
        Publisher(crew, -4.7, "off", lambda: None)._meet(crew.of("rollout"))
    assert [m.state for m in crew.of("rollout", ready=False)] == ["lost", "lost"] and crew.lost_total == 1


@pytest.mark.parametrize("head_start_s", [0.0, 0.4])
def test_a_worker_without_a_place_is_given_up_while_others_are_waited_for(tmp_path: Path, head_start_s: float) -> None:
    """Be it before the others' deadline, where it was started earlier, or at it."""
    crew = crew_of(tmp_path, tp=2, rollouts=2)
    crew.settings = crew.settings.model_copy(update={"start_s": 0.5})
    starter: Any = crew.starter
    member = crew.members["rollout-3"]
    crew.lose(member, "its node ended")
    starter.spawn = lambda post, logs: Handle({"stacks": ""})  # nowhere to be
    crew.again(member)
    member.since -= head_start_s
    crew.wait_ready(list(crew.members))
    assert [m.name for m in crew.of("rollout")] == ["rollout-0", "rollout-1"]


def driver(crew: WorkerPool, stall_s: float) -> RemoteWorkers:
    made = RemoteWorkers.__new__(RemoteWorkers)
    made.crew, made._lost_learner = crew, ""
    cluster = SimpleNamespace(stall_s=stall_s)
    made.config = SimpleNamespace(cluster=cluster)  # type: ignore[assignment]
    return made


def test_a_worker_that_hangs_in_its_work_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """It answers when it is watched, so that silence does not tell."""
    crew = crew_of(tmp_path)
    for name in ("learner-0", "reward-0"):
        handle: Any = crew.members[name].handle
        handle.answers["measure"] = name
    told = driver(crew, stall_s=0.3)._from_all("measure")
    assert told == {"learner-0": "learner-0", "reward-0": "reward-0"}
    assert (
        crew.members["rollout-0"].state == "lost"
        and "did not come to 'measure'" in crew.members["rollout-0"].last_error
    )


@pytest.mark.parametrize("target", [None, 0.1])
def test_a_run_that_begins_again_steers_from_the_recipes_coefficient(target: float | None) -> None:
    """Workers that stayed hold the one it was steered to, until they are told another."""
    made: Any = RemoteWorkers.__new__(RemoteWorkers)
    made.config = Config.model_validate({"algorithm": {"kl": {"coef": 0.5, "target": target}}})
    made.conductor, made._first_feed, made.kl_coef = SimpleNamespace(refeed=False), {"at": 0}, 0.9
    for name in ("_restart_learners", "new_dock", "_come_up"):
        setattr(made, name, lambda: None)
    made.rewind()
    assert made.kl_coef == (None if target is None else 0.5)
    assert made.feed_state == {"at": 0} and made.conductor.refeed


def test_the_last_rank_of_an_engine_gives_its_place_on_ray_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from tidemill.cluster.start import ray

    given_back: list[Any] = []
    monkeypatch.setattr(ray, "placement_group", lambda bundles, strategy: SimpleNamespace(bundle_specs=bundles))
    monkeypatch.setattr(ray, "remove_placement_group", given_back.append)
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))
    starter: Any = ray.RayStarter.__new__(ray.RayStarter)
    starter._groups, starter._ranks, starter._environment, starter._actor = {}, {}, {}, actor
    starter._forks = SimpleNamespace(path=tmp_path)
    _, placement = placed(tp=2, rollouts=1)
    group = placement.group("rollout")
    later = [Post(group, 2), Post(group, 3)]  # another engine, which joins
    for post in later:
        starter.spawn(post, tmp_path)
    place = starter._groups["rollout-2"]
    for post in later:  # both are lost and start again
        starter.release(post)
        starter.spawn(post, tmp_path)
    assert starter._groups["rollout-2"] is place and not given_back
    starter.release(later[0])
    assert not given_back
    starter.release(later[1])
    assert given_back == [place] and not starter._groups


def test_an_evaluation_may_take_long_but_not_stand_still(tmp_path: Path) -> None:
    crew = crew_of(tmp_path)
    member = crew.members["rollout-0"]
    began = time.monotonic()

    def pump(_: float) -> None:
        time.sleep(0.01)
        late = time.monotonic() - began
        member.report = WorkerReport("rollout-0", 0, "evaluate", late, moves=int(min(late, 0.8) * 20))

    crew.pump = pump  # type: ignore[method-assign]
    with pytest.raises(remote.WorkerLost):
        driver(crew, stall_s=0.4)._evaluated(member, 8, 1)
    assert 1.0 < time.monotonic() - began < 3.0  # tokens came for 0.8 s, and then none for 0.4 s
    assert "made no token" in member.last_error


def test_ranks_of_an_engine_wait_for_one_another_and_not_for_learners(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, tp=2)
    for name, operation in (("rollout-0", "a step"), ("rollout-1", ""), ("learner-0", "")):
        member = crew.members[name]
        member.report = WorkerReport(name, 0, "rollout", 1.0, 0, operation=operation, operation_s=9.0)
    told = status.who_waits([status.of_member(m) for m in crew.members.values()], {})
    assert told == ["rollout-0 waits in a step for rollout-1"]
    assert stall.blame(list(crew.members.values()), 5.0)[0] == "rollout-1"


@pytest.mark.parametrize(("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
def test_processes_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch, kind: str, variable: str) -> None:
    seen: dict[str, dict[str, str]] = {}
    forks: Any = SimpleNamespace(spawn=lambda name, logs, variables: seen.update({name: dict(variables)}))
    monkeypatch.setattr(device, "count", lambda: (kind, 4))
    monkeypatch.delenv(variable, raising=False)
    config = Config.model_validate({"cluster": {"learners": 2, "rollouts": 2}, "device": kind})
    starter = ProcessStarter(forks)
    nodes = starter.nodes()
    placement = place(config, get("grpo").graph(config), device.RESOURCES[kind])
    check(placement, nodes, config.cluster)
    starter.reserve(placement)
    for post in placement.posts:
        starter.spawn(post, Path())
    assert sorted(v[variable] for n, v in seen.items() if n != "reward-0") == ["0", "1", "2", "3"]
    assert seen["reward-0"] == {}
    first = dict(seen)
    starter.spawn(placement.posts[1], Path())  # started again, it has the same
    assert seen == first
    monkeypatch.setenv(variable, "7,6,5,4")  # what this process may see
    starter.spawn(placement.posts[0], Path())
    assert seen["learner-0"][variable] == "7"
    many = Config.model_validate({"cluster": {"learners": 4, "rollouts": 2}})
    with pytest.raises(PlacementError):
        check(place(many, get("grpo").graph(many), device.RESOURCES[kind]), nodes, many.cluster)


def test_one_device_is_shared_by_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: ("cuda", 1))
    config = Config.model_validate({"cluster": {"learners": 1, "rollouts": 2}})
    starter = ProcessStarter(SimpleNamespace())  # type: ignore[arg-type]
    check(place(config, get("grpo").graph(config), "GPU"), starter.nodes(), config.cluster)
