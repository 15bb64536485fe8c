"""Agents for tests: plain HTTP, so that no framework is needed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def ask(base_url, api_key, messages, **body):
    data = json.dumps({"model": "any", "messages": messages, **body}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


async def talk(base_url, api_key, task, turns=3):
    """Several turns with a tool's results, then a sub-agent, then a history that is written anew."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(turns):
        said = ask(base_url, api_key, messages, tools=[ADD], max_tokens=12)
        messages.append({"role": "assistant", "content": said["content"], "tool_calls": said.get("tool_calls")})
        messages.append({"role": "user", "content": f"turn {turn}"})
    ask(base_url, api_key, [{"role": "user", "content": "a sub-agent"}], max_tokens=6)
    ask(base_url, api_key, [*messages[:1], {"role": "user", "content": "in short"}], max_tokens=6)
    return {"reward": 0.5, "solved": True, "parts": {"turns": turns}, "rewards": [0.1] * turns}


def fault(base_url, api_key, task):
    kind = task["answer"]
    ask(base_url, api_key, [{"role": "user", "content": "hello"}], max_tokens=4)
    if kind == "crash":
        os.abort()
    if kind == "raise":
        raise ValueError("a mistake of the agent")
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(3600)
    if kind == "outcome":
        return {"reward": float("nan")}
    if kind == "noise":
        print("x" * 5_000_000)
    if kind == "flood":
        flood(base_url, api_key)
    if kind == "body":
        large(base_url, api_key)
    if kind == "broken":
        broken(base_url, api_key)
    if kind == "disconnect":
        disconnect(base_url, api_key)
    return 1.0


def flood(base_url, api_key, count=10_000):
    """Ask without end, whatever the answer."""
    for _ in range(count):
        try:
            ask(base_url, api_key, [{"role": "user", "content": "more"}], max_tokens=1)
        except OSError:
            continue


def large(base_url, api_key, megabytes=100):
    place = urlsplit(base_url)
    with socket.create_connection((place.hostname, place.port)) as end:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api_key}\r\n"
        end.sendall(f"{head}content-length: {megabytes << 20}\r\n\r\n".encode())
        try:
            for _ in range(megabytes):
                end.sendall(b"x" * (1 << 20))
        except OSError:
            return


def broken(base_url, api_key):
    request = urllib.request.Request(
        f"{base_url}/chat/completions", b'{"messages": [', {"authorization": f"Bearer {api_key}"}
    )
    try:
        urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        assert error.code == 400


def disconnect(base_url, api_key):
    place = urlsplit(base_url)
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "ignore_eos": true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api_key}\r\n"
    with socket.create_connection((place.hostname, place.port)) as end:
        end.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        end.recv(100)


def parallel(base_url, api_key, task):
    """Sub-agents that ask at once."""
    threads = [
        threading.Thread(
            target=ask,
            args=(base_url, api_key, [{"role": "user", "content": f"agent {i}"}]),
            kwargs={"max_tokens": 8},
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def judged(task, value):
    return {"reward": 2.0 * value["reward"], "solved": value["solved"]}


def where(base_url, api_key, task):
    """Ask once, and say which interpreter this is and which packages it has."""
    import importlib.util
    import sys

    ask(base_url, api_key, [{"role": "user", "content": "hello"}], max_tokens=3)
    has = {name: importlib.util.find_spec(name) is not None for name in ("torch", "numpy", "pydantic")}
    return {"reward": float(not any(has.values())), "parts": {"is_own": sys.prefix == os.environ["OWN_PREFIX"]}}


def slowly(base_url, api_key, task, log, turns=3, pause_s=0.1):
    """Think between turns, and note the beginning and the end. The reward is a matter of what was said alone."""
    note = f"{os.getpid()} {os.getppid()}"
    with open(log, "a") as file:
        file.write(f"began {note}\n")
    messages, said = [{"role": "user", "content": task["prompt"]}], ""
    for _ in range(turns):
        answer = ask(base_url, api_key, messages, max_tokens=6)["content"]
        said += answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "="}]
        time.sleep(pause_s)
    with open(log, "a") as file:
        file.write(f"ended {note}\n")
    return {"reward": sum(map(ord, said)) % 2, "parts": {"turns": turns}}


def lazily(base_url, api_key, task):
    """Import when it is needed, as frameworks do, and say what was there before."""
    import sys

    had = {name: name in sys.modules for name in ("wave", "own_lazy", "email.mime.audio")}
    import email.mime.audio
    import wave

    import own_lazy

    assert wave and email.mime.audio and own_lazy
    ask(base_url, api_key, [{"role": "user", "content": "hello"}], max_tokens=2)
    return {"reward": 1.0, "parts": {name.replace(".", "_"): float(was) for name, was in had.items()}}
