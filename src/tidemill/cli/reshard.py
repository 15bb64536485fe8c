"""`tidemill reshard plan`: what a move of weights costs."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.frame import SCALE, Overrides, app
from tidemill.errors import ReshardError

reshard = typer.Typer(help="Work out how weights move from the learner to the rollout engines.", no_args_is_help=True)
app.add_typer(reshard, name="reshard", rich_help_panel=SCALE)


@reshard.command()
def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="take model, learn.parallel and cluster from this recipe")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="a published model's name, such as qwen2.5-32b")] = None,
    source: Annotated[str | None, typer.Option("--from", help="the learner's layout, such as tp8,dp2")] = None,
    target: Annotated[str | None, typer.Option("--to", help="the rollout's layout, such as tp4,dp4")] = None,
    devices: Annotated[int, typer.Option(help="number of devices; 0: as many as the layouts need", min=0)] = 0,
    per_node: Annotated[int, typer.Option(help="devices in a node", min=1)] = 8,
    apart: Annotated[bool, typer.Option(help="rollout has its own devices")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="show the cases of docs/weights.md; needs no recipe and no model")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Work out what moving a model's weights would cost: bytes, memory, seconds, who sends to whom. Needs no
    devices."""
    import json

    from tidemill.estimate import weight_flow
    from tidemill.recipe import load as recipe_files
    from tidemill.reshard import show as reshard_show
    from tidemill.reshard.layouts.parallel import parse

    if recipe is not None:
        config = recipe_files.load(recipe, overrides or ()).config
        engine, is_apart = weight_flow.engine_of(config)
        shapes = weight_flow.published(model) if model else weight_flow.model_of(recipe_files.model_of(config))
        wide = parse(source) if source else weight_flow.learner_of(config)
        narrow = parse(target) if target else engine
        reports = [reshard_show.planned(shapes, wide, narrow, per_node, apart or is_apart)]
    elif model and source and target:
        shapes = weight_flow.published(model)
        reports = [reshard_show.dry_plan(shapes, source, target, devices=devices, per_node=per_node, apart=apart)]
    elif dry:
        reports = weight_flow.on_paper()
    else:
        raise ReshardError(
            "nothing to plan", "name a recipe, or --model, --from and --to, or --dry for the cases on paper"
        )
    if as_json:
        plain = [found.as_dict() for found in reports]
        print(json.dumps(plain[0] if len(plain) == 1 else plain))
    else:
        print("\n\n".join(map(reshard_show.render, reports)))


@reshard.callback()
def _reshard() -> None:
    """Keep `plan` a subcommand although it is the only one."""
