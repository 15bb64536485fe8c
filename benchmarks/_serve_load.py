"""Load on an OpenAI endpoint from processes of their own, and what it came to."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tidemill import bench

LEAD_S = 0.5  # for all clients to be connected


def put_on(
    address: str,
    body: Mapping[str, Any],
    bodies: Sequence[Mapping[str, Any]],
    *,
    path: str,
    clients: int,
    tokens: int,
    rounds: int,
    processes: int = 1,
    lead_s: float = LEAD_S,
) -> dict[str, float]:
    """Tokens per second of all clients, the slowest client's share of the mean, errors, and time to the first byte.

    Each client asks `rounds` times for `tokens` tokens, one after the other; question i has the body `bodies[i]`."""
    place = urlsplit(address)
    share = -(-clients // processes)
    at = time.time() + lead_s + 0.1 * processes + clients / 2000
    jobs, first = [], 0
    while first < clients:
        count = min(share, clients - first)
        own = {"first": first, "clients": count, "total": clients, "at": at, "rounds": rounds, "tokens": tokens}
        where = {"host": place.hostname, "port": place.port, "path": path}
        jobs.append({**own, **where, "body": dict(body), "bodies": list(bodies)})
        first += count
    command = [sys.executable, str(Path(__file__).with_name("_load_client.py"))]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=bench.peer_environment())
        for _ in jobs
    ]
    for process, job in zip(running, jobs):
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
    seen: list[dict[str, Any]] = []
    for process in running:
        assert process.stdout is not None
        seen += json.loads(process.stdout.read() or b"[]")
        process.wait()
    return came_to(seen, clients)


def came_to(seen: Sequence[Mapping[str, Any]], clients: int) -> dict[str, float]:
    errors = sum(one["errors"] for one in seen) + (clients - len(seen))
    why = next((one["why"] for one in seen if one["why"]), "")
    if why:
        print(f"a client saw: {why}", file=sys.stderr, flush=True)
    whole = [one for one in seen if one["ends"] > one["begins"]]
    rates = [one["tokens"] / (one["ends"] - one["begins"]) for one in whole]
    waits = sorted(wait for one in whole for wait in one["first_byte_s"])
    took = max(one["ends"] for one in whole) - min(one["begins"] for one in whole)
    return {
        "tokens_per_s": sum(one["tokens"] for one in whole) / took,
        "slowest_share": min(rates) / statistics.mean(rates),
        "errors": float(errors),
        "first_byte_s": waits[len(waits) // 2],
        "first_byte_worst_s": waits[-1],
    }


class ServerProcess:
    """A server in a process of its own, ready when it says so or answers."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, says: str = "", asks: str = ""
    ) -> None:
        """`says`: a pattern whose group is the address. `asks`: an address that answers 200 once it is ready."""
        self.log, self.says, self.asks = log, says, asks
        self.address = ""
        self._output = log.open("wb")
        self.process = subprocess.Popen(list(command), env=dict(env), stdout=self._output, stderr=subprocess.STDOUT)

    def wait(self, limit_s: float) -> str:
        deadline = time.monotonic() + limit_s
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                end = self.log.read_text(errors="replace")[-3000:]
                self.end()
                raise RuntimeError(f"the server did not start:\n{end}")
            time.sleep(0.1)
        return self.address

    def _is_ready(self) -> bool:
        if self.says:
            found = re.search(self.says, self.log.read_text(errors="replace"))
            self.address = found[1] if found else ""
            return found is not None
        try:
            with urllib.request.urlopen(f"{self.asks}/health", timeout=2) as answer:
                self.address = self.asks
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()
