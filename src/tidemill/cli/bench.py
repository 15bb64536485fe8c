"""`tidemill bench`: measure, with peers in the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.frame import OTHER, app, console


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, rich_help_panel=OTHER)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="the benchmark; without it, they are listed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Run a benchmark: tidemill bench NAME --option value. Other frameworks are measured in the same run."""
    from tidemill import bench as benches
    from tidemill import show

    if name is None:
        console.print(show.benches_table(benches.listing()))
        return
    options = benches.parse_options(context.args)
    with benches.only_result_on_stdout():
        result = benches.run(name, options)
    if as_json:
        print(benches.as_json(result))
    else:
        console.print(benches.render(result))
