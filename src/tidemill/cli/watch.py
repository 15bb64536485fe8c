"""`tidemill watch`: a page about a run, live or finished, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli import complete
from tidemill.cli.frame import RUNS, app


@app.command(rich_help_panel=RUNS)
def watch(
    where: Annotated[
        Path, typer.Argument(help="a run's folder, or a folder of runs", autocompletion=complete.run)
    ] = Path("runs"),
    control: Annotated[
        bool, typer.Option("--control", help="let the page pause, stop, save, evaluate and change settings")
    ] = False,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="first port to try; 0: any free one", min=0, max=65535)] = 8640,
    token: Annotated[str | None, typer.Option(help="the token that the page asks for; none: a random token")] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="ask for no token; only on the loopback address")
    ] = False,
) -> None:
    """Serve a local page about runs: curves, samples, flow, machines, weights. It changes nothing without --control."""
    from tidemill.watch.serve import serve

    def told(address: str) -> None:
        print(f"{address}\nCtrl-C ends it{'; the page can steer runs' if control else ''}", flush=True)

    found = where if where.exists() or not (Path("runs") / where).exists() else Path("runs") / where
    serve(found, host=host, port=port, token="" if no_token else token, may_control=control, told=told)
