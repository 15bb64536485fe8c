"""What every target can do. The table of targets is in `targets/table.py`."""

from __future__ import annotations

from typing import ClassVar, Protocol

from tidemill.launch.job import Job, Status
from tidemill.launch.options import Options
from tidemill.launch.steps import Step


class Target(Protocol):
    about: ClassVar[str]
    options: ClassVar[type[Options]]
    shares_files: ClassVar[bool]  # a path means the same here and there
    is_cluster: ClassVar[bool]  # a Ray cluster is there already
    programs: ClassVar[tuple[str, ...]]  # what must be installed here to send a job

    def run_folder(self, options: Options, folder: str) -> str:
        """Where runs are kept there, given the recipe's own `folder`."""
        ...

    def steps(self, job: Job) -> list[Step]:
        """All that is sent; the last step's output names the job there."""
        ...

    def reference(self, job: Job, output: str) -> str: ...

    def status(self, job: Job) -> Status: ...

    def logs(self, job: Job, lines: int) -> str: ...

    def stop(self, job: Job) -> None: ...
