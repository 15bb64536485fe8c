"""The same on Ray: one node, two nodes, and what is left when processes or a node are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import (
    Disturb,
    assert_same,
    assert_same_learning,
    measured,
    stopped_in_evaluation,
    stopped_while_feeding,
    train,
    worker,
)
from tidemill.cluster.driver import status
from tidemill.cluster.driver.driver import Driver
from tidemill.cluster.driver.placement import PlacementError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tidemill[cluster]'")
pytest.importorskip("msgspec")
pytestmark = pytest.mark.slow  # every worker imports torch anew

STEPS = {"steps": 3}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    train(folder, train=STEPS, cluster={"executor": "local"})
    return measured(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine: raylets of their own, for these tests alone."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="tm-")
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray notes there which cluster is the newest, wherever that has its files
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    head = {"num_cpus": 5, "temp_dir": folder, "ray_client_server_port": port, **small}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.client = f"ray://127.0.0.1:{port}"  # type: ignore[attr-defined]
    made.second = made.add_node(num_cpus=2, **small)  # type: ignore[attr-defined]
    ray.init(address=made.address, log_to_driver=False, logging_level="error", configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def over(**more: Any) -> dict[str, Any]:
    return {"executor": "ray", "learners": 2, "rollouts": 2, "start_s": 120.0, "stall_s": 20.0, **more}


def test_one_node_computes_what_one_process_does(tmp_path: Path, local: list[dict[str, Any]], cluster: Any) -> None:
    train(tmp_path, train=STEPS, cluster=over(rollouts=1))
    assert_same(measured(tmp_path), local)


def test_ctrl_c_ends_an_evaluation_on_ray_and_the_watcher_hears_what_workers_do(tmp_path: Path, cluster: Any) -> None:
    watch = stopped_in_evaluation(tmp_path, cluster=over(learners=1, rollouts=1))
    assert {"loading the model", "rolling out", "learning", "scoring answers"} <= set(watch.seen)


def test_ctrl_c_is_heard_while_an_actor_feeds(tmp_path: Path, cluster: Any) -> None:
    stopped_while_feeding(tmp_path, cluster=over(learners=1, rollouts=1))


def test_colocated_actors_take_turns_with_the_memory_and_compute_the_same(
    tmp_path: Path, local: list[dict[str, Any]], cluster: Any
) -> None:
    train(tmp_path, train=STEPS, flow={"hand_over": "all"}, cluster=over(placement="colocated"))
    assert_same(measured(tmp_path), local)
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["handed_over/state_bytes"] > 0 for line in lines if line["step"] > 1 and "loss" in line)


@pytest.mark.parametrize("parallel", [{"fsdp": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_a_learner_cut_over_two_actors_computes_what_one_process_does_also_when_one_is_killed(
    tmp_path: Path, local: list[dict[str, Any]], cluster: Any, parallel: dict[str, int]
) -> None:
    watch = Disturb(worker("learner-1")) if "fsdp" in parallel else None
    train(tmp_path, watch, train=STEPS, learn={"parallel": parallel}, cluster=over(spread=watch is None))
    found = measured(tmp_path)
    if watch is None:
        assert_same(found, local)
    else:
        assert any("newest checkpoint" in said for said in watch.said)
        assert_same_learning(found, local)


def test_two_nodes_compute_the_same_and_a_killed_worker_is_made_up_for(
    tmp_path: Path, local: list[dict[str, Any]], cluster: Any
) -> None:
    stacks: list[tuple[str, str]] = []

    class Look(Disturb):
        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if step == 1:
                stacks.extend(seen_from_afar(tmp_path / "small"))
            super().stepped(step, metrics)

    watch = Look(worker("rollout-1"))
    train(tmp_path, watch, train=STEPS, cluster=over(learners=2, spread=True))
    assert_same_learning(measured(tmp_path), local)
    assert isinstance(watch.workers, Driver)
    assert len({m.node for m in watch.workers.pool.members.values()}) == 2
    assert any("rollout-1 is lost" in said for said in watch.said)
    assert len(stacks) == 6 and "gone" in stacks[-1][0] and "cannot be reached" in stacks[-1][1]
    for who, text in stacks[:-1]:
        assert "10.9.9." in who and "host.py" in text, (who, text)


def seen_from_afar(run: Path) -> list[tuple[str, str]]:
    """The workers' stacks as another process sees them that takes every node, and one that is gone, for other hosts."""
    found = status.read(run)
    hosts = {node: f"10.9.9.{i}" for i, node in enumerate(dict.fromkeys(w.node for w in found.workers))}
    away = [replace(w, host=hosts[w.node]) for w in found.workers]
    gone = replace(away[0], name="gone", node="ab" * 28, host="10.9.9.9")
    told = replace(found, home="", workers=(*away, gone))
    status.write(run.parent, told)
    code = (
        "import json; from pathlib import Path; from tidemill.cluster.driver import status; "
        f"there = Path({str(run.parent)!r}); print(json.dumps(status.all_stacks(there, status.read(there))[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    listed: list[tuple[str, str]] = [tuple(one) for one in json.loads(done.stdout.splitlines()[-1])]
    return listed


def test_a_placement_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, cluster: Any) -> None:
    with pytest.raises(PlacementError, match="does not fit"):
        train(tmp_path, cluster=over(rollouts=9))


