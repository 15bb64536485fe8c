"""The dock behind TransferQueue's interface: its answers, its flows, and what it keeps when something is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensordict", reason="pip install 'tidemill[transferqueue]'")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Fetches that find too little fail sooner.
QUICK = {"TQ_CONTROLLER_GET_METADATA_TIMEOUT": "0.2", "TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL": "0.2"}
PEER = os.environ.get("TIDEMILL_PEER_PYTHON")


def child(*words: str, python: str = sys.executable, **environment: str) -> Any:
    """Run a module with these words; its output is one JSON object."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    extra = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([python, *words], cwd=ROOT, env=extra, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def cases(side: str, *more: str, python: str = sys.executable, **environment: str) -> dict[str, Any]:
    module = "tests.bridges.transfer_queue.run"
    found: dict[str, Any] = child("-m", module, side, *more, python=python, **environment)
    early = child("-m", module, side, *more, "prealloc", python=python, **environment, TQ_PRE_ALLOC_SAMPLE_NUM="4")
    return found | early


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one | other if one.get(name) != other.get(name)]


@pytest.mark.slow
def test_every_call_answers_as_transfer_queue_did() -> None:
    recorded = json.loads((HERE / "recorded.json").read_text())
    assert len(recorded) >= 80
    assert differing(recorded, cases("ours", **QUICK)) == []


@pytest.mark.skipif(PEER is None, reason="TIDEMILL_PEER_PYTHON names no interpreter that has TransferQueue")
def test_every_call_answers_as_transfer_queue_does_now(tmp_path: Path) -> None:
    environment = {"TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL": "1", "RAY_TMPDIR": f"/tmp/r{os.getpid()}"}
    theirs, ours = (cases(side, "--ray", python=str(PEER), **environment) for side in ("theirs", "ours"))
    assert differing(theirs, ours) == []
    assert differing(theirs, json.loads((HERE / "recorded.json").read_text())) == []


@pytest.mark.slow
def test_a_flow_of_four_processes_brings_every_row_to_the_update() -> None:
    found = child("-m", "tests.bridges.transfer_queue.flow", "ours", "rows")
    assert found["left"] == ["over"] and len(found["rows"]) == 32
    for key, row in found["rows"].items():
        fields = {"prompt", "answer", "logprob", "text", "reward", "ref", "advantage", "tag"}
        assert row.keys() == fields and row["tag"]["scored"] == row["tag"]["referred"] == 1, key
        assert len(row["answer"]["tensor"]) == len(row["logprob"]["tensor"]) == len(row["ref"]["tensor"])


CONSUMER = """
    import os, signal, sys, torch
    import tidemill.bridges.transfer_queue as tq

    tq.init()
    client = tq.get_client()
    first, second = (client.get_meta(["x"], 2, "p", task_name="t") for _ in range(2))
    {ending}
"""
ENDINGS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", [0, 1, 2, 3]),
    "killed after saying that the first is done": (
        "client.acknowledge(first); os.kill(os.getpid(), signal.SIGKILL)",
        [2, 3],
    ),
    "failed": ("raise ValueError('a bug')", [0, 1, 2, 3]),
    "ended": ("", []),
    "closed": ("tq.close()", []),
}


@pytest.fixture
def queue() -> Any:
    import tidemill.bridges.transfer_queue as tq

    yield tq
    tq.close()


@pytest.mark.parametrize("how", ENDINGS)
def test_how_a_consumer_ends_decides_whether_its_rows_are_given_again(how: str, queue: Any) -> None:
    import torch
    from tensordict import TensorDict

    queue.init({"controller": {"polling_mode": True}})
    client = queue.get_client()
    client.put(TensorDict({"x": torch.arange(4).view(4, 1)}, batch_size=4), partition_id="p")
    ending, expected = ENDINGS[how]
    code = textwrap.dedent(CONSUMER).format(ending=ending)
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=120)
    left: list[int] = []
    deadline = time.monotonic() + 10
    while len(left) < len(expected) and time.monotonic() < deadline:
        left += client.get_meta(["x"], 1, "p", task_name="t").global_indexes
    assert left == expected and not client.get_meta(["x"], 1, "p", task_name="t")


def test_a_killed_ledger_and_warehouse_come_back_with_everything(queue: Any) -> None:
    import torch
    from tensordict import TensorDict

    from tidemill.bridges.transfer_queue import system

    queue.init({"controller": {"sampler": "RankAwareSampler", "polling_mode": True}})
    queue.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2), [{"n": 1}, {}])
    config = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}
    client = queue.get_client()
    before = client.get_meta(["x"], 1, "p", task_name="t", sampling_config=config)
    server = system._here.server
    assert server is not None
    for keeper in (server.ledger, *server.warehouses.values()):
        os.kill(keeper.pid, signal.SIGKILL)
    again = client.get_meta(["x"], 1, "p", task_name="t", sampling_config=config)
    assert again.global_indexes == before.global_indexes  # the sampler remembers, too
    assert queue.kv_list("p") == {"p": {"a": {"n": 1}, "b": {}}}
    assert torch.stack(queue.kv_batch_get(["b", "a"], "p")["x"].unbind()).equal(torch.ones(2, 3))


def test_what_is_missing_is_named(queue: Any) -> None:
    with pytest.raises(ValueError, match="no sampler 'RankAwareSample'; did you mean RankAwareSampler"):
        queue.init({"controller": {"sampler": "RankAwareSample"}})
    with pytest.raises(AssertionError, match=r"call init\(\) first"):
        queue.kv_list()
    with pytest.raises(AttributeError, match="no attribute 'kv_puts'"):
        queue.kv_puts  # noqa: B018
