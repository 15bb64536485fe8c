"""Launch through dstack: a task file, retried on interruption."""

from __future__ import annotations

from typing import Any, ClassVar

import yaml
from pydantic import Field

from tidemill.errors import ConfigError
from tidemill.launch import script
from tidemill.launch.job import Job, State, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, File, Step

CODE, RUNS = "/tidemill", "/runs"
STATES: dict[str, State] = {
    "submitted": "waiting",
    "provisioning": "waiting",
    "pending": "waiting",
    "resubmitted": "waiting",
    "running": "running",
    "terminating": "running",
    "done": "done",
    "failed": "failed",
    "terminated": "stopped",
    "stopped": "stopped",
    "aborted": "stopped",
}


class DstackOptions(Options):
    image: str = Field("", description="with torch, Ray and the other dependencies; empty: dstack's own")
    gpu: str = Field("", description="of each node, such as H200:8")
    volume: str = Field("", description="a dstack volume: runs are kept there, which resuming needs")
    spot: str = Field("auto", description="spot_policy: spot, on-demand or auto")
    retry: str = Field("24h", description="how long an interrupted task is tried again")


class Dstack:
    about: ClassVar[str] = "dstack: a task on clouds or a fleet, retried on interruption"
    options: ClassVar[type[Options]] = DstackOptions
    shares_files: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ("dstack",)

    def run_folder(self, options: Options, folder: str) -> str:
        return folder if folder.startswith("/") else RUNS

    def steps(self, job: Job) -> list[Step]:
        file, code = job.folder / "task.dstack.yml", job.folder / "code"
        text = yaml.safe_dump(task(job, parse(DstackOptions, job.options, job.where)), sort_keys=False, width=120)
        return [
            Command(("mkdir", "-p", str(code))),
            Command(("tar", "-xzf", str(job.archive), "-C", str(code))),
            File(file, text),
            Command(("dstack", "apply", "-f", str(file), "-y", "-d")),
        ]

    def reference(self, job: Job, output: str) -> str:
        return job.unique

    def status(self, job: Job) -> Status:
        shown = Command(("dstack", "ps", "--all")).perform()
        line = next((line for line in shown.splitlines() if line.split()[:1] == [job.unique]), "")
        word = next((word for word in line.lower().split() if word in STATES), "")
        return Status(STATES.get(word, "unknown"), line.strip())

    def logs(self, job: Job, lines: int) -> str:
        return "\n".join(Command(("dstack", "logs", job.unique)).perform().splitlines()[-lines:])

    def stop(self, job: Job) -> None:
        Command(("dstack", "stop", job.unique, "-y")).perform()


def task(job: Job, options: DstackOptions) -> dict[str, Any]:
    if not options.volume:
        raise ConfigError("--on dstack keeps runs on a volume, or a retried task would start anew", "-o volume=NAME")
    setup = [options.setup] if options.setup else []
    made: dict[str, Any] = {
        "type": "task",
        "name": job.unique,
        "nodes": options.nodes,
        "files": [f"{job.folder / 'code'}:{CODE}"],
        "env": [f"{key}={value}" for key, value in {**options.env, "TIDEMILL_HEAD_PORT": str(options.port)}.items()],
        "commands": [*setup, f"cd {CODE}", script.supervisor(options)],
        "volumes": [f"{options.volume}:{RUNS}"],
        "spot_policy": options.spot,
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": options.retry},
    }
    if options.image:
        made["image"] = options.image
    if options.gpu:
        made["resources"] = {"gpu": options.gpu}
    return made
