"""OpenEnv: our client against its own server, in another process."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("openenv")
from tidemill.environment.api import Task
from tidemill.environment.openenv import ServerError, Session, generator, maker
from tidemill.errors import ConfigError, DataError

SERVER = Path(__file__).with_name("openenv_server.py")


def started(most):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), str(most)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def url():
    process, url = started(64)
    yield url
    process.kill()
    process.wait()


def play(environment):
    environment.reset()
    for number in range(1, 10):
        turn = environment.step(str(number))
        if turn.is_done:
            environment.close()
            return number, turn
    raise AssertionError("no number was right")


def test_a_row_has_the_opening_that_its_seed_gives_and_a_conversation_goes_on_from_it(url):
    problem = generator(url)(random.Random(5), read="text")
    assert problem.prompt == f"a number from 1 to 9, game {problem.meta['seed']}:"
    number, turn = play(maker(url)(Task(meta=problem.meta), read="text"))
    assert turn.reward == 1.0 and turn.parts == {"steps": float(number)}
    assert play(maker(url)(Task(meta=problem.meta), read="text"))[0] == number  # the seed decides


def test_conversations_at_once_have_an_episode_each(url):
    answers = {}
    threads = [
        threading.Thread(target=lambda s=s: answers.update({s: play(maker(url)(Task(seed=s)))[0]})) for s in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {s: random.Random(s).randint(1, 9) for s in range(24)}


def test_settings_reach_the_reset_and_the_action(url):
    environment = maker(url)(Task(seed=1), action="json", reset={"largest": 3})
    assert '"a number from 1 to 3, game 1:"' in environment.reset()
    assert environment.step('{"message": "0"}').text == '{"text": "no"}'
    environment.close()


@pytest.mark.parametrize("said", ["no JSON", '{"other": 1}', "[1]"])
def test_what_is_no_action_ends_the_conversation(url, said):
    environment = maker(url)(Task(seed=1), action="json")
    environment.reset()
    turn = environment.step(said)
    assert turn.is_done and turn.parts == {"broken_rules": 1.0}
    environment.close()


def test_what_the_environment_raises_is_an_error(url):
    environment = maker(url)(Task(seed=1))
    environment.reset()
    with pytest.raises(ServerError, match="a mistake of the environment"):
        environment.step("raise")
    environment.close()


def test_an_answer_that_comes_too_late_is_never_taken_for_another(url):
    environment = maker(url)(Task(seed=1), answer_s=0.5)
    environment.reset()
    with pytest.raises(ServerError, match="no answer to step"):
        environment.step("sleep")
    with pytest.raises(ServerError, match="closed"):
        environment.step("1")
    environment.close()


def test_a_full_server_is_asked_again_until_there_is_room():
    process, url = started(1)
    try:
        first = Session(url)
        with pytest.raises(ServerError):
            Session(url, patience_s=0.5)
        threading.Timer(1.0, first.close).start()
        began = time.monotonic()
        Session(url, patience_s=20).close()
        assert time.monotonic() - began > 0.5
    finally:
        process.kill()
        process.wait()


def test_a_server_that_dies_is_an_error_and_no_wait():
    process, url = started(4)
    environment = maker(url)(Task(seed=1))
    environment.reset()
    process.kill()
    process.wait()
    with pytest.raises(ServerError):
        environment.step("1")
    with pytest.raises(DataError, match="does not answer"):
        generator(url)(random.Random(1))


def test_a_field_that_is_not_there_and_an_opening_that_changed_are_refused(url):
    with pytest.raises(ConfigError, match="no field 'words'"):
        maker(url)(Task(seed=1), read="words").reset()
    environment = maker(url)(Task(meta={"seed": 1, "opening": "another"}), read="text")
    environment.reset()
    with pytest.raises(ValueError, match="another opening for seed 1"):
        environment.step("1")
