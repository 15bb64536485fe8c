"""`tidemill status`, `stacks` and `scale`: a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import Run, app, say


@app.command()
def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """What a run on a cluster is doing: every worker, every stage, who waits for whom and since when."""
    import json

    from tidemill.cluster.driver import status as statuses

    found = statuses.read(_folder_of(run))
    print(json.dumps(statuses.as_plain(found)) if as_json else statuses.render(found))


@app.command()
def stacks(run: Run) -> None:
    """What every worker of a run on a cluster is at, line by line: by py-spy where it is installed."""
    from tidemill.cluster.driver import status as statuses

    folder = _folder_of(run)
    for who, text in statuses.all_stacks(folder, statuses.read(folder)):
        print(f"== {who}\n{text}\n")


@app.command()
def scale(run: Run, rollouts: Annotated[int, typer.Option(help="rollout workers from now on", min=1)]) -> None:
    """Let rollout workers join or leave a run on a cluster while it goes on."""
    from tidemill.cluster.driver import status as statuses

    statuses.want_rollouts(_folder_of(run), rollouts)
    say(f"{run} will have {rollouts} rollout workers within seconds; `tidemill status {run}` shows them")


def _folder_of(run: Path) -> Path:
    from tidemill.observe.run_folder import RunFolder

    return RunFolder.open(run, exclusive=False).path
