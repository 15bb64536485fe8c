"""`tidemill jobs`: a queue of runs that share one machine or one Ray cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tidemill.cli.frame import SCALE, app, console, say

jobs = typer.Typer(help="Queue runs that share one machine or one Ray cluster.", no_args_is_help=True)
app.add_typer(jobs, name="jobs", rich_help_panel=SCALE)

Folder = Annotated[Path, typer.Option("--queue", help="the queue's folder", envvar="TIDEMILL_QUEUE")]
QUEUE = Path("runs/.queue")


@jobs.command(context_settings={"ignore_unknown_options": True})
def add(
    what: Annotated[list[str], typer.Argument(help="a recipe and its overrides; with --command, a command line")],
    priority: Annotated[int, typer.Option(help="jobs of higher priority run first and may preempt others")] = 0,
    slots: Annotated[int, typer.Option(help="devices (or slots) that the job needs", min=1)] = 1,
    group: Annotated[str, typer.Option(help="a group of jobs that `run --limit NAME=K` limits together")] = "",
    is_command: Annotated[bool, typer.Option("--command", help="WHAT is a command instead of a recipe")] = False,
    resumable: Annotated[
        bool,
        typer.Option(help="with --command: the command continues when it is started again, so it may be preempted"),
    ] = False,
    on_ray: Annotated[bool, typer.Option("--on-ray", help="run the recipe on the queue's Ray cluster")] = False,
    queue: Folder = QUEUE,
) -> None:
    """Add a recipe (or a command) to the queue."""
    from tidemill.jobs.queue import Queue
    from tidemill.jobs.recipe import recipe_job
    from tidemill.jobs.state import Spec

    if is_command:
        name = " ".join(what)[:40]
        spec = Spec(tuple(what), name, priority, slots, group, is_resumable=resumable, folder=os.getcwd())
    else:
        spec = recipe_job(queue, what[0], what[1:], priority=priority, slots=slots, group=group, on_ray=on_ray)
    say(f"job {Queue(queue).add(spec)}: {spec.name}, priority {priority}")


@jobs.command("list")
def listing(
    queue: Folder = QUEUE,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list on standard output")] = False,
) -> None:
    """Show the queue: running jobs, waiting jobs in their order, and ended ones."""
    import json
    from dataclasses import asdict

    from tidemill.jobs.queue import Queue
    from tidemill.jobs.state import in_order

    found = Queue(queue).jobs.values()
    phases = ("running", "waiting", "done", "failed", "cancelled")
    ordered = [job for phase in phases for job in in_order(j for j in found if j.phase == phase)]
    if as_json:
        print(json.dumps([asdict(job) for job in ordered]))
        return
    table = Table("job", "phase", "priority", "slots", "attempt", "what", box=None)
    for job in ordered:
        phase = "preempted" if job.phase == "running" and job.is_preempted else job.phase
        count = str(job.spec.slots)
        table.add_row(str(job.id), phase, str(job.spec.priority), count, str(job.attempt), job.spec.name)
    console.print(table)


@jobs.command()
def cancel(
    number: Annotated[int, typer.Argument(help="the job's number in `tidemill jobs list`")], queue: Folder = QUEUE
) -> None:
    """Remove a job from the queue; a running job is asked to save and end."""
    from tidemill.jobs.queue import Queue

    job = Queue(queue).cancel(number)
    say(f"job {number}: {'asked to save and end' if job.phase == 'running' else job.phase}")


@jobs.command()
def run(
    slots: Annotated[
        int, typer.Option(help="slots that jobs share; 0: the number of devices, or 1 without devices", min=0)
    ] = 0,
    limit: Annotated[list[str] | None, typer.Option(help="GROUP=K: at most K jobs of a group at once")] = None,
    ray: Annotated[str, typer.Option(help="host:port of a Ray cluster that jobs share")] = "",
    drain: Annotated[bool, typer.Option("--drain", help="end when the queue is empty")] = False,
    grace_s: Annotated[float, typer.Option(help="seconds that a preempted job may take to save", min=0)] = 300.0,
    queue: Folder = QUEUE,
) -> None:
    """Run the queue. Ctrl-C ends only the queue: running jobs continue, and the next `run` finds them."""
    from tidemill.jobs.queue import Queue
    from tidemill.jobs.recipe import capacity, parse_limits
    from tidemill.jobs.runner import Processes

    limits = parse_limits(limit or ())
    found, visible = capacity(slots, ray)
    env = {"RAY_ADDRESS": ray} if ray else {}
    say(f"running {queue} with {found} slot{'s' * (found > 1)}; Ctrl-C ends the queue, not its jobs", style="dim")
    held = Queue(queue)
    try:
        held.run(
            Processes(held.folder / "jobs", env, visible),
            found,
            limits,
            is_drain=drain,
            grace_s=grace_s,
        )
    except KeyboardInterrupt:
        sys.exit(130)
