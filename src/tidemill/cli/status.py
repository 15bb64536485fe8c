"""`tidemill status`, `stacks` and `scale`: a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import RUNS, Run, app, say


@app.command(rich_help_panel=RUNS)
def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show what a run on worker processes or Ray is doing: every worker and stage, and which waits for which."""
    import json

    from tidemill.cluster.driver import status as statuses

    found = statuses.read(_folder_of(run))
    print(json.dumps(statuses.as_plain(found)) if as_json else statuses.render(found))


@app.command(rich_help_panel=RUNS)
def stacks(run: Run) -> None:
    """Show the stack of every worker of a run on worker processes or Ray; uses py-spy if it is installed."""
    from tidemill.cluster.driver import status as statuses

    folder = _folder_of(run)
    for who, text in statuses.all_stacks(folder, statuses.read(folder)):
        print(f"== {who}\n{text}\n")


@app.command(rich_help_panel=RUNS)
def scale(
    run: Run, rollouts: Annotated[int, typer.Option(help="number of rollout workers from now on", min=1)]
) -> None:
    """Add rollout workers to a run on worker processes or Ray, or remove some, while it goes on."""
    from tidemill.cluster.driver import status as statuses

    statuses.want_rollouts(_folder_of(run), rollouts)
    say(f"{run} will have {rollouts} rollout worker{'s' * (rollouts > 1)} soon; `tidemill status {run}` shows them")


def _folder_of(run: Path) -> Path:
    from tidemill.observe.run_folder import RunFolder

    return RunFolder.open(run, exclusive=False).path
