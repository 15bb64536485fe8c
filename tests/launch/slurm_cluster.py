"""A whole Slurm on one machine, for tests: munged, slurmctld and two slurmd with names of their own, in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
CONF = """\
ClusterName=tidemill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,requeue_delay=1
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=60
MinJobAge=3600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find this cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = dict(zip(("port", "port1", "port2"), free_ports(3)))
    (folder / "slurm.conf").write_text(CONF.format(host=socket.gethostname().split(".")[0], folder=folder, **ports))
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    with ExitStack() as stack:
        stack.enter_context(daemon(munged(folder), env))
        wait_for(folder / "munge.socket")
        stack.enter_context(daemon(["slurmctld", "-D"], env))
        for name in ("n1", "n2"):
            stack.enter_context(daemon(["slurmd", "-D", "-N", name], env))
        until_idle(env)
        yield env


def munged(folder: Path) -> list[str]:
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    return ["munged", "--foreground", "--force", *(f"--{key}={folder / name}" for key, name in names.items())]


@contextmanager
def daemon(command: list[str], env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in held]
    for door in held:
        door.close()
    return ports


def wait_for(path: Path, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)


def until_idle(env: dict[str, str], within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        shown = subprocess.run(["sinfo", "-h", "-o", "%D %t"], env=env, capture_output=True, text=True)
        if shown.stdout.split() == ["2", "idle"]:
            return
        assert time.monotonic() < deadline, f"Slurm's nodes are not idle: {shown.stdout}{shown.stderr}"
        time.sleep(0.5)
