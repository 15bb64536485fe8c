"""The one queue that all processes of a job share: who starts it, and how the others find it.

With Ray, the first `init` of the cluster starts the dock beside its own process and leaves the address with a small
named actor; every other node that Ray has gets a warehouse. Without Ray, the address is left in the environment, which
processes started later inherit."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.bridges.transfer_queue import pickles, settings
from tidemill.bridges.transfer_queue.client import TransferQueueClient
from tidemill.bridges.transfer_queue.metrics import MetricsServer
from tidemill.bridges.transfer_queue.samplers import SAMPLER_FILE, SequentialSampler
from tidemill.dock.server import DockNode, DockServer
from tidemill.dock.setup import DockSetup, KeyedSetup

ACTOR, NAMESPACE = "TidemillTransferQueue", "transfer_queue"
VARIABLE = "TIDEMILL_TRANSFER_QUEUE"  # in the environment: the dock's address file, where there is no Ray
START_S = 120.0


@dataclass
class System:
    """What this process has of the queue."""

    config: Any = None
    client: TransferQueueClient | None = None
    server: DockServer | None = None  # in the process that started the queue
    metrics: MetricsServer | None = None
    actors: list[Any] = field(default_factory=list)
    process: int = 0


_here = System()


def start(conf: Any) -> Any:
    """Start the queue, or join the one that there is. Returns its configuration; when joined, what was given."""
    if join():
        return conf
    config = settings.merged(conf)
    sampler = settings.sampler_of(config)
    actor = _claim()
    if actor is None and join(START_S):  # another process was quicker
        return config
    _here.server = _serve(config, sampler)
    config["controller"]["zmq_info"] = _here.server.address.to_json()
    _here.config, _here.process = config, os.getpid()
    _here.client = _new_client(config)
    if config["metrics"]["enabled"]:
        _here.metrics = MetricsServer(_here.client.figures, _host(), config["metrics"]["port"])
        config["metrics"]["endpoint"] = _here.metrics.endpoint
    _publish(actor, config, _here.server)
    return config


def join(wait_s: float = 0.0) -> bool:
    """Connect to the queue of this job, if there is one."""
    if _here.client is not None and _here.process == os.getpid():
        return True
    config = _find(wait_s)
    if config is None:
        return False
    _here.config, _here.process, _here.server = config, os.getpid(), None
    _here.client = _new_client(config)
    return True


def client() -> TransferQueueClient:
    """Return this process's client, connected on first use."""
    if not join():
        raise AssertionError("there is no TransferQueue yet: call init() first, in this process or in another")
    assert _here.client is not None
    return _here.client


def known_client() -> TransferQueueClient | None:
    return _here.client if _here.process == os.getpid() else None


def config() -> Any:
    return _here.config if join() else None


def stop() -> None:
    """Leave the queue. The process that started it ends it, for all."""
    global _here
    left, _here = _here, System()
    if left.process != os.getpid():  # a forked child: everything is its parent's
        return
    if left.client is not None:
        left.client.close()
    if left.metrics is not None:
        left.metrics.close()
    for actor in left.actors:
        _kill(actor)
    if left.server is not None:
        os.environ.pop(VARIABLE, None)
        left.server.close()


@atexit.register
def _leave() -> None:
    """Say goodbye at the end of the process. After an uncaught error, what it had fetched is given to others."""
    has_failed = getattr(sys, "last_value", None) is not None
    if has_failed and _here.client is not None and _here.process == os.getpid():
        _here.client.close(is_done=False)
        _here.client = None
    with suppress(Exception):
        stop()


def _new_client(config: Any) -> TransferQueueClient:
    return TransferQueueClient(f"TransferQueueClient_{os.getpid()}", config["controller"]["zmq_info"])


def _serve(config: Any, sampler: Any) -> DockServer:
    folder = Path(tempfile.mkdtemp(prefix="tidemill-queue-"))
    is_first = type(sampler) is SequentialSampler
    if not is_first:
        pickles.write(sampler, folder / SAMPLER_FILE)
    keyed = KeyedSetup(
        sampler="" if is_first else "tidemill.bridges.transfer_queue.samplers:of_folder",
        polls=bool(config["controller"]["polling_mode"]),
        spare_rows=int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", 1)),
        max_rows=settings.max_rows(config),
    )
    return DockServer(DockSetup(stages=(), keyed=keyed), folder, _host())


# -- where the address is left ----------------------------------------------------------------------------------------


def _ray() -> Any:
    """Return Ray if this process is part of a cluster."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _host() -> str:
    ray = _ray()
    alone = ray is None or len([node for node in ray.nodes() if node["Alive"]]) < 2
    return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())


def _claim() -> Any:
    """Take the name of this job's queue: the actor, or None where another has it. Without Ray there is no race."""
    ray = _ray()
    if ray is None:
        return False
    try:
        return ray.remote(num_cpus=0)(Notice).options(name=ACTOR, namespace=NAMESPACE).remote()
    except ValueError:
        return None


def _publish(actor: Any, config: Any, server: DockServer) -> None:
    if not actor:
        os.environ[VARIABLE] = str(server.folder)
        (server.folder / "config.json").write_text(settings.to_json(config))
        return
    ray = _ray()
    _here.actors = [actor, *_warehouses(ray, server)]
    ray.get(actor.leave.remote(settings.to_json(config)))


def _find(wait_s: float) -> Any:
    deadline = time.monotonic() + wait_s
    while True:
        text = _notice()
        if text or (time.monotonic() >= deadline and text is None):
            return settings.from_json(text) if text else None
        time.sleep(0.05)  # it is being started


def _notice() -> str | None:
    """Return the configuration that was left; empty while the queue is being started, None where there is none."""
    ray = _ray()
    if ray is not None:
        try:
            return str(ray.get(ray.get_actor(ACTOR, namespace=NAMESPACE).read.remote()))
        except ValueError:
            return None
    path = Path(os.environ.get(VARIABLE, "")) / "config.json"
    return path.read_text() if VARIABLE in os.environ and path.is_file() else None


class Notice:
    """An actor that holds the configuration of this job's queue."""

    def __init__(self) -> None:
        self._text = ""

    def leave(self, text: str) -> None:
        self._text = text

    def read(self) -> str:
        return self._text


class Warehouse:
    """An actor that keeps the dock's warehouse on its node."""

    def __init__(self, address: Mapping[str, str], name: str, host: str) -> None:
        from tidemill.dock.address import Address

        self._node = DockNode(Address(**address), name, host)

    def name(self) -> str:
        return self._node.name


def _warehouses(ray: Any, server: DockServer) -> list[Any]:
    """Start a warehouse on every other node of the cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tidemill.dock.address import Address

    here, actors = ray.get_runtime_context().get_node_id(), []
    where = server.address
    for i, node in enumerate(node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": there}
        address = {"ledger": where.ledger, "token": where.token, "local": ""}
        assert Address(**address)
        actors.append(
            ray.remote(Warehouse).options(**options).remote(address, f"node{i + 1}", node["NodeManagerAddress"])
        )
    ray.get([actor.name.remote() for actor in actors])
    return actors


def _kill(actor: Any) -> None:
    ray = _ray()
    if ray is not None:
        with suppress(Exception):
            ray.kill(actor)
