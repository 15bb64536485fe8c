"""Launch through SkyPilot: a task file, run as a managed job that recovers from pre-emption."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml
from pydantic import Field

from tidemill.errors import ConfigError
from tidemill.launch import script
from tidemill.launch.job import Job, State, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, File, Step

RUNS = "/runs"
STATES: dict[str, State] = {
    "PENDING": "waiting",
    "SUBMITTED": "waiting",
    "STARTING": "waiting",
    "RECOVERING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "CANCELLING": "running",
    "CANCELLED": "stopped",
}


class SkyOptions(Options):
    accelerators: str = Field("", description="of each node, such as H200:8")
    infra: str = Field("", description="where, such as aws/us-east-1 or kubernetes; empty: the cheapest")
    bucket: str = Field("", description="s3://… or gs://…: runs are kept there, which resuming needs")
    spot: bool = Field(True, description="use spot instances; the job recovers when they are taken")
    image: str = Field("", description="image_id, such as docker:NAME")


class SkyPilot:
    about: ClassVar[str] = "SkyPilot: a managed job on any cloud, recovered from pre-emption"
    options: ClassVar[type[Options]] = SkyOptions
    shares_files: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ("sky",)

    def run_folder(self, options: Options, folder: str) -> str:
        return folder if folder.startswith("/") else RUNS

    def steps(self, job: Job) -> list[Step]:
        file, code = job.folder / "task.yaml", job.folder / "code"
        text = yaml.safe_dump(task(job, parse(SkyOptions, job.options, job.where)), sort_keys=False, width=120)
        return [
            Command(("mkdir", "-p", str(code))),
            Command(("tar", "-xzf", str(job.archive), "-C", str(code))),
            File(file, text),
            Command(("sky", "jobs", "launch", "--name", job.unique, "--yes", "--detach-run", str(file))),
        ]

    def reference(self, job: Job, output: str) -> str:
        found = re.search(r"[Jj]ob ID:?\s*(\d+)", output)
        return found.group(1) if found else job.unique

    def status(self, job: Job) -> Status:
        shown = Command(("sky", "jobs", "queue", "--all")).perform()
        line = next((line for line in shown.splitlines() if job.unique in line.split()), "")
        word = next((word for word in line.split() if word.isupper() and len(word) > 5), "")
        return Status(STATES.get(word, "failed" if word.startswith("FAILED") else "unknown"), line.strip())

    def logs(self, job: Job, lines: int) -> str:
        text = Command(("sky", "jobs", "logs", "--no-follow", "--name", job.unique)).perform()
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, job: Job) -> None:
        Command(("sky", "jobs", "cancel", "--yes", "--name", job.unique)).perform()


def task(job: Job, options: SkyOptions) -> dict[str, Any]:
    if not options.bucket:
        raise ConfigError(
            "--on skypilot keeps runs in a bucket, or a recovered job would start anew", "-o bucket=s3://…"
        )
    resources: dict[str, Any] = {"use_spot": options.spot}
    for name, value in (("infra", options.infra), ("accelerators", options.accelerators), ("image_id", options.image)):
        if value:
            resources[name] = value
    recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": options.restarts}
    return {
        "name": job.unique,
        "workdir": str(job.folder / "code"),
        "num_nodes": options.nodes,
        "resources": {**resources, "job_recovery": recovery},
        "envs": {**options.env, "TIDEMILL_HEAD_PORT": str(options.port)},
        "file_mounts": {RUNS: {"source": options.bucket, "mode": "MOUNT"}},
        "setup": options.setup or "true",
        "run": script.supervisor(options),
    }
