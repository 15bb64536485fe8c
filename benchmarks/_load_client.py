"""Many streaming clients of an OpenAI endpoint in one process, with Python's own library alone, for any server.

Takes a job (JSON on standard input) and prints what each client saw. An answer's bytes are kept as they come and read
when the clock has stopped, so that the clients take little of the machine from the server that they measure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

END = b"0\r\n\r\n"  # of a chunked body
LIMIT_S = 900.0


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, requests: list[bytes], done: asyncio.Future[None], clock: Any) -> None:
        self.requests, self.done, self.clock = requests, done, clock
        self.transport: Any = None
        self.parts: list[bytes] = []
        self.answers: list[tuple[float, float, float, bytes]] = []  # asked, first bytes, last bytes, body
        self.asked = self.first = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self) -> None:
        self.parts, self.first, self.asked = [], 0.0, self.clock()
        self.transport.write(self.requests[len(self.answers)])

    def data_received(self, data: bytes) -> None:
        if not self.first:
            self.first = self.clock()
        self.parts.append(data)
        if data.endswith(END) or (data.endswith(b"}") and b"content-length" in self.parts[0].lower()):
            self.answers.append((self.asked, self.first, self.clock(), b"".join(self.parts)))
            if len(self.answers) < len(self.requests):
                self.ask()
            elif not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)  # what is missing of its answers is counted as errors


def request(job: dict[str, Any], number: int) -> bytes:
    body = json.dumps({**job["body"], **job["bodies"][number % len(job["bodies"])]}).encode()
    key = f"authorization: Bearer {job['key']}\r\n" if job.get("key") else ""
    head = f"POST {job['path']} HTTP/1.1\r\nhost: {job['host']}\r\n{key}content-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def load(job: dict[str, Any]) -> list[Client]:
    loop = asyncio.get_running_loop()
    clients = []
    for number in range(job["clients"]):
        asked = [request(job, job["first"] + number + job["total"] * i) for i in range(job["rounds"])]
        done = loop.create_future()
        _, client = await loop.create_connection(
            lambda asked=asked, done=done: Client(asked, done, time.time), job["host"], job["port"]
        )
        clients.append(client)
    await asyncio.sleep(max(0.0, job["at"] - time.time()))
    for client in clients:
        client.ask()
    await asyncio.wait_for(asyncio.gather(*(client.done for client in clients)), LIMIT_S)
    return clients


def seen(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """What a client got: tokens by its usage, time from its first question to its last byte, and what went wrong."""
    tokens, errors = 0, job["rounds"] - len(client.answers)
    why = "" if not errors else "the connection was lost"
    for _, _, _, body in client.answers:
        made = tokens_of(body)
        tokens += max(made, 0)
        if made != job["tokens"]:
            errors += 1
            why = body[-300:].decode(errors="replace")
    first, last = (client.answers[0][0], client.answers[-1][2]) if client.answers else (0.0, 0.0)
    waits = [answer[1] - answer[0] for answer in client.answers]
    return {"tokens": tokens, "errors": errors, "why": why, "begins": first, "ends": last, "first_byte_s": waits}


def tokens_of(body: bytes) -> int:
    """The answer's tokens, from the usage that its last event tells; −1 where the stream did not end as it should."""
    if b"data: [DONE]" not in body[-64:]:
        return -1
    place = body.rfind(b'"completion_tokens":')
    digits = body[place + 20 : place + 40].split(b",")[0].strip(b" }]\r\n")
    return int(digits) if place >= 0 and digits.isdigit() else -1


def main() -> None:
    job = json.loads(sys.stdin.read())
    clients = asyncio.run(load(job))
    print(json.dumps([seen(client, job) for client in clients]))


if __name__ == "__main__":
    main()
