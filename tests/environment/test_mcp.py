"""MCP servers as tools, with the official SDK on both sides: real processes, real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tidemill.environment.api import Task
from tidemill.environment.tools.environment import Tools
from tidemill.environment.tools.find import toolbox
from tidemill.errors import ConfigError

pytest.importorskip("mcp")
from tidemill.environment.tools import mcp

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]


@pytest.fixture
def box():
    """Make tools of the server, and end what was started for them."""
    made = []

    def make(**settings):
        tools = toolbox([{"mcp": {"command": COMMAND, **settings}}])
        made.extend(tools.values())
        return tools

    yield make
    for tool in made:
        tool.close()
    mcp.close_all()
    mcp._listed.clear()


@pytest.fixture(scope="module")
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_tools_of_a_server_have_its_schemas_and_answer(box):
    tools = box()
    assert set(tools) == {"add", "note", "fail", "sleep", "leave", "pid"}
    function = tools["add"].schema["function"]
    assert function["description"] == "Add two numbers." and function["parameters"]["required"] == ["a", "b"]
    assert tools["add"].call({"a": 2, "b": 40}) == "42"


def test_a_server_over_http_answers_too(box, address):
    tools = box(command="", url=address, only=["add", "note"])
    assert set(tools) == {"add", "note"} and tools["add"].call({"a": 1, "b": 2}) == "3"


def test_a_header_comes_from_the_environment_and_must_be_there(box, address, monkeypatch):
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN is not in the environment"):
        box(command="", url=address, headers_env={"authorization": "NO_SUCH_TOKEN"})
    monkeypatch.setenv("A_TOKEN", "Bearer x")
    assert box(command="", url=address, headers_env={"authorization": "A_TOKEN"})["add"].call({"a": 1, "b": 1}) == "2"


def test_a_shared_session_is_kept_over_calls_and_conversations(box):
    first, second = box(), box()
    assert first["pid"].call({}) == second["pid"].call({})
    first["note"].call({"text": "one"})
    assert second["note"].call({"text": "two"}) == "one, two"


def test_a_session_of_its_own_knows_nothing_of_others_and_ends_with_its_conversation(box):
    first, second = box(session="own"), box(session="own")
    first["note"].call({"text": "one"})
    assert second["note"].call({"text": "two"}) == "two" and first["note"].call({"text": "three"}) == "one, three"
    process = int(first["pid"].call({}))
    first["note"].close()
    deadline = time.monotonic() + 20
    while is_alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_tool_raises_and_what_it_is_not_given_is_told(box):
    tools = box()
    with pytest.raises(ValueError, match="no luck"):
        tools["fail"].call({"why": "no luck"})
    with pytest.raises(ValueError, match="b"):
        tools["add"].call({"a": 1})


def test_a_call_that_takes_too_long_is_ended_and_the_session_goes_on(box):
    tools = box(timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)tim|in 0.5 s"):
        tools["sleep"].call({"seconds": 3})
    assert time.monotonic() - began < 3
    assert box(timeout_s=20.0)["add"].call({"a": 1, "b": 1}) == "2"


def test_a_server_that_ends_is_started_again_by_the_next_call(box):
    tools = box(timeout_s=5.0)
    before = tools["pid"].call({})
    with pytest.raises(Exception):  # noqa: B017  # the SDK's own
        tools["leave"].call({})
    deadline = time.monotonic() + 20
    while True:
        try:
            assert tools["pid"].call({}) != before
            return
        except Exception:
            assert time.monotonic() < deadline


def test_threads_call_at_once(box):
    tools, answers = box(), []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(tools["add"].call({"a": i, "b": 0}))) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, answers)) == list(range(16))


def test_a_conversation_calls_them_and_is_told_of_failures():
    tools = Tools(Task(), [{"mcp": {"command": COMMAND}}], opening="<", closing=">")
    turn = tools.step('<{"name": "add", "arguments": {"a": 2, "b": 3}}>')
    assert "5" in turn.text and turn.parts == {"calls": 1.0, "failed_calls": 0.0}
    assert "no luck" in tools.step('<{"name": "fail", "arguments": {"why": "no luck"}}>').text
    assert [s["function"]["name"] for s in Tools.offered([{"mcp": {"command": COMMAND, "only": ["add"]}}])] == ["add"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "either a command or a url"),
        ({"command": "x", "url": "http://x"}, "either a command or a url"),
        ({"command": "no-such-command-here"}, "did not start"),
        ({"command": f"{sys.executable} -c pass", "start_s": 5.0}, "MCP server"),
        ({"url": "http://127.0.0.1:9/mcp"}, "MCP server"),
        ({"command": COMMAND, "only": ["subtract"]}, "has no tool 'subtract'"),
        ({"command": COMMAND, "session": "mine"}, "write shared or own"),
        ({"comand": "x"}, "no argument 'comand'"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(settings, says):
    with pytest.raises(ConfigError) as refused:
        toolbox([{"mcp": settings}])
    assert says in f"{refused.value.message}; {refused.value.remedy}"