def test_a_whole_node_dies_and_the_run_goes_on_without_it(
    tmp_path: Path, local: list[dict[str, Any]], cluster: Any
) -> None:
    class EndNode(Disturb):
        """Kills the raylet between two steps, and waits until Ray has noticed."""

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if step == 1:
                self.killed.append(cluster.second.all_processes["raylet"][0].process.pid)
                os.kill(self.killed[0], signal.SIGKILL)
                while all(node["Alive"] for node in ray.nodes()):
                    time.sleep(0.1)

    watch = EndNode(worker("rollout-1"))
    train(tmp_path, watch, train=STEPS, cluster=over(learners=1, spread=True))
    assert watch.killed and any("is lost" in said for said in watch.said)
    assert_same_learning(measured(tmp_path), local)
    assert isinstance(watch.workers, Driver)
    home = watch.workers.starter.home[0]
    assert {m.node for m in watch.workers.pool.members.values() if m.state == "ready"} == {home}


def test_an_engine_of_two_ranks_loses_one_on_ray_and_comes_back(
    tmp_path: Path, local: list[dict[str, Any]], cluster: Any
) -> None:
    watch = Disturb(worker("rollout-1"))
    train(tmp_path, watch, train=STEPS, rollout={"tp": 2}, cluster=over(learners=1, rollouts=1))
    assert watch.workers is not None and {m.restarts for m in watch.workers.pool.of("rollout", ready=False)} == {1}
    assert_same_learning(measured(tmp_path), local)


def test_a_cluster_that_runs_is_found_and_left_as_it_was(
    tmp_path: Path, local: list[dict[str, Any]], cluster: Any
) -> None:
    """From a process that is not connected to it: by what the environment says, and by Ray's client."""
    code = (
        "import json, sys; from tests.cluster.runs import train; from pathlib import Path; "
        "train(Path(sys.argv[1]), train={'steps': 3}, cluster=json.loads(sys.argv[2]))"
    )
    for address, given in (("auto", {"RAY_ADDRESS": cluster.address}), (cluster.client, {})):
        folder = tmp_path / address.replace(":", "-").replace("/", "")
        asked = json.dumps({"executor": "ray", "address": address, "start_s": 120.0})
        paths = os.pathsep.join(["src", "."])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **given}
        subprocess.run([sys.executable, "-c", code, str(folder), asked], check=True, env=env, timeout=220)
        assert_same(measured(folder), local)
    assert len([node for node in ray.nodes() if node["Alive"]]) >= 1
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) != ray.cluster_resources()["CPU"]:  # all places are given back
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_gateway_killed_on_ray_in_mid_conversation_costs_no_sample(tmp_path: Path, cluster: Any) -> None:
    from tests.serve.test_gateway_faults import assert_made_up_for

    assert_made_up_for(tmp_path, over(learners=1))
