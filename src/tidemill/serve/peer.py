"""Tell whose process is at the other end of a TCP connection within this machine, as the kernel knows it (sock_diag).

A Unix socket tells its peer's user; for TCP on the loopback address one has to ask.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST = 4, 20, 1
ESTABLISHED = 1
ALL_STATES = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8
HEAD = struct.Struct("=IHHII")  # struct nlmsghdr
ID_BYTES = 48  # struct inet_diag_sockid
ASK_BYTES = HEAD.size + 8 + ID_BYTES
USER_AT = HEAD.size + 4 + ID_BYTES + 12  # of struct inet_diag_msg

Address = tuple[str, int]


def is_foreign(peer: Address, own: Address) -> bool:
    """Whether a connection comes from a process of another user than this one's and root. Where the kernel cannot be
    asked (another system, a container that forbids it), none counts as foreign."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        found = _user_of(peer, own)
    except OSError:
        return False
    if found is None:  # it is gone: there is nobody to answer
        return True
    user, state = found
    if user == 0:  # the kernel says 0 too of a connection that nobody has open any more
        return state != ESTABLISHED
    return user != os.geteuid()


def _user_of(peer: Address, own: Address) -> tuple[int, int] | None:
    """The user and the state of the socket at the other end; None where there is none."""
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(_question(family, peer, own))
        answer = kernel.recv(4096)
    kind = HEAD.unpack_from(answer)[1]
    if kind != SOCK_DIAG_BY_FAMILY:
        return None
    (user,) = struct.unpack_from("=I", answer, USER_AT)
    return user, answer[HEAD.size + 1]


def _question(family: socket.AddressFamily, peer: Address, own: Address) -> bytes:
    head = HEAD.pack(ASK_BYTES, SOCK_DIAG_BY_FAMILY, REQUEST, 0, 0)
    asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, ALL_STATES)
    ends = [socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (peer, own)]
    return head + asked + struct.pack("!HH", peer[1], own[1]) + b"".join(ends) + struct.pack("=I", 0) + NO_COOKIE
