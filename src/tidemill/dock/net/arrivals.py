"""Arrivals: where the ledger sleeps until something comes, by the door or over ZeroMQ.

ZeroMQ's own poll looks at every one of its sockets each time it wakes; whoever comes by the door would wait for that.
So the door's own list of files is slept on, with ZeroMQ's among them. Those say "look" and not "there is": they are
looked at when they say so, after every use (which may have swallowed the saying), and with every tick.
"""

from __future__ import annotations

from typing import Any

import zmq

from tidemill.dock.net.door import Door

Events = list[tuple[int, int]]


class Arrivals:
    def __init__(self, door: Door | None, sockets: tuple[zmq.Socket[Any], ...]) -> None:
        self._door, self._sockets = door, sockets
        self._files = {int(socket.getsockopt(zmq.FD)) for socket in sockets}
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        for file in self._files if door is not None else ():
            door.watch(file)  # type: ignore[union-attr]
        self.is_network_used = True  # whoever sends over a socket says so here

    def wait(self, timeout_s: float) -> tuple[Events, bool]:
        """What came to the door, and whether to look at the sockets."""
        if self._door is None:
            return [], bool(self._poller.poll(int(1000 * timeout_s)))
        if self.is_network_used:  # look before sleeping
            self.is_network_used = False
            if any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets):
                timeout_s = 0.0
                self.is_network_used = True
        events = self._door.wait(timeout_s)
        rings = self.is_network_used or not events or any(file in self._files for file, _ in events)
        return events, rings
