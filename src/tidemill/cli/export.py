"""`tidemill export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import RESULTS, Best, Raw, Step, Where, app, say
from tidemill.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
MEAN = ": the running mean of the weights (learn.ema), as evaluations see it; --raw gives the weights themselves"


@app.command(rich_help_panel=RESULTS)
def export(
    run: Where,
    to: Annotated[Path | None, typer.Option("--to", help="the folder to write")] = None,
    push: Annotated[str | None, typer.Option("--push", help="org/name: upload to the Hugging Face hub")] = None,
    private: Annotated[bool, typer.Option("--private", help="make the repository of --push private")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the low-rank adapters, in the format of peft")
    ] = False,
    step: Step = None,
    best: Best = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; none: the dtype of the model that the run started from"),
    ] = None,
    raw: Raw = False,
    without_bias: Annotated[
        bool,
        typer.Option(
            "--without-bias", help="leave out the router's balancing bias, which this model class cannot hold"
        ),
    ] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder, for AutoModelForCausalLM.from_pretrained."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known", f"one of {', '.join(DTYPES)}")
    from tidemill.models.box import hub
    from tidemill.run.trained import export as write
    from tidemill.run.trained import export_adapter

    with hub.folder_to_push(to, push) as folder:
        if adapter:
            step, is_mean = export_adapter(run, folder, raw=raw, step=step, best=best)
            made = f"the adapters of step {step} of {run} were exported"
        else:
            trained = write(run, folder, raw=raw, without_bias=without_bias, step=step, best=best, dtype=dtype)
            is_mean, size = trained.is_mean, f"{trained.loaded.parameters:,} parameters"
            made = f"step {trained.step} of {run} ({size}) was exported"
        if to is not None:
            say(f"{made} to {to}{MEAN if is_mean else ''}")
        if push is not None:
            address = hub.push(folder, push, message=f"{made} here", private=private)
            say(f"{made} to {address}{MEAN if is_mean else ''}")
