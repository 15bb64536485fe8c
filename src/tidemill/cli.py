"""The command line, one screen of code per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidemill.cli_models import models
from tidemill.cli_watch import watch
from tidemill.errors import ReshardError, TidemillError

app = typer.Typer(
    help="Train language models by reinforcement learning, as distributed dataflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Recipe = Annotated[str, typer.Argument(help="a recipe's name (see `tidemill recipes`) or the path of a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="settings over the recipe's: key.sub=value …")]
Run = Annotated[Path, typer.Argument(help="a run's folder, for example runs/quickstart")]
Where = Annotated[Path, typer.Argument(help="a run's folder, a Hugging Face folder, a known model's name, or org/name")]
Raw = Annotated[bool, typer.Option("--raw", help="the weights themselves, where a run keeps their running mean")]
MEAN = ": the running mean of the weights (learn.ema), as evaluations see it; --raw gives the weights themselves"


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Run a recipe: a model learns by the recipe's algorithm. Everything it makes lands in runs/NAME."""
    from tidemill import show
    from tidemill.recipe import load as recipe_files
    from tidemill.run import start as launch

    loaded = recipe_files.load(recipe, overrides or ())
    watch = show.RunWatcher(console, loaded.config)
    with watch:
        summary = launch.train(loaded, watch=watch)
    show.ending(console, loaded.config, watch.folder, summary)


@app.command()
def sft(recipe: Recipe = "quickstart-sft", overrides: Overrides = None) -> None:
    """Fine-tune on prompts with given responses (a recipe whose algorithm is sft)."""
    train(recipe, [*(overrides or []), "algorithm.name=sft"])


@app.command()
def resume(run: Run) -> None:
    """Go on with a run that was stopped or killed, from its last good checkpoint."""
    from tidemill import show
    from tidemill.run import start as launch
    from tidemill.run.folder import RunFolder

    config = RunFolder.open(run, exclusive=False).config
    watch = show.RunWatcher(console, config)
    with watch:
        summary = launch.resume(run, watch=watch)
    show.ending(console, config, Path(run), summary)


@app.command("eval")
def evaluate(
    where: Where,
    recipe: Annotated[str | None, typer.Option(help="which problems and rewards; a run has its own")] = None,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option("-k", "--samples", help="sampled answers per problem, for pass@k", min=1)] = 1,
    size: Annotated[int, typer.Option(help="held-out problems; 0: as the recipe says", min=0)] = 0,
    raw: Raw = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Measure a run or a Hugging Face folder on held-out problems: greedy accuracy, pass@1 and pass@k."""
    import json

    from tidemill import show
    from tidemill.run import start as launch

    evaluation = launch.evaluate(where, recipe, overrides or (), samples=samples, size=size, raw=raw)
    if as_json:
        print(json.dumps(evaluation.metrics()))
    else:
        console.print(show.evaluation_table(evaluation))


@app.command()
def generate(
    where: Where,
    prompt: Annotated[str | None, typer.Argument(help="the prompt; without it, standard input")] = None,
    interactive: Annotated[bool, typer.Option("-i", "--interactive", help="chat: one line in, one answer out")] = False,
    max_tokens: Annotated[int, typer.Option(help="longest answer", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus", min=0.01, max=1.0)] = 1.0,
    n: Annotated[int, typer.Option("-n", help="answers", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="of sampling", min=0)] = 0,
    raw: Raw = False,
) -> None:
    """Prompt in, text out. WHERE is a run, a Hugging Face folder, a known model's name, or org/name on the hub."""
    from tidemill.rollout.engine import Sampling
    from tidemill.run.trained import Speaker, open_trained

    trained = open_trained(where, raw=raw)
    room = trained.loaded.window - 1
    speaker = Speaker(
        trained, Sampling(temperature=temperature, top_p=top_p, max_tokens=min(max_tokens, room), seed=seed)
    )
    if interactive:
        console.print("one line in, one answer out; an empty line or Ctrl-D ends", style="dim")
        for reply in speaker.chat(iter(lambda: _ask(), "")):
            console.print(reply, markup=False)
        return
    text = prompt if prompt is not None else sys.stdin.read().strip()
    for completion in speaker.answer(speaker.encode([{"role": "user", "content": text}]), n):
        print(speaker.text(completion))


