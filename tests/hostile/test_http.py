"""Who reaches a server's port and has no key can open connections and say nothing, or much: that takes no place which
somebody else needs. Without a key only the server's own user is answered."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.hostile import strangers

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from tests.serve.made import client, model_folder, served
from tidemill.errors import ConfigError
from tidemill.observe.loggers.api import RunInfo
from tidemill.observe.loggers.prometheus_logger import MOST_CONNECTIONS, Prometheus
from tidemill.run.serving import ModelServer
from tidemill.serve import chatting, connections
from tidemill.serve.peer import is_foreign

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4}
# Opens connections, says the same in each, and holds what it was left with until its input ends.
HOLD = r"""
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5))
    try:
        held[-1].sendall(sys.argv[3].encode())
    except OSError:
        pass
print("held", flush=True)
sys.stdin.read()
"""
ASK = r"""
import sys, urllib.error, urllib.request
asked = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, {"content-type": "application/json"})
try:
    print(urllib.request.urlopen(asked, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ModelServer]:
    with served(folder) as server:
        yield server


@contextmanager
def held(port: int, count: int, said: str = "") -> Iterator[None]:
    """Connections that another user holds."""
    stranger = strangers.start(HOLD, port, count, said)
    assert stranger.stdout is not None and stranger.stdout.readline() == "held\n"
    yield
    strangers.told(stranger)


def port_of(server: ModelServer) -> int:
    return int(server.http.address.rpartition(":")[2])


def asks(server: ModelServer, key: str = "", **more: Any) -> Any:
    with client(server, key) as made:
        return made.post("/v1/chat/completions", json=CHAT | more)


# Connections


@strangers.needs_root
@pytest.mark.parametrize("said", ["", "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"])
def test_connections_that_ask_for_nothing_take_no_place(folder: Path, said: str) -> None:
    with served(folder, key="secret", most_connections=64) as server, held(port_of(server), 300, said):
        for _ in range(5):
            assert asks(server, "secret").status_code == 200


def test_a_connection_without_a_request_is_closed_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    with served(folder) as server, socket.create_connection(("127.0.0.1", port_of(server)), 5) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost")
        assert not slow.recv(1000)


def test_a_client_that_asks_keeps_its_place(folder: Path) -> None:
    """Whoever is being answered is not the one who makes room."""
    with served(folder, most_connections=4) as server:
        answers: list[int] = []
        long = threading.Thread(target=lambda: answers.append(asks(server, max_tokens=200).status_code))
        long.start()
        with held_here(port_of(server), 40):
            long.join(60)
        assert answers == [200]


@contextmanager
def held_here(port: int, count: int) -> Iterator[None]:
    held = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(count)]
    yield
    for one in held:
        one.close()


def test_no_more_connections_are_allowed_than_there_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 1024)}
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: limits["now"])
    made = connections.config(lambda: None, 4096, False, "off")
    assert made.limit_concurrency == 1024 - connections.OWN_FILES + 1


@strangers.needs_root
def test_the_metrics_of_a_run_stay_there_beside_connections_that_say_nothing(tmp_path: Path) -> None:
    with closing(Prometheus(RunInfo("r", tmp_path))) as made:
        made.log(1, {"reward": 0.5})
        with held(made.port, 300):
            began = time.monotonic()
            said = urlopen(f"http://127.0.0.1:{made.port}/metrics", timeout=10).read().decode()
            assert 'tidemill_reward{run="r"} 0.5' in said and time.monotonic() - began < 10
            while (handlers := sum("process_request" in t.name for t in threading.enumerate())) > MOST_CONNECTIONS + 2:
                assert time.monotonic() - began < 60, handlers  # those of closed connections end when they have a core
                time.sleep(0.05)


# Whose processes


@strangers.needs_root
def test_without_a_key_another_user_is_not_answered(server: ModelServer) -> None:
    url = f"{server.http.address}/v1/chat/completions"
    told = strangers.told(strangers.start(ASK, url, json.dumps(CHAT)))
    assert told.startswith("403") and "own user" in told
    assert asks(server).status_code == 200


