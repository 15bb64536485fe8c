"""`tidemill models`: list, get, import and show models. Heavy imports wait until a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tidemill.cli.frame import START, app, console, errors, say

models = typer.Typer(help="List, fetch, import and inspect models.", no_args_is_help=True)
app.add_typer(models, name="models", rich_help_panel=START)

Name = Annotated[str, typer.Argument(help="a known model's name (`tidemill models list`), or org/name on the hub")]


@models.command("list")
def listing() -> None:
    """List the models that are available by name."""
    from tidemill.models.box import known

    for name, model in known.KNOWN.items():
        size = f"{model.parameters / 1e6:.0f} million parameters"
        say(name, "bold")
        say(f"    {model.about}; {size}, {model.license}; {known.here(name) or 'not fetched yet'}")
    console.print("any other: org/name of the Hugging Face hub, a Hugging Face folder, or a GGUF file", style="dim")


@models.command()
def get(name: Name) -> None:
    """Fetch a model once and print its folder. `model.path` and `tidemill generate` then accept its name."""
    from tidemill.models.box import find

    if find.is_fetchable(name) and not find.look(name).exists():
        errors.print(f"{name} is not on this machine yet: fetching it", style="dim")
    print(find.get(name))


@models.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a .gguf file, or a checkpoint of verl, Megatron-core, FSDP2 or peft")],
    to: Annotated[Path, typer.Option("--to", help="the Hugging Face folder to write")],
    dtype: Annotated[str, typer.Option(help="dtype of the written weights: float32, bfloat16 or float16")] = "float32",
    tokenizer: Annotated[
        str | None, typer.Option(help="GGUF: take the tokenizer from this folder or org/name instead of the file")
    ] = None,
    definition: Annotated[
        str | None,
        typer.Option(help="checkpoints: folder or org/name with config.json and tokenizer, if none is beside them"),
    ] = None,
) -> None:
    """Turn a GGUF file or another framework's checkpoint into a Hugging Face folder to start from."""
    from tidemill.models.box import find

    if source.suffix != ".gguf":
        from tidemill.models.foreign.convert import import_checkpoint

        named = find.resolve(definition) if definition is not None else None
        made = import_checkpoint(source, to, dtype=dtype, definition=named)
        console.print(f"{made.source} ({made.kind}) is now {to}: {made.architecture}, {made.parameters:,} parameters")
        return
    from tidemill.models.gguf.convert import import_file

    own = find.resolve(tokenizer) if tokenizer is not None else None
    done = import_file(source, to, dtype=dtype, tokenizer=own)
    kinds = ", ".join(f"{count} {kind}" for kind, count in done.quantisations.items())
    console.print(f"{source} is now {to}: {done.architecture}, {done.parameters:,} parameters ({kinds} tensors read)")


@models.command()
def show(
    folder: Annotated[str, typer.Argument(help="a Hugging Face folder, a known name, or org/name")],
    tokens: Annotated[int, typer.Option(help="tokens of a sample: prompt and response", min=8)] = 1024,
    samples: Annotated[int, typer.Option(help="sequences rolled out at once", min=1)] = 16,
) -> None:
    """Show a model's architecture, its parameters, and the memory that rollout and training need."""
    from tidemill.errors import human
    from tidemill.estimate import needs
    from tidemill.models.box import find

    found = needs.describe(find.resolve(folder), tokens=tokens, samples=samples)
    shape = found.shape
    console.print(f"{shape.class_name}, {shape.parameters:,} parameters")
    heads = f"{shape.heads} heads of {shape.head_dim} over {shape.kv_heads} of keys and values"
    experts = f", {shape.experts} experts of {shape.expert_width}" if shape.experts else ""
    console.print(f"{shape.layers} layers of {shape.hidden}, {heads}{experts}")
    console.print(f"{shape.vocabulary:,} tokens in the vocabulary, a window of {shape.window or 'unknown'}")
    table = Table("memory", *found.needs, box=None)
    for label, field in (
        ("to roll out", "roll_out"),
        (f"to learn with LoRA (rank {needs.LORA_RANK})", "learn_lora"),
        ("to learn all weights", "learn_whole"),
    ):
        table.add_row(label, *(human(getattr(need, field)) for need in found.needs.values()))
    console.print(table)
    console.print(
        f"by estimate: {samples} samples of {tokens} tokens at once in rollout, one at a time in learning; "
        "`tidemill doctor --recipe RECIPE` judges a recipe",
        style="dim",
    )
