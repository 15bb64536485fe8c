"""Launch on a Ray cluster that runs: a Ray job, submitted to the cluster's dashboard address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from tidemill.errors import MissingExtra
from tidemill.launch import script
from tidemill.launch.job import Job, State, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, LaunchError, Request, Step

STATES: dict[str, State] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


class RayOptions(Options):
    address: str = Field("http://127.0.0.1:8265", description="of the cluster's dashboard")
    cpus: float = Field(0.0, ge=0, description="CPUs that the driver itself asks for")
    gpus: float = Field(0.0, ge=0, description="GPUs that the driver itself asks for")


class RayJobs:
    about: ClassVar[str] = "a Ray cluster that runs, by job submission"
    options: ClassVar[type[Options]] = RayOptions
    shares_files: ClassVar[bool] = True
    is_cluster: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = ()

    def run_folder(self, options: Options, folder: str) -> str:
        """Must be storage that every node of the cluster sees, or the head's own disk."""
        return str(Path(folder).expanduser().resolve())

    def steps(self, job: Job) -> list[Step]:
        options = parse(RayOptions, job.options, job.where)
        code = job.folder / "code"
        return [
            Command(("mkdir", "-p", str(code))),
            Command(("tar", "-xzf", str(job.archive), "-C", str(code))),
            Request(f"submit_job at {options.address}", body(job, options, code), _sender(options.address)),
        ]

    def reference(self, job: Job, output: str) -> str:
        return output

    def status(self, job: Job) -> Status:
        client = connect(parse(RayOptions, job.options, job.where).address)
        info = client.get_job_info(job.reference)
        return Status(STATES.get(str(info.status), "unknown"), info.message or "")

    def logs(self, job: Job, lines: int) -> str:
        text = connect(parse(RayOptions, job.options, job.where).address).get_job_logs(job.reference)
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, job: Job) -> None:
        """Ray sends SIGTERM first: the run saves, then ends."""
        connect(parse(RayOptions, job.options, job.where).address).stop_job(job.reference)


def body(job: Job, options: RayOptions, code: Path) -> dict[str, Any]:
    setup = f"{options.setup}\n" if options.setup else ""
    return {
        "entrypoint": setup + script.supervisor(options),
        "submission_id": job.unique,
        "runtime_env": {"working_dir": str(code), "env_vars": dict(options.env)},
        "metadata": {"tidemill_job": job.name, "snapshot": job.digest},
        "entrypoint_num_cpus": options.cpus,
        "entrypoint_num_gpus": options.gpus,
    }


def _sender(address: str) -> Any:
    def send(given: Mapping[str, Any]) -> str:
        return str(connect(address).submit_job(**given))

    return send


def connect(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise MissingExtra("--on ray", "ray[default]", "cluster") from None
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0][:200]
        raise LaunchError(f"no Ray dashboard answers at {address}: {said}", "-o address=http://HEAD:8265") from error
