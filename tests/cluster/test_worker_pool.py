"""The driver's side of workers: pauses that grow, names used again, waits that have an end, devices of their own."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill import device
from tidemill.algorithms.shared.registry import get
from tidemill.cluster.commands import Request, WorkerCommands, request
from tidemill.cluster.driver import stall, status
from tidemill.cluster.driver.answers import Answers
from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.driver.evaluation import evaluated
from tidemill.cluster.driver.placement import PlacementError, check
from tidemill.cluster.driver.publish import Publisher
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.report import Answer, WorkerReady, WorkerReport
from tidemill.cluster.start.handle import Elsewhere, WorkerLost
from tidemill.cluster.start.processes import ProcessStarter
from tidemill.cluster.wiring import Post, wire
from tidemill.recipe.config import Config


class Handle:
    """A worker that answers what it can at once, and nothing else ever."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.is_dead = answers, False
        self.waiting: list[Future[Any]] = []

    def call(self, asked: Request[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if asked.name in self.answers:
            future.set_result(Answer(self.answers[asked.name]))
        else:
            self.waiting.append(future)
        return future

    def kill(self) -> None:
        self.is_dead = True
        for future in self.waiting:
            if not future.done():
                future.set_exception(WorkerLost("killed"))


class Starter(Elsewhere):
    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def spawn(self, post: Post, logs: Path) -> Handle:
        self.handles.append(Handle({"where": ("node0", "127.0.0.1"), "stacks": "at nothing"}))
        return self.handles[-1]

    def release(self, post: Post) -> None: ...


def placed(tp: int = 1, **cluster: Any) -> Any:
    config = Config.model_validate({"cluster": {"executor": "processes", **cluster}, "rollout": {"tp": tp}})
    return config, wire(config, get("grpo").graph(config))


def pool_of(tmp_path: Path, tp: int = 1, **cluster: Any) -> WorkerPool:
    config, wiring = placed(tp, **cluster)

    def build(member: Member) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(Answer(WorkerReady(member.incarnation, "here")))
        return done

    starter: Any = Starter()
    pool = WorkerPool(config.cluster, wiring, starter, tmp_path, print, build, lambda m: None, lambda m, why: True)
    pool.start(pool.members)
    pool.wait_ready(list(pool.members))
    return pool


def test_pauses_grow_with_losses_and_begin_anew_with_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(Starter, "now", lambda self: now)
    pool = pool_of(tmp_path)
    member = pool.members["reward-0"]
    pauses = []
    for _ in range(4):
        pool.lose(member, "it crashed at its first sample")
        pauses.append(member.not_before - now)
        pool.again(member)
        pool.wait_ready([member.name])
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6])
    pool.step_made()
    pool.lose(member, "once more")
    assert member.not_before - now == pytest.approx(0.2) and pool.spent == 1


def test_a_worker_under_an_old_name_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, rollouts=2)
    before = pool.members["rollout-1"]
    pool.remove("rollout-1")
    assert pool.add(before.post).incarnation != before.incarnation


def test_the_ranks_of_an_engine_are_lost_together_and_counted_once(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, tp=2, rollouts=2)
    pool.lose(pool.members["rollout-3"], "ended by SIGKILL")
    assert [m.state for m in pool.of("rollout", ready=False)] == ["ready", "ready", "lost", "lost"]
    assert pool.lost_total == 1 and [m.name for m in pool.engines("rollout")] == ["rollout-0"]


def test_ranks_that_do_not_meet_start_again_together(tmp_path: Path) -> None:
    """A process joins one world in its life: asking the same ones once more could not help."""
    pool = pool_of(tmp_path, tp=2)
    handle: Any = pool.members["rollout-0"].handle
    handle.answers |= {"open_store": ("here", 1), "join_engine": None}
    with pytest.raises(WorkerLost):
        publisher = Publisher(pool, Config(), lambda: None)
        publisher.timeout_s = -4.7
        publisher._meet(pool.of("rollout"))
    assert [m.state for m in pool.of("rollout", ready=False)] == ["lost", "lost"] and pool.lost_total == 1


@pytest.mark.parametrize("head_start_s", [0.0, 0.4])
def test_a_worker_without_a_place_is_given_up_while_others_are_waited_for(tmp_path: Path, head_start_s: float) -> None:
    """Be it before the others' deadline, where it was started earlier, or at it."""
    pool = pool_of(tmp_path, tp=2, rollouts=2)
    pool.settings = pool.settings.model_copy(update={"start_s": 0.5})
    starter: Any = pool.starter
    member = pool.members["rollout-3"]
    pool.lose(member, "its node ended")
    starter.spawn = lambda post, logs: Handle({"stacks": ""})  # nowhere to be
    pool.again(member)
    member.since -= head_start_s
    pool.wait_ready(list(pool.members))
    assert [m.name for m in pool.of("rollout")] == ["rollout-0", "rollout-1"]


def driver(pool: WorkerPool, stall_s: float) -> Driver:
    made = Driver.__new__(Driver)
    made.tell = lambda activity: None
    made.pool, made.starter, made._lost_learner = pool, pool.starter, ""
    cluster = SimpleNamespace(stall_s=stall_s)
    made.config = SimpleNamespace(cluster=cluster)  # type: ignore[assignment]
    return made


