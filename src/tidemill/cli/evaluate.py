"""`tidemill eval`: measure a model on held-out problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.frame import RESULTS, Best, Overrides, Raw, Step, Where, app, console, errors
from tidemill.errors import RewardError

if TYPE_CHECKING:
    from tidemill.flow.records import Activity


@app.command("eval", rich_help_panel=RESULTS)
def evaluate(
    where: Where,
    recipe: Annotated[str | None, typer.Option(help="the recipe with problems and rewards; a run has its own")] = None,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option("-k", "--samples", help="sampled answers per problem, for pass@k", min=1)] = 1,
    size: Annotated[int, typer.Option(help="number of held-out problems; 0: as many as the recipe says", min=0)] = 0,
    step: Step = None,
    best: Best = False,
    raw: Raw = False,
    full: Annotated[bool, typer.Option("--full", help="show whole answers")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Evaluate a run or a model on held-out problems: greedy accuracy, pass@1 and pass@k."""
    import json

    from tidemill import show
    from tidemill.run import start as launch

    with errors.status("loading the model …") as status:

        def tell(activity: Activity) -> None:
            status.update(f"{activity.what} {activity.done:,} of {activity.total:,}")

        evaluation = launch.evaluate(
            where, recipe, overrides or (), samples=samples, size=size, raw=raw, step=step, best=best, tell=tell
        )
    if as_json:
        print(json.dumps(evaluation.metrics() | evaluation.failures()))
    else:
        console.print(show.evaluation_table(evaluation, full))
    if evaluation.failed and evaluation.failed == evaluation.scored:
        raise RewardError(
            f"every reward failed, so these figures say nothing about the model: {evaluation.first_failure}",
            "fix the reward function, then measure again",
        )