def test_without_a_key_a_page_of_the_web_is_not_answered(folder: Path, server: ModelServer) -> None:
    """The user's browser is a process of the same user, whatever name leads it here."""
    with client(server) as made:
        for header, status in (({"host": "evil.example:8000"}, 421), ({"origin": "https://evil.example"}, 403)):
            assert made.post("/v1/chat/completions", json=CHAT, headers=header).status_code == status
        fine = {"host": "localhost:8000", "origin": "http://[::1]:3000"}
        assert made.post("/v1/chat/completions", json=CHAT, headers=fine).status_code == 200


@strangers.needs_root
def test_with_a_key_any_user_who_has_it_is_answered(folder: Path) -> None:
    with served(folder, key="secret") as server:
        assert strangers.told(strangers.start(ASK, f"{server.http.address}/health", "")).startswith("200")


@strangers.needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_tells_whose_process_has_connected(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as door, socket.socket(family) as own:
        door.bind((host, 0))
        door.listen()
        address = door.getsockname()[:2]
        own.connect(address)
        accepted, peer = door.accept()
        with accepted:
            assert not is_foreign(peer[:2], address)
        code = f"import socket, sys; s = socket.create_connection({address!r}); sys.stdin.read()"
        stranger = strangers.start(code)
        accepted, peer = door.accept()
        with accepted:
            assert is_foreign(peer[:2], address)
            strangers.told(stranger)
            assert is_foreign(peer[:2], address)  # one that has left is nobody


@strangers.needs_root
def test_the_page_of_runs_stays_there_and_without_a_token_is_for_its_own_user(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidemill", "watch", str(tmp_path), "--port", "0", "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            address = page.stdout.readline().strip()
            with held(int(re.findall(r":(\d+)", address)[0]), 600):
                assert urlopen(f"{address}api/runs", timeout=20).status == 200
                assert strangers.told(strangers.start(ASK, f"{address}api/runs", "")).startswith("403")
        finally:
            page.terminate()


def test_the_pages_token_is_asked_of_everybody(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tidemill", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as page:
        try:
            assert page.stdout is not None
            address, _, token = page.stdout.readline().strip().partition("?token=")
            assert len(token) >= 32
            with pytest.raises(HTTPError, match="401"):
                urlopen(f"{address}api/runs", timeout=20)
        finally:
            page.terminate()


# What requests say


@pytest.mark.parametrize("name", ["chat_template", "messages", "documents", "tools", "tokenize"])
def test_a_request_brings_no_template_of_its_own(server: ModelServer, name: str) -> None:
    """It would be a program: one with two loops held the server for good, and its memory."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    answer = asks(server, chat_template_kwargs={name: endless})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def test_a_templates_variables_speak_for_nobody(server: ModelServer) -> None:
    chat = server.served[0].talk.chat
    word = max(chat.specials.values(), key=len)
    told = chat.clean_all({"role_hint": f"a{word}b", "list": [word], "deep": {word: word}, "n": 3})
    assert told == {"role_hint": "ab", "list": [""], "deep": {"": ""}, "n": 3}


def test_a_text_that_cannot_fit_is_refused_before_it_is_read(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.served[0].talk, "asked", lambda *_: pytest.fail("was read"))
    answer = asks(server, messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 5_000_000}]}])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_others_are_answered_while_a_long_text_is_read(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun, go_on = chatting.read, threading.Event(), threading.Event()

    def slowly(service: Any, session: Any, body: Any) -> Any:
        if len(body.messages) > 1:
            begun.set()
            assert go_on.wait(30)
        return read(service, session, body)

    monkeypatch.setattr(chatting, "read", slowly)
    answers: list[int] = []
    many = [{"role": "user", "content": "x" * 40_000}] * 2
    long = threading.Thread(target=lambda: answers.append(asks(server, messages=many).status_code))
    long.start()
    assert begun.wait(30)
    assert asks(server).status_code == 200
    go_on.set()
    long.join(30)
    assert answers == [400]


def test_a_page_that_everybody_may_read_stays_on_this_machine(tmp_path: Path) -> None:
    from tidemill.watch.serve import serve

    with pytest.raises(ConfigError, match="everybody"):
        serve(tmp_path, host="0.0.0.0", token="")
