"""Snapshots, places, rank tables and the supervisor: the parts that every target shares."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch import recipes
from tidemill.errors import ConfigError
from tidemill.launch import entry, node, place, rank_table, send, snapshot
from tidemill.launch import job as jobs
from tidemill.launch.place import Place

# Snapshots


def make_package(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "inner" / "b.py").write_text("b = 2\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_bytes(b"x")
    return folder


def names_in(archive: Path) -> list[str]:
    return subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True).stdout.split()


def test_a_snapshot_holds_the_package_and_the_recipe_and_no_caches(tmp_path: Path) -> None:
    made = snapshot.pack("name: x\n", tmp_path / "to", package=make_package(tmp_path / "package"))
    assert names_in(made.path) == ["recipe.yaml", "src/tidemill/a.py", "src/tidemill/inner/b.py"]


def test_a_snapshots_name_is_its_content(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package")
    one = snapshot.pack("name: x\n", tmp_path / "one", package=package)
    os.utime(package / "a.py", (0, 0))
    two = snapshot.pack("name: x\n", tmp_path / "two", package=package)
    (package / "a.py").write_text("a = 2\n")
    three = snapshot.pack("name: x\n", tmp_path / "two", package=package)
    assert one.digest == two.digest != three.digest
    assert one.path.read_bytes() == two.path.read_bytes()


def test_files_git_ignores_do_not_travel(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package")
    subprocess.run(["git", "init", "-q", str(package)], check=True)
    (package / ".gitignore").write_text("*.secret\n")
    (package / "key.secret").write_text("x")
    names = names_in(snapshot.pack("", tmp_path / "to", package=package).path)
    assert "src/tidemill/a.py" in names and not any("secret" in name for name in names)


def test_included_files_lie_where_they_lay_and_cannot_come_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, here = make_package(tmp_path / "package"), tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (here / "data" / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(here)
    assert "data/rows.jsonl" in names_in(snapshot.pack("", tmp_path / "to", [Path("data")], package).path)
    with pytest.raises(ConfigError, match="outside"):
        snapshot.pack("", tmp_path / "to", [package], package)


# Places


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, Place(0, 1, "127.0.0.1")),
        ({"TIDEMILL_NODE_RANK": "1", "TIDEMILL_NODES": "2", "TIDEMILL_HEAD": "a"}, Place(1, 2, "a")),
        (
            {
                "SLURM_NODEID": "1",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_LAUNCH_NODE_IPADDR": "h",
                "TIDEMILL_HEAD_PORT": "7",
            },
            Place(1, 2, "h", 7),
        ),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "h\ni"}, Place(1, 2, "h")),
        ({"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "3", "DSTACK_MASTER_NODE_IP": "h"}, Place(1, 3, "h")),
        ({"VC_TASK_INDEX": "1", "MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "h,i"}, Place(1, 2, "h")),
        ({"VC_TASK_INDEX": "0", "MA_NUM_HOSTS": "1"}, Place(0, 1, "127.0.0.1")),
    ],
)
def test_a_node_finds_its_place_in_its_schedulers_environment(given: dict[str, str], found: Place) -> None:
    assert place.find(given) == found


@pytest.mark.parametrize(
    "given",
    [
        {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
        {"TIDEMILL_NODE_RANK": "2", "TIDEMILL_NODES": "2", "TIDEMILL_HEAD": "a"},
    ],
)
def test_half_a_place_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        place.find(given)


# Rank tables


def device(number: int, rank: int) -> dict[str, str]:
    return {"device_id": str(number), "device_ip": f"192.168.0.{rank}", "rank_id": str(rank)}


def table(**more: Any) -> dict[str, Any]:
    servers = [
        {"server_id": "10.0.0.2", "device": [device(1, 3), device(0, 2)]},
        {"server_id": "10.0.0.1", "device": [device(0, 0), device(1, 1)]},
    ]
    return {"status": "completed", "version": "1.0", "server_count": "2", "server_list": servers, **more}


def test_a_rank_table_gives_hosts_and_devices_in_the_order_of_ranks() -> None:
    found = rank_table.parse(table())
    assert [server.name for server in found.servers] == ["10.0.0.1", "10.0.0.2"]
    assert [(d.rank, d.device) for d in found.servers[1].devices] == [(2, 0), (3, 1)]
    assert found.ranks == 4 and found.index_of("10.0.0.2") == 1


def test_a_rank_table_of_super_nodes_says_which_server_is_in_which() -> None:
    pods = [{"super_pod_id": "7", "server_list": [{"server_id": "10.0.0.1"}, {"server_id": "10.0.0.2"}]}]
    plain = table(version="1.2", super_pod_list=pods)
    plain["server_list"][1]["host_ip"] = "172.16.0.1"
    plain["server_list"][1]["device"][0]["super_device_id"] = "5"
    first = rank_table.parse(plain).servers[0]
    assert (first.address, first.super_node, first.devices[0].super_device) == ("172.16.0.1", "7", "5")


def test_modelarts_older_table_numbers_devices_as_they_are_listed() -> None:
    instances = [
        {"pod_name": f"job-{n}", "server_id": f"10.0.0.{n}", "devices": [{"device_id": "0", "device_ip": "x"}] * 2}
        for n in (1, 2)
    ]
    groups = [{"group_name": "worker", "instance_count": "2", "device_count": "4", "instance_list": instances}]
    found = rank_table.parse({"status": "completed", "group_count": "1", "group_list": groups})
    assert [d.rank for server in found.servers for d in server.devices] == [0, 1, 2, 3]
    assert found.index_of("job-2") == 1


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (table(status="initializing"), "not ready"),
        (table(server_list=[]), "no server"),
        (table(server_list=[{"server_id": "a", "device": [device(0, 1)]}]), "ranks are"),
        ({"status": "completed"}, "server_list"),
        ([], "no rank table"),
    ],
)
def test_a_rank_table_that_cannot_be_meant_is_refused(plain: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rank_table.parse(plain)


def test_a_rank_table_gives_a_node_its_place(tmp_path: Path) -> None:
    file = tmp_path / "hccl.json"
    file.write_text(json.dumps(table()))
    assert place.find({"RANK_TABLE_FILE": str(file), "SERVER_ID": "10.0.0.2"}) == Place(1, 2, "10.0.0.1")
    with pytest.raises(ConfigError, match=r"no server '10.0.0.3'; did you mean"):
        place.find({"RANK_TABLE_FILE": str(file), "SERVER_ID": "10.0.0.3"})


# The supervisor


def ending(folder: Path, *codes: int) -> list[str]:
    """A command that ends with the next of some codes each time; a negative one is a signal."""
    (folder / "codes").write_text(json.dumps(codes))
    text = (
        "import json, os, pathlib, sys\n"
        f"path = pathlib.Path({str(folder / 'codes')!r})\n"
        "code, *rest = json.loads(path.read_text())\n"
        "path.write_text(json.dumps(rest))\n"
        "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)\n"
    )
    return [sys.executable, "-I", "-c", text]


@pytest.mark.parametrize(
    ("codes", "restarts", "ends", "left"),
    [
        ((0,), 3, 0, 0),
        ((-9, -9, 0), 3, 0, 0),
        ((-9, -9, -9, 0), 2, 137, 1),
        ((78, 0), 3, 78, 1),
        ((75, 0), 3, 75, 1),
    ],
)
def test_a_killed_run_is_started_again_and_a_stopped_or_refused_one_is_not(
    codes: tuple[int, ...], restarts: int, ends: int, left: int, tmp_path: Path
) -> None:
    with node.Stop() as stop:
        assert node.supervise(ending(tmp_path, *codes), restarts, stop, lambda: 0, pause_s=0) == ends
    assert len(json.loads((tmp_path / "codes").read_text())) == left


def test_progress_gives_a_run_its_restarts_back(tmp_path: Path) -> None:
    size = iter(range(100))
    with node.Stop() as stop:
        assert node.supervise(ending(tmp_path, -9, -9, -9, 0), 1, stop, lambda: next(size), pause_s=0) == 0


def test_a_signal_is_passed_on_once_and_the_run_is_not_started_again(tmp_path: Path) -> None:
    text = (
        "import pathlib, signal, sys, time\n"
        f"path = pathlib.Path({str(tmp_path / 'up')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "path.touch(); time.sleep(60)\n"
    )

    def send_term() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_term).start()
    with node.Stop() as stop:
        assert node.supervise([sys.executable, "-I", "-c", text], 3, stop, lambda: 0) == entry.STOPPED


# Local, and ssh with a stand-in that runs the command here


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(jobs.ENV_FOLDER, str(tmp_path / "launch"))
    recipes.write(tmp_path)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    # A supervisor that writes its place and ends; an ssh that runs the command in a folder named after the host.
    (bin_ / "supervisor").write_text("#!/bin/sh\necho $2 rank ${TIDEMILL_NODE_RANK:-none}; test -f recipe.yaml\n")
    (bin_ / "ssh").write_text(
        f'#!/bin/sh\nshift 4\nmkdir -p {tmp_path}/$1 && cd {tmp_path}/$1 && shift && exec sh -c "$1"\n'
    )
    for file in bin_.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    return tmp_path


def until_ended(name: str) -> str:
    deadline = time.monotonic() + 30
    while (state := send.status(name)[1].state) not in jobs.ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return state


def test_a_local_job_runs_from_its_snapshot_and_says_how_it_ended(here: Path) -> None:
    job = send.send(send.prepare("small.yaml", [], "local", {"python": "supervisor"}))
    assert until_ended(job.name) == "done"
    assert send.logs(job.name, 5) == "tidemill.launch.node rank none\n"
    assert (job.folder / "code" / "src" / "tidemill" / "launch" / "node.py").exists()


def test_a_job_stopped_here_is_stopped_and_its_processes_are_gone(here: Path) -> None:
    (here / "bin" / "supervisor").write_text("#!/bin/sh\ntrap 'kill $p; exit 75' TERM\nsleep 300 & p=$!\nwait $p\n")
    job = send.send(send.prepare("small.yaml", [], "local", {"python": "supervisor"}))
    assert send.status(job.name)[1].state == "running"
    send.stop(job.name)
    assert until_ended(job.name) == "stopped"
    again = send.resume(job.name)
    assert again.attempt == 2 and send.status(job.name)[1].state == "running"
    send.stop(job.name)
    assert until_ended(job.name) == "stopped"


def test_ssh_starts_every_host_with_its_rank_and_asks_the_first(here: Path) -> None:
    (here / "hosts").write_text("one\ntwo\n")
    job = send.send(send.prepare("small.yaml", [], "ssh", {"python": "supervisor"}))
    assert until_ended(job.name) == "done"
    assert send.logs(job.name, 5) == "tidemill.launch.node rank 0\n"
    second = here / "two" / ".tidemill" / "launch" / job.label
    deadline = time.monotonic() + 30
    while not (second / "exit").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (second / "log").read_text() == "tidemill.launch.node rank 1\n"
    assert (second / "token").stat().st_mode & 0o077 == 0


def test_an_unknown_job_is_refused_with_a_suggestion(here: Path) -> None:
    send.send(send.prepare("small.yaml", [], "local", {"python": "supervisor"}))
    with pytest.raises(ConfigError, match="did you mean small-1"):
        send.status("smal-1")
