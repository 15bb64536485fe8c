"""Launch on this machine: a process that outlives the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tidemill.errors import ConfigError
from tidemill.launch import script
from tidemill.launch.job import Job, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, File, Step
from tidemill.launch.targets import detached


class Local:
    about: ClassVar[str] = "this machine, as a process that outlives the terminal"
    options: ClassVar[type[Options]] = Options
    shares_files: ClassVar[bool] = True
    is_cluster: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ()

    def run_folder(self, options: Options, folder: str) -> str:
        if options.nodes > 1:
            raise ConfigError("this machine is one node", "cluster.executor=processes uses all of it; --on ssh several")
        return str(Path(folder).expanduser().resolve())

    def steps(self, job: Job) -> list[Step]:
        code = job.folder / "code"
        return [
            Command(("mkdir", "-p", str(code))),
            Command(("tar", "-xzf", str(job.archive), "-C", str(code))),
            File(job.folder / "job.sh", script.script(parse(Options, job.options, job.where))),
            Command(("sh", "-c", detached.start(str(job.folder)))),
        ]

    def reference(self, job: Job, output: str) -> str:
        return output.strip()

    def status(self, job: Job) -> Status:
        return detached.read_status(_shell(detached.status(str(job.folder))))

    def logs(self, job: Job, lines: int) -> str:
        return _shell(detached.logs(str(job.folder), lines))

    def stop(self, job: Job) -> None:
        _shell(detached.stop(str(job.folder)))


def _shell(text: str) -> str:
    return Command(("sh", "-c", text)).perform()
