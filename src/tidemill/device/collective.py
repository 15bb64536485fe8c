"""What carries collectives between ranks, by kind of device. Plain values always travel over gloo."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


# Where collectives listen, unless the user has said.
LISTENERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


def backend(kind: str) -> str:
    return BACKENDS[kind]


def listen_at(host: str) -> None:
    """Let collectives of this process listen only on the interface that has this address: they ask nobody for a key.
    By themselves they would choose one by the machine's name. Called before the first of them is made."""
    name = interface_of(host)
    if name is not None:
        for variable in LISTENERS:
            os.environ.setdefault(variable, name)


def interface_of(host: str) -> str | None:
    """The network interface that has this address; None where that cannot be told."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            found = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None
