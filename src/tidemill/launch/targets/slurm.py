"""Launch on Slurm: one batch script, Ray inside the allocation, requeue and resume.

A step that is killed is started again inside the allocation. Before the time limit, or when Slurm pre-empts the job,
the run saves and the job is put back into the queue; a node that fails makes Slurm requeue it. Each time the run goes
on.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tidemill.launch import place, script
from tidemill.launch.entry import DONE, REFUSED, STOPPED
from tidemill.launch.job import Job, State, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, File, LaunchError, Step, Token

STATES: dict[str, State] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "CONFIGURING": "running",
    "RUNNING": "running",
    "COMPLETING": "running",
    "COMPLETED": "done",
    "CANCELLED": "stopped",
    "PREEMPTED": "waiting",
}


class SlurmOptions(Options):
    partition: str | None = Field(None, description="--partition")
    account: str | None = Field(None, description="--account")
    qos: str | None = Field(None, description="--qos")
    time: str | None = Field(None, description="--time, such as 8:00:00; the job requeues itself before it ends")
    gpus_per_node: int = Field(0, ge=0, description="--gpus-per-node")
    cpus_per_task: int | None = Field(None, ge=1, description="--cpus-per-task: the cores of one node's share")
    mem: str | None = Field(None, description="--mem, such as 500G")
    constraint: str | None = Field(None, description="--constraint")
    exclusive: bool = Field(False, description="--exclusive: whole nodes")
    warn_s: int = Field(180, ge=10, description="seconds before the limit at which the run saves and requeues")
    more: list[str] = Field([], description="further #SBATCH words, such as ['--reservation=x']")


class Slurm:
    about: ClassVar[str] = "a Slurm cluster: Ray inside the allocation, requeue and resume"
    options: ClassVar[type[Options]] = SlurmOptions
    shares_files: ClassVar[bool] = True
    is_cluster: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ("sbatch",)

    def run_folder(self, options: Options, folder: str) -> str:
        return str(Path(folder).expanduser().resolve())

    def steps(self, job: Job) -> list[Step]:
        options = parse(SlurmOptions, job.options, job.where)
        code, batch = job.folder / "code", job.folder / "job.sbatch"
        return [
            Command(("mkdir", "-p", str(code))),
            Command(("tar", "-xzf", str(job.archive), "-C", str(code))),
            Token(job.folder / "token"),
            File(batch, render(job, options)),
            Command(("sbatch", "--parsable", str(batch))),
        ]

    def reference(self, job: Job, output: str) -> str:
        return output.strip().split(";")[0]

    def status(self, job: Job) -> Status:
        try:
            shown = Command(("scontrol", "show", "job", "--oneliner", job.reference)).perform()
        except LaunchError:  # Slurm forgets ended jobs after MinJobAge; its accounting, where kept, does not
            return _accounted(job)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        state = fields.get("JobState", "")
        code = int(fields.get("ExitCode", "0:0").split(":")[0])
        detail = f"Slurm job {job.reference} {state}, restarted {fields.get('Restarts', '0')} times"
        return Status("stopped" if code == STOPPED else STATES.get(state, "failed"), detail)

    def logs(self, job: Job, lines: int) -> str:
        return Command(("tail", "-n", str(lines), str(job.folder / "log"))).perform()

    def stop(self, job: Job) -> None:
        """The run saves; the script then ends instead of requeueing. A job that waits is cancelled."""
        (job.folder / "stop").touch()
        if self.status(job).state == "waiting":
            Command(("scancel", job.reference)).perform()
        else:
            Command(("scancel", "--signal=TERM", job.reference)).perform()


def _accounted(job: Job) -> Status:
    try:
        shown = Command(("sacct", "-n", "-X", "-P", "-o", "State", "-j", job.reference)).perform().strip()
    except LaunchError:
        shown = ""
    word = shown.split()[0] if shown else ""
    detail = f"Slurm job {job.reference} {word or 'is no longer known to Slurm; `launch logs` has its lines'}"
    return Status(STATES.get(word, "failed") if word else "unknown", detail)


def render(job: Job, options: SlurmOptions) -> str:
    head = [f"#SBATCH {word}" for word in words(job, options)]
    exported = script.exports({**options.env, place.TOKEN_PATH: str(job.folder / "token")})
    port = f"export {place.HEAD_PORT}=$((20000 + SLURM_JOB_ID % 20000))"
    lines = ["#!/bin/bash", *head, f"cd {shlex.quote(str(job.folder / 'code'))} || exit 72", *exported, port]
    lines += [options.setup] if options.setup else []
    return "\n".join([*lines, LOOP.format(start=script.supervisor(options), **_numbers(job, options))])


def _numbers(job: Job, options: SlurmOptions) -> dict[str, object]:
    numbers: dict[str, object] = {"done": DONE, "stopped": STOPPED, "refused": REFUSED, "restarts": options.restarts}
    return numbers | {"stop": shlex.quote(str(job.folder / "stop"))}


def words(job: Job, options: SlurmOptions) -> list[str]:
    found = [f"--job-name={job.label}", f"--nodes={options.nodes}", "--ntasks-per-node=1", "--requeue"]
    found += ["--open-mode=append", f"--output={job.folder / 'log'}", f"--signal=B:USR1@{options.warn_s}"]
    for name in ("partition", "account", "qos", "time", "cpus_per_task", "mem", "constraint"):
        if (value := getattr(options, name)) is not None:
            found.append(f"--{name.replace('_', '-')}={value}")
    found += [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    return [*found, *(["--exclusive"] if options.exclusive else []), *options.more]


# One step holds a supervisor on every node. A signal reaches them through scancel: srun itself kills its tasks when it
# gets TERM, so the run could not save. At its time limit Slurm sends TERM to the steps and to this script, which stays
# to put the job back into the queue.
LOOP = """\
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM
left={restarts}
while true; do
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \\
    bash -c {quote}{start}{quote} &
  step=$!
  wait "$step"
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"; code=$?
  if [ "$code" -eq {done} ] || [ "$code" -eq {refused} ]; then exit "$code"; fi
  if [ -e {stop} ]; then exit {stopped}; fi
  if [ "$code" -eq {stopped} ]; then
    echo "the run was stopped and saved: the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"; sleep 60; exit {stopped}
  fi
  if [ "$left" -le 0 ]; then exit "$code"; fi
  left=$((left - 1))
  echo "the step ended with $code: the run is resumed inside the allocation ($left more)"
  sleep 2
done
""".replace("{quote}", "'")