def test_a_worker_that_hangs_in_its_work_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """It answers when it is watched, so that silence does not tell."""
    pool = pool_of(tmp_path)
    for name in ("learner-0", "reward-0"):
        handle: Any = pool.members[name].handle
        handle.answers["measure"] = name
    told = driver(pool, stall_s=0.3)._from_all(request(WorkerCommands.measure))
    assert told == {"learner-0": "learner-0", "reward-0": "reward-0"}
    assert (
        pool.members["rollout-0"].state == "lost"
        and "did not come to 'measure'" in pool.members["rollout-0"].last_error
    )


@pytest.mark.parametrize("target", [None, 0.1])
def test_a_run_that_begins_again_steers_from_the_recipes_coefficient(target: float | None) -> None:
    """Workers that stayed hold the one it was steered to, until they are told another."""
    made: Any = Driver.__new__(Driver)
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
    _, wiring = placed(tp=2, rollouts=1)
    group = wiring.group("rollout")
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
    pool = pool_of(tmp_path)
    member = pool.members["rollout-0"]
    began = time.monotonic()

    def pump(_: float) -> None:
        time.sleep(0.01)
        late = time.monotonic() - began
        member.report = WorkerReport("rollout-0", 0, "evaluate", late, moves=int(min(late, 0.8) * 20))

    pool.pump = pump  # type: ignore[method-assign]
    with pytest.raises(WorkerLost):
        evaluated(driver(pool, stall_s=0.4), member, 8, 1)
    assert 1.0 < time.monotonic() - began < 3.0  # tokens came for 0.8 s, and then none for 0.4 s
    assert "made no token" in member.last_error


def test_ranks_of_an_engine_wait_for_one_another_and_not_for_learners(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, tp=2)
    for name, operation in (("rollout-0", "a step"), ("rollout-1", ""), ("learner-0", "")):
        member = pool.members[name]
        member.report = WorkerReport(name, 0, "rollout", 1.0, 0, operation=operation, operation_s=9.0)
    told = status.who_waits([status.of_member(m) for m in pool.members.values()], {})
    assert told == ["rollout-0 waits in a step for rollout-1"]
    assert stall.blame(list(pool.members.values()), 5.0)[0] == "rollout-1"


@pytest.mark.parametrize(("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
def test_processes_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch, kind: str, variable: str) -> None:
    seen: dict[str, dict[str, str]] = {}
    forks: Any = SimpleNamespace(spawn=lambda name, logs, variables: seen.update({name: dict(variables)}))
    monkeypatch.setattr(device, "count", lambda: (kind, 4))
    monkeypatch.delenv(variable, raising=False)
    config = Config.model_validate({"cluster": {"executor": "processes", "learners": 2, "rollouts": 2}, "device": kind})
    starter = ProcessStarter(forks)
    nodes = starter.nodes()
    wiring = wire(config, get("grpo").graph(config), device.RESOURCES[kind])
    check(wiring, nodes, config.cluster)
    starter.reserve(wiring)
    for post in wiring.posts:
        starter.spawn(post, Path())
    assert sorted(v[variable] for n, v in seen.items() if n != "reward-0") == ["0", "1", "2", "3"]
    assert seen["reward-0"] == {}
    first = dict(seen)
    starter.spawn(wiring.posts[1], Path())  # started again, it has the same
    assert seen == first
    monkeypatch.setenv(variable, "7,6,5,4")  # what this process may see
    starter.spawn(wiring.posts[0], Path())
    assert seen["learner-0"][variable] == "7"
    many = Config.model_validate({"cluster": {"executor": "processes", "learners": 4, "rollouts": 2}})
    with pytest.raises(PlacementError):
        check(wire(many, get("grpo").graph(many), device.RESOURCES[kind]), nodes, many.cluster)


def test_one_device_is_shared_by_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: ("cuda", 1))
    config = Config.model_validate({"cluster": {"executor": "processes", "learners": 1, "rollouts": 2}})
    starter = ProcessStarter(SimpleNamespace())  # type: ignore[arg-type]
    check(wire(config, get("grpo").graph(config), "GPU"), starter.nodes(), config.cluster)


class Counted(Future[Any]):
    """A future that counts how often it was looked at."""

    looks = 0

    def done(self) -> bool:
        Counted.looks += 1
        return super().done()


def test_an_answer_of_many_is_looked_at_once() -> None:
    futures = {f"worker-{i}": Counted() for i in range(200)}
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers = Answers(dict(futures), events)
    Counted.looks = 0
    for i, future in enumerate(futures.values()):
        assert not answers.are_in
        future.set_result(Answer(i))
    assert answers.are_in and [f.result().value for _, f in answers.found()] == list(range(200))
    assert Counted.looks <= 2 * len(futures) and events.qsize() == len(futures)


def test_one_future_may_answer_for_many_and_a_failure_comes_first() -> None:
    shared, lost, late = (Future[Any]() for _ in range(3))
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers = Answers({"a": shared, "b": shared, "c": late, "d": lost}, events)
    shared.set_result(Answer(1))
    assert not answers.are_in and events.qsize() == 1
    lost.set_exception(WorkerLost("gone"))
    assert answers.are_in and answers.missing() == ["c"]
    assert [name for name, _ in answers.found()] == ["d", "a", "b"]
