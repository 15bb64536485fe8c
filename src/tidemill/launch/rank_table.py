"""Ascend's rank tables: which devices of which hosts take part, in which order, in which super-node.

Three shapes are read: version 1.0 (`server_list`), version 1.2 with super-nodes (`super_pod_list`), and the older one
of ModelArts (`group_list`), whose devices are numbered in the order they are listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Device:
    rank: int
    device: int  # its number on its host
    address: str = ""  # of its own network card
    super_device: str = ""  # its number in the super-node


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    address: str
    devices: tuple[Device, ...]
    super_node: str = ""


@dataclass(frozen=True, slots=True)
class RankTable:
    servers: tuple[Server, ...]  # in the order of their first ranks

    @property
    def ranks(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    def index_of(self, host: str) -> int:
        """Which server a host is, by name or address."""
        for index, server in enumerate(self.servers):
            if host in (server.name, server.address):
                return index
        known = [server.name for server in self.servers]
        raise ConfigError(f"the rank table has no server {host!r}{did_you_mean(host, known)}", f"it has {known}")


def read(file: str | Path) -> RankTable:
    try:
        plain = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"rank table {file}: {error}") from error
    return parse(plain, str(file))


def parse(plain: Any, where: str = "rank table") -> RankTable:
    try:
        if plain["status"] != "completed":
            raise ConfigError(f"{where} is not ready: status {plain['status']!r}", "wait until it says completed")
        servers = _grouped(plain) if "group_list" in plain else _listed(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where} is no rank table that is known: {type(error).__name__} {error}",
            "versions 1.0 and 1.2 have status and server_list; ModelArts' older one has group_list",
        ) from error
    _check(servers, where)
    return RankTable(tuple(sorted(servers, key=lambda server: server.devices[0].rank)))


def _listed(plain: Mapping[str, Any]) -> list[Server]:
    pods = {
        server["server_id"]: pod["super_pod_id"]
        for pod in plain.get("super_pod_list", ())
        for server in pod["server_list"]
    }
    return [
        Server(
            name=server["server_id"],
            address=server.get("host_ip") or server.get("server_ip") or server["server_id"],
            devices=tuple(sorted((_device(d) for d in server["device"]), key=lambda d: d.rank)),
            super_node=pods.get(server["server_id"], ""),
        )
        for server in plain["server_list"]
    ]


def _device(plain: Mapping[str, Any]) -> Device:
    return Device(
        rank=int(plain["rank_id"]),
        device=int(plain["device_id"]),
        address=plain.get("device_ip", ""),
        super_device=plain.get("super_device_id", ""),
    )


def _grouped(plain: Mapping[str, Any]) -> list[Server]:
    servers, rank = [], 0
    for group in plain["group_list"]:
        for instance in group["instance_list"]:
            devices = []
            for device in instance["devices"]:
                devices.append(Device(rank, int(device["device_id"]), device.get("device_ip", "")))
                rank += 1
            servers.append(Server(instance["pod_name"], instance["server_id"], tuple(devices)))
    return servers


def _check(servers: list[Server], where: str) -> None:
    if not servers or not all(server.devices for server in servers):
        raise ConfigError(f"{where} lists a server without devices, or no server")
    ranks = sorted(device.rank for server in servers for device in server.devices)
    if ranks != list(range(len(ranks))):
        raise ConfigError(f"{where}: ranks are {ranks}, not 0 to {len(ranks) - 1}, each once")