def _ask() -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""


@app.command()
def export(
    run: Where,
    to: Annotated[Path | None, typer.Option("--to", help="the new folder")] = None,
    push: Annotated[str | None, typer.Option("--push", help="org/name: upload it to the Hugging Face hub")] = None,
    private: Annotated[bool, typer.Option("--private", help="a repository that --push makes is private")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="the low-rank adapters alone, as peft opens them")] = False,
    raw: Raw = False,
    without_bias: Annotated[
        bool, typer.Option("--without-bias", help="leave a balancing bias out that the model has no place for")
    ] = False,
) -> None:
    """Write a run's newest checkpoint as a Hugging Face folder that AutoModelForCausalLM.from_pretrained opens."""
    from tidemill.models.box import hub
    from tidemill.run.trained import export as write
    from tidemill.run.trained import export_adapter

    with hub.folder_to_push(to, push) as folder:
        if adapter:
            step, is_mean = export_adapter(run, folder, raw=raw)
            made = f"the adapters of step {step} of {run} are now"
        else:
            trained = write(run, folder, raw=raw, without_bias=without_bias)
            is_mean, size = trained.is_mean, f"{trained.loaded.parameters:,} parameters"
            made = f"step {trained.step} of {run} ({size}) is now"
        if to is not None:
            console.print(f"{made} {to}{MEAN if is_mean else ''}")
        if push is not None:
            address = hub.push(folder, push, message=f"{made} here", private=private)
            console.print(f"{made} {address}{MEAN if is_mean else ''}")


@app.command()
def recipes() -> None:
    """List the recipes that can be run by name."""
    from tidemill import show

    console.print(show.recipes_table())


