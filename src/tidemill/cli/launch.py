"""`tidemill launch`: start a recipe somewhere else, show its status, stop it, resume it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from tidemill.cli.frame import SCALE, Overrides, Recipe, app, console, say

START = "start"


class _StartsByDefault(TyperGroup):
    """Read `launch RECIPE` as `launch start RECIPE`: a first word that is no command is a recipe."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [START, *args]
        return super().parse_args(ctx, args)


launch = typer.Typer(
    cls=_StartsByDefault,
    help="Start a recipe on another machine or a cluster: tidemill launch RECIPE --on PLACE.",
    no_args_is_help=True,
)
app.add_typer(launch, name="launch", rich_help_panel=SCALE)

JobName = Annotated[str, typer.Argument(help="a launched job, as `tidemill launch list` shows it")]


@launch.command(START)
def start(
    recipe: Recipe,
    overrides: Overrides = None,
    where: Annotated[str, typer.Option("--on", help="the place; `tidemill launch places` lists them")] = "local",
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", help="KEY=VALUE: an option of the place")
    ] = None,
    include: Annotated[list[Path] | None, typer.Option(help="more files and folders to send")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be sent, and send nothing")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue a run that exists there already")] = False,
) -> None:
    """Send a recipe and the code to a place and start it there."""
    from tidemill.launch import options, send

    given = options.read(option or ())
    job = send.prepare(recipe, overrides or (), where, given, include or (), is_resume=resume, is_dry=dry_run)
    if dry_run:
        print(send.show(job))
        return
    job = send.send(job)
    say(f"{job.name} is on {where} ({job.reference or 'written to ' + str(job.folder)}); its run: {job.run}")
    say(f"tidemill launch status {job.name} · logs {job.name} · stop {job.name}", style="dim")


@launch.command()
def places() -> None:
    """List the places a recipe can be launched on, with their options."""
    from tidemill.launch.targets.table import TARGETS

    table = Table("place", "what", "options", box=None)
    for name, target in TARGETS.items():
        table.add_row(name, target.about, ", ".join(target.options.model_fields))
    console.print(table)


@launch.command("list")
def listing() -> None:
    """List the jobs launched from here."""
    from tidemill.launch import job as records

    table = Table("job", "place", "the job's name there", "launched", "run", box=None)
    for name in records.names():
        found = records.load(name)
        table.add_row(name, found.where, found.reference, found.launched, found.run)
    console.print(table)


@launch.command()
def status(
    job: JobName, as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False
) -> None:
    """Ask the place for a job's status."""
    import json

    from tidemill.launch import send

    record, now = send.status(job)
    step = send.progress(record)
    if as_json:
        print(json.dumps({"job": job, "state": now.state, "detail": now.detail, "progress": step, "run": record.run}))
    else:
        say(" · ".join(word for word in (f"{job}: {now.state}", step, now.detail) if word))


@launch.command()
def logs(job: JobName, lines: Annotated[int, typer.Option("-n", help="number of lines", min=1)] = 50) -> None:
    """Show the last lines that a job wrote."""
    from tidemill.launch import send

    print(send.logs(job, lines), end="")


@launch.command()
def stop(job: JobName) -> None:
    """Ask a job to save and end."""
    from tidemill.launch import send

    now = send.stop(job)
    say(f"{job}: {now.state}{', ' + now.detail if now.detail else ''}")


@launch.command("resume")
def resume_(job: JobName) -> None:
    """Send a job that ended before its run was complete again."""
    from tidemill.launch import send

    found = send.resume(job)
    say(f"{job} is on {found.where} again ({found.reference}), attempt {found.attempt}")
