"""CURVE sockets of ZeroMQ whose keys come from one secret: a peer without it does not get past the handshake, and what
passes is encrypted."""

from __future__ import annotations

import hashlib
from typing import Any

import zmq
from zmq.utils import z85

MAX_MESSAGE_BYTES = 64 << 20
HANDSHAKE_S = 3.0


def curve_keys(token: str, side: str) -> tuple[bytes, bytes]:
    """(public, secret) of the server's or the clients' side, made from the token alone."""
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=f"tm-{side}".encode()).digest())
    return zmq.curve_public(secret), secret


def bound_address(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


class Doorkeeper:
    """Answers libzmq's question whether a key may enter (ZAP)."""

    def __init__(self, context: zmq.Context[Any], token: str) -> None:
        self._allowed = z85.decode(curve_keys(token, "client")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer_all(self) -> None:
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.answer()

    def answer(self) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        is_known = mechanism == b"CURVE" and credentials == [self._allowed]
        status = [b"200", b"OK"] if is_known else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, b"peer", b""])


def listening_socket(context: zmq.Context[Any], token: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "server")
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.router_handover = True  # a client that reconnects under its name replaces its old connection
    socket.handshake_ivl = int(1000 * HANDSHAKE_S)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    return socket


def calling_socket(context: zmq.Context[Any], token: str, identity: bytes, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.identity = identity
    socket.curve_serverkey = curve_keys(token, "server")[0]
    socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "client")
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.reconnect_ivl, socket.reconnect_ivl_max = 10, 100
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.connect(address)
    return socket