@app.command()
def config(
    recipe: Annotated[str | None, typer.Argument(help="a recipe's name or path; without it, the defaults")] = None,
    overrides: Overrides = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="as YAML that can be run")] = False,
) -> None:
    """Show every setting: key, value, where it came from, help. Checks the recipe too."""
    from tidemill import show
    from tidemill.recipe import load as recipe_files

    loaded = recipe_files.load(recipe if recipe is not None else {}, overrides or ())
    if as_yaml:
        print(recipe_files.dump(loaded.config), end="")
        return
    console.print(show.config_table(loaded))
    if recipe is not None:
        console.print(show.plan_table(loaded.config))
        recipe_files.check(loaded.config)


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Option("--recipe", help="also judge whether this recipe fits here")] = None,
    overrides: Overrides = None,
) -> None:
    """Examine this machine: devices, versions, memory, disk; what would work, what would not, and the remedy."""
    from tidemill import doctor as examination
    from tidemill import show
    from tidemill.recipe import load as recipe_files

    findings = examination.examine(recipe_files.load(recipe, overrides or ()) if recipe else None)
    console.print(show.doctor_table(findings))
    if not examination.is_healthy(findings):
        raise typer.Exit(1)


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(help="a run's folder")],
    other: Annotated[Path, typer.Argument(help="another run's folder")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Name the first step, stage and tensor in which two runs differ (observe.dump=[steps] keeps what it compares)."""
    import json

    from tidemill.observe import diff as differences

    found = differences.compare(one, other)
    print(json.dumps(found.as_dict()) if as_json else differences.render(found))
    if found.first is not None:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="the benchmark; without it, a list")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, last on standard output")] = False,
) -> None:
    """Measure: tidemill bench NAME [--option value …]. Peers are measured beside us, in the same run."""
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


@app.command()
def dock(
    run: Run,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="as Prometheus text")] = False,
) -> None:
    """Look into the dock that serves a run: rows per stage, bytes, the oldest, who waits."""
    from tidemill.dock import view

    state = view.look(run)
    print(view.prometheus(state) if prometheus else view.render(state))


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
    console.print(f"{run} will have {rollouts} rollout workers within seconds; `tidemill status {run}` shows them")


def _folder_of(run: Path) -> Path:
    from tidemill.run.folder import RunFolder

    return RunFolder.open(run, exclusive=False).path


reshard = typer.Typer(help="The weight flow, from the learner's layout to the rollout's.", no_args_is_help=True)
app.add_typer(reshard, name="reshard")
app.add_typer(models, name="models")
app.command()(watch)


@reshard.command()
def plan(
    recipe: Annotated[str | None, typer.Argument(help="a recipe: its model, learn.parallel and cluster")] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="a published model's name, such as qwen2.5-32b")] = None,
    source: Annotated[str | None, typer.Option("--from", help="the learner's layout, such as tp8,dp2")] = None,
    target: Annotated[str | None, typer.Option("--to", help="the rollout's layout, such as tp4,dp4")] = None,
    devices: Annotated[int, typer.Option(help="devices there are; 0: as many as the layouts say", min=0)] = 0,
    per_node: Annotated[int, typer.Option(help="devices in a node", min=1)] = 8,
    apart: Annotated[bool, typer.Option(help="the rollout has devices of its own")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="without a recipe or a model: the cases of docs/weights.md")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """What moving a model's weights would cost, without devices: bytes, memory, seconds, who sends to whom."""
    import json

    from tidemill.recipe import load as recipe_files
    from tidemill.reshard import recipe as of_recipe
    from tidemill.reshard import show as reshard_show
    from tidemill.reshard.parallel import parse
    from tidemill.reshard.shapes import published

    if recipe is not None:
        config = recipe_files.load(recipe, overrides or ()).config
        engine, is_apart = of_recipe.engine_of(config)
        shapes = published(model) if model else of_recipe.model_of(recipe_files.model_of(config))
        wide = parse(source) if source else of_recipe.learner_of(config)
        narrow = parse(target) if target else engine
        reports = [reshard_show.planned(shapes, wide, narrow, per_node, apart or is_apart)]
    elif model and source and target:
        reports = [reshard_show.dry_plan(model, source, target, devices=devices, per_node=per_node, apart=apart)]
    elif dry:
        reports = reshard_show.on_paper()
    else:
        raise ReshardError(
            "plan of what?", "name a recipe, or --model, --from and --to, or --dry for the cases on paper"
        )
    if as_json:
        plain = [found.as_dict() for found in reports]
        print(json.dumps(plain[0] if len(plain) == 1 else plain))
    else:
        print("\n\n".join(map(reshard_show.render, reports)))


@reshard.callback()
def _reshard() -> None:
    """Keeps `plan` a command of its own while it is the only one."""


def main() -> None:
    """Errors a user can mend are a few lines; anything else keeps its traceback, because it is our mistake."""
    try:
        status = app(standalone_mode=False, prog_name="tidemill")
    except typer.Exit as leave:
        status = leave.exit_code
    except Exception as error:
        status = explain(error)
    sys.exit(status)  # commands give nothing; one that raised typer.Exit gives its status, caught on the way


def explain(error: BaseException) -> int:
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        errors.print("stopped")
        return 130
    # A word that no command knows. Whose class it is depends on typer's version: click's, or that of its own copy.
    show = getattr(error, "show", None)
    if callable(show) and isinstance(status := getattr(error, "exit_code", None), int):
        show()
        return status
    if isinstance(error, TidemillError):
        errors.print(f"[red]error:[/] {error.message}", soft_wrap=True)
        if error.remedy:
            errors.print(f"  → {error.remedy}", soft_wrap=True)
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        errors.print(
            f"[red]error:[/] the disk is full ({error.filename or 'while writing'})\n  → free some space, then resume"
        )
        return 1
    raise error
