"""What every dock promises, shown on the in-process one: order, groups, leases, once only, nothing kept for nobody."""

import threading

import numpy as np
import pytest

from tidemill.batch import Batch, Column
from tidemill.dock import LeaseExpired, LocalDock, Want
from tidemill.errors import DockError
from tidemill.graph import Stage

STAGES = (
    Stage("rollout", "rollout", ("prompt",), ("tokens", "logprobs")),
    Stage("reward", "reward", ("tokens",), ("reward",)),
    Stage("advantage", "actor", ("reward",), ("advantage",), scope="group"),
    Stage("learn", "actor", ("tokens", "logprobs", "advantage")),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def prompts(ids, group_size=2) -> Batch:
    ids = np.asarray(ids)
    return Batch(
        {
            "id": ids,
            "group": ids // group_size,
            "group_size": np.full(len(ids), group_size, np.int32),
            "prompt": Column.text(f"prompt {i}" for i in ids),
        }
    )


def rollout(batch: Batch, version: int = 0) -> Batch:
    lengths = batch.values("id") % 5 + 1
    tokens = Column.jagged([np.full(n, i) for n, i in zip(lengths, batch.values("id"))], np.int32)
    return Batch(
        {
            "tokens": tokens,
            "logprobs": Column.jagged([np.full(n, -1.0) for n in lengths], np.float32),
            "length": lengths.astype(np.int32),
            "version": np.full(batch.rows, version, np.int32),
        }
    )


def rewards(batch: Batch) -> Batch:
    return Batch({"reward": batch.values("id").astype(np.float32)})


def advantages(batch: Batch) -> Batch:
    return Batch({"advantage": np.zeros(batch.rows, np.float32)})


def run_stage(dock, stage, make, rows=100):
    lease = dock.take(stage, Want(rows=rows))
    lease.commit(make(lease.batch) if make else None)
    return lease.batch


def test_a_sample_passes_every_stage_once_and_leaves_nothing_behind():
    dock = LocalDock(STAGES, source=("prompt",))
    dock.put(prompts(range(4)))
    assert list(run_stage(dock, "rollout", rollout)["prompt"]) == [f"prompt {i}" for i in range(4)]
    assert dock.take("learn", Want(rows=4)) is None
    run_stage(dock, "reward", rewards)
    run_stage(dock, "advantage", advantages)
    batch = run_stage(dock, "learn", None)
    assert batch.values("id").tolist() == [0, 1, 2, 3]
    assert [row.tolist() for row in batch["tokens"]] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    assert batch.values("length").tolist() == [1, 2, 3, 4]
    state = dock.state()
    assert (state.rows, state.bytes, state.ended) == (0, 0, 4)
    assert all(counts.done == 4 and counts.ready == 0 for counts in state.stages.values())


def test_putting_an_id_again_changes_nothing_even_after_it_left():
    dock = LocalDock(STAGES[:1])
    dock.put(prompts([7, 8]))
    dock.put(prompts([8, 7]))
    assert run_stage(dock, "rollout", rollout).values("id").tolist() == [7, 8]
    dock.put(prompts([7, 8]))
    assert dock.take("rollout", Want(rows=1)) is None and dock.state().bytes == 0


def test_a_group_stage_gets_only_complete_groups():
    dock = LocalDock(STAGES)
    dock.put(prompts(range(4), group_size=4))
    run_stage(dock, "rollout", rollout)
    lease = dock.take("reward", Want(rows=3))
    lease.commit(rewards(lease.batch))
    assert dock.take("advantage", Want(groups=1)) is None
    run_stage(dock, "reward", rewards)
    assert dock.take("advantage", Want(groups=1)).batch.rows == 4


def test_a_group_may_arrive_in_several_puts():
    dock = LocalDock(STAGES[2:3], group_size=3)
    for i in range(3):
        assert dock.take("advantage", Want(groups=1)) is None
        dock.put(Batch({"id": np.array([i]), "group": np.array([5]), "reward": np.array([0.5], np.float32)}))
    assert dock.take("advantage", Want(groups=1)).batch.values("id").tolist() == [0, 1, 2]


def test_group_size_may_come_with_the_want():
    dock = LocalDock(STAGES[2:3])
    dock.put(Batch({"id": np.arange(4), "group": np.arange(4) // 2, "reward": np.zeros(4, np.float32)}))
    with pytest.raises(DockError, match="how many rows a group has"):
        dock.take("advantage", Want(groups=9))
    assert dock.take("advantage", Want(groups=9, group_size=2)).batch.rows == 4


def test_dropped_rows_are_no_longer_expected_in_their_group():
    dock = LocalDock(STAGES)
    dock.put(prompts(range(4), group_size=4))
    run_stage(dock, "rollout", rollout)
    lease = dock.take("reward", Want(rows=4))
    lease.commit(rewards(lease.batch), drop=[1, 2])
    assert dock.take("advantage", Want(groups=1)).batch.values("id").tolist() == [0, 3]
    assert dock.state().dropped == 2


def test_a_row_dropped_while_another_stage_holds_it_ends_there():
    stages = (Stage("a", "r", ("x",), ("y",)), Stage("b", "r", ("x",), ("z",)), Stage("c", "r", ("y", "z")))
    dock = LocalDock(stages)
    dock.put(Batch({"id": np.arange(2), "group": np.arange(2), "x": np.ones(2)}))
    a, b = dock.take("a", Want(rows=2)), dock.take("b", Want(rows=2))
    a.commit(Batch({"y": np.ones(2)}), drop=[0])
    b.commit(Batch({"z": np.arange(2.0)}))
    assert dock.take("c", Want(rows=2)).batch.values("z").tolist() == [1.0]
    assert dock.state().rows == 1


def test_expired_lease_is_given_out_again_and_its_late_commit_refused():
    clock = Clock()
    dock = LocalDock(STAGES, lease_s=10, clock=clock)
    dock.put(prompts(range(2)))
    late = dock.take("rollout", Want(rows=2))
    assert dock.take("rollout", Want(rows=2)) is None
    clock.now = 11
    again = dock.take("rollout", Want(rows=2))
    with pytest.raises(LeaseExpired):
        late.commit(rollout(late.batch))
    again.commit(rollout(again.batch))
    assert dock.state().stages["reward"].ready == 2 and dock.state().expired == 1


def test_renewed_lease_lives_on():
    clock = Clock()
    dock = LocalDock(STAGES, lease_s=10, clock=clock)
    dock.put(prompts(range(2)))
    lease = dock.take("rollout", Want(rows=2))
    clock.now = 9
    lease.renew()
    clock.now = 18
    lease.commit(rollout(lease.batch))
    assert dock.state().stages["rollout"].done == 2


def test_abandoned_rows_come_back_first_in_line():
    dock = LocalDock(STAGES)
    dock.put(prompts(range(6)))
    lease = dock.take("rollout", Want(rows=2))
    lease.abandon()
    lease.abandon()
    assert dock.take("rollout", Want(rows=3)).batch.values("id").tolist() == [0, 1, 2]


def test_committing_twice_is_the_same_as_once():
    dock = LocalDock(STAGES)
    dock.put(prompts(range(2)))
    lease = dock.take("rollout", Want(rows=2))
    lease.commit(rollout(lease.batch))
    lease.commit(rollout(lease.batch))
    assert dock.state().stages["rollout"].done == 2 and dock.state().stages["reward"].ready == 2


def test_token_budget_and_at_least_are_honoured():
    dock = LocalDock((Stage("learn", "actor", ("x",)),))
    ids = np.arange(6)
    dock.put(Batch({"id": ids, "group": ids, "length": np.array([5, 5, 5, 50, 1, 1]), "x": ids}))
    assert dock.take("learn", Want(rows=9, at_least=7)) is None
    assert dock.take("learn", Want(tokens=12)).batch.values("id").tolist() == [0, 1]
    assert dock.take("learn", Want(tokens=12)).batch.values("id").tolist() == [2]
    assert dock.take("learn", Want(tokens=12)).batch.values("id").tolist() == [3]
    assert dock.take("learn", Want(tokens=12)).batch.values("id").tolist() == [4, 5]


def test_ranks_share_one_decision_balanced_by_length():
    dock = LocalDock((Stage("learn", "actor", ("x",)),))
    ids = np.arange(8)
    dock.put(Batch({"id": ids, "group": ids, "length": np.array([8, 7, 6, 5, 4, 3, 2, 1]), "x": ids}))
    parts = [dock.take("learn", Want(rows=8, rank=rank, ranks=2)).batch for rank in (1, 0)]
    assert sorted(np.concatenate([part.values("id") for part in parts])) == list(range(8))
    assert [int(part.values("length").sum()) for part in parts] == [18, 18]
    assert dock.take("learn", Want(rows=8, rank=0, ranks=2)) is None


def test_a_rank_for_which_nothing_is_left_gets_a_lease_of_no_rows():
    dock = LocalDock((Stage("learn", "actor", ("x",)),))
    ids = np.arange(2)
    dock.put(Batch({"id": ids, "group": ids, "length": np.array([50, 50]), "x": ids}))
    leases = [dock.take("learn", Want(tokens=10, rank=rank, ranks=2)) for rank in range(2)]
    assert sorted(lease.batch.rows for lease in leases) == [0, 1]
    for lease in leases:
        lease.commit()
    assert dock.state().rows == 1 and dock.state().stages["learn"].leased == 0


def test_a_want_that_nothing_could_ever_meet_is_refused():
    dock = LocalDock(STAGES)
    for want in (Want(rows=2, at_least=3), Want(rows=1, ranks=2)):
        with pytest.raises(DockError, match="can never have"):
            dock.take("rollout", want, wait=60)
    with pytest.raises(DockError, match=r"raise want\.groups to 2"):
        dock.take("advantage", Want(groups=1, ranks=2))


def test_oldest_version_first_and_tags():
    dock = LocalDock((Stage("learn", "actor", ("x",)),))
    for i, version in enumerate([3, 1, 2, 1]):
        rows = Batch({"id": np.array([i]), "group": np.array([i]), "version": np.array([version]), "x": np.array([i])})
        dock.put(rows, tag="even" if i % 2 == 0 else "odd")
    assert dock.take("learn", Want(rows=2, tag="odd", sampler="oldest")).batch.values("id").tolist() == [1, 3]
    assert dock.take("learn", Want(rows=4, sampler="oldest")).batch.values("id").tolist() == [2, 0]


def test_groups_whose_rewards_do_not_differ_are_dropped_without_being_read():
    dock = LocalDock(STAGES[2:3])
    reward = np.array([1, 1, 0, 1, 0, 0], np.float32)
    size = np.full(6, 2, np.int32)
    dock.put(Batch({"id": np.arange(6), "group": np.arange(6) // 2, "group_size": size, "reward": reward}))
    lease = dock.take("advantage", Want(groups=3, sampler="differing"))
    assert lease.batch.values("id").tolist() == [2, 3]
    assert dock.state().dropped == 4 and dock.state().rows == 2


def test_too_old_rows_are_dropped_or_made_again():
    for policy, left in (("drop", 0), ("requeue", 2)):
        dock = LocalDock(STAGES, max_staleness=1, stale=policy)
        dock.put(prompts(range(2)))
        run_stage(dock, "rollout", rollout)
        run_stage(dock, "reward", rewards)
        dock.advance(1)
        assert dock.state().stages["advantage"].ready == 2
        dock.advance(2)
        state = dock.state()
        assert state.stages["advantage"].ready == 0 and state.stages["rollout"].ready == left
        assert state.stale == 2 and state.rows == left
        if left:
            run_stage(dock, "rollout", lambda batch: rollout(batch, version=2))
            assert run_stage(dock, "reward", rewards).values("version").tolist() == [2, 2]


def test_a_take_that_waits_is_woken_by_the_put_that_satisfies_it():
    dock = LocalDock(STAGES)
    got = []
    thread = threading.Thread(target=lambda: got.append(dock.take("rollout", Want(rows=2, at_least=2), wait=30)))
    thread.start()
    dock.put(prompts([0], group_size=1))
    dock.put(prompts([1], group_size=1))
    thread.join(timeout=10)
    assert got[0].batch.rows == 2


def test_a_take_that_waits_is_woken_when_a_lease_runs_out():
    dock = LocalDock(STAGES, lease_s=0.05)
    dock.put(prompts(range(2)))
    dock.take("rollout", Want(rows=2))
    assert dock.take("rollout", Want(rows=2), wait=10).batch.rows == 2


def test_a_waiter_whose_want_turns_out_wrong_hears_of_it_and_not_the_producer():
    dock = LocalDock(STAGES[2:3])
    heard = []

    def wait():
        try:
            dock.take("advantage", Want(groups=1), wait=30)
        except DockError as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not dock.state().stages["advantage"].waiting:
        pass
    dock.put(Batch({"id": np.array([0]), "group": np.array([0]), "reward": np.zeros(1, np.float32)}))
    thread.join(10)
    assert "how many rows a group has" in heard[0] and dock.state().rows == 1


def test_a_full_dock_makes_the_producer_wait():
    dock = LocalDock((Stage("learn", "actor", ("x",)),), max_rows=2)

    def put(i):
        dock.put(Batch({"id": np.array([i]), "group": np.array([i]), "x": np.array([i])}))

    put(0)
    put(1)
    thread = threading.Thread(target=put, args=(2,))
    thread.start()
    while not dock.state().puts_waiting:
        pass
    dock.take("learn", Want(rows=1)).commit()
    thread.join(timeout=10)
    assert dock.state().rows == 2 and dock.state().put_wait_s > 0


def test_threads_consume_each_row_once():
    dock = LocalDock(STAGES[:1])
    seen = []

    def consume():
        while (lease := dock.take("rollout", Want(rows=3), wait=0.3)) is not None:
            seen.extend(lease.batch.values("id").tolist())
            lease.commit(rollout(lease.batch))

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for start in range(0, 300, 10):
        dock.put(prompts(range(start, start + 10)))
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(seen) == list(range(300))


def test_what_the_producer_does_to_its_arrays_afterwards_is_not_seen():
    dock = LocalDock((Stage("learn", "actor", ("x",)),))
    x = np.zeros(1)
    dock.put(Batch({"id": np.array([0]), "group": np.array([0]), "x": x}))
    x[:] = 1
    batch = dock.take("learn", Want(rows=1)).batch
    assert batch.values("x")[0] == 0 and not batch.values("x").flags.writeable


def test_mistakes_are_named():
    dock = LocalDock(STAGES, source=("prompt",))
    with pytest.raises(DockError, match="lack prompt"):
        dock.put(Batch({"id": np.arange(1), "group": np.arange(1)}))
    with pytest.raises(DockError, match="did you mean rollout"):
        dock.take("rolout", Want(rows=1))
    with pytest.raises(DockError, match="did you mean fifo"):
        dock.take("rollout", Want(rows=1, sampler="fif"))
    dock.put(prompts(range(2)))
    lease = dock.take("rollout", Want(rows=2))
    with pytest.raises(DockError, match="writes logprobs"):
        lease.commit(Batch({"tokens": np.zeros(2)}))
    with pytest.raises(DockError, match="group 0 has 2 rows"):
        dock.put(Batch({"id": np.array([9]), "group": np.array([0]), "prompt": Column.text(["x"])}))
