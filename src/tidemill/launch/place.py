"""Which node of a job this is, read from what each scheduler puts into the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidemill.errors import ConfigError
from tidemill.launch import rank_table

PORT = 6379
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # Ray's own name for the file with a cluster's token
RANK, NODES, HEAD, HEAD_PORT = "TIDEMILL_NODE_RANK", "TIDEMILL_NODES", "TIDEMILL_HEAD", "TIDEMILL_HEAD_PORT"
Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    nodes: int
    head: str  # host or address of node 0
    port: int = PORT

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"


def find(environment: Environment) -> Place:
    """This node's place: said by a launch, or by Slurm, SkyPilot, dstack, ModelArts or a rank table; else alone."""
    for read in (_said, _slurm, _skypilot, _dstack, _modelarts, _ranked):
        place = read(environment)
        if place is not None:
            if not 0 <= place.rank < place.nodes:
                raise ConfigError(f"this node calls itself {place.rank} of {place.nodes} nodes (from 0)")
            return place
    return Place(0, 1, "127.0.0.1", _port(environment))


def _said(given: Environment) -> Place | None:
    return _read(given, RANK, NODES, lambda: given[HEAD])


def _slurm(given: Environment) -> Place | None:
    """The script runs on the first node and starts the step from there, so its address is the head's."""
    return _read(given, "SLURM_NODEID", "SLURM_STEP_NUM_NODES", lambda: given["SLURM_LAUNCH_NODE_IPADDR"])


def _skypilot(given: Environment) -> Place | None:
    return _read(given, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", lambda: given["SKYPILOT_NODE_IPS"].split()[0])


def _dstack(given: Environment) -> Place | None:
    return _read(given, "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", lambda: given["DSTACK_MASTER_NODE_IP"])


def _modelarts(given: Environment) -> Place | None:
    return _read(given, "VC_TASK_INDEX", "MA_NUM_HOSTS", lambda: given["VC_WORKER_HOSTS"].split(",")[0])


def _ranked(given: Environment) -> Place | None:
    """By Ascend's rank table, where this host finds itself under its own address or the server's index."""
    file = given.get("RANK_TABLE_FILE") or given.get("RANKTABLE_FILE")
    if not file or not os.path.exists(file):
        return None
    table = rank_table.read(file)
    own = given.get("SERVER_ID") or given.get("MA_CURRENT_IP") or given.get("POD_IP", "")
    if len(table.servers) == 1:
        return Place(0, 1, table.servers[0].address, _port(given))
    return Place(table.index_of(own), len(table.servers), table.servers[0].address, _port(given))


def _read(given: Environment, rank: str, nodes: str, head: Callable[[], str]) -> Place | None:
    if rank not in given or nodes not in given:
        return None
    try:
        count = int(given[nodes])
        return Place(int(given[rank]), count, head() if count > 1 else "127.0.0.1", _port(given))
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the environment has {rank}={given[rank]} and {nodes}={given[nodes]}, but not where node 0 is: {error}",
            f"set {RANK}, {NODES} and {HEAD} by hand",
        ) from error


def _port(given: Environment) -> int:
    return int(given.get(HEAD_PORT, PORT))
