"""`tidemill generate`: prompt in, text out."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.frame import RESULTS, Best, Raw, Step, Where, app, console

MOST_HISTORY = 1000  # lines kept


@app.command(rich_help_panel=RESULTS)
def generate(
    where: Where,
    prompt: Annotated[str | None, typer.Argument(help="the prompt; without it, standard input is read")] = None,
    interactive: Annotated[bool, typer.Option("-i", "--interactive", help="chat: each line gets an answer")] = False,
    max_tokens: Annotated[int, typer.Option(help="token limit of an answer", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0: greedy", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus sampling: share of probability kept", min=0.01, max=1.0)] = 1.0,
    n: Annotated[int, typer.Option("-n", help="number of answers", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="seed of sampling", min=0)] = 0,
    step: Step = None,
    best: Best = False,
    raw: Raw = False,
) -> None:
    """Answer a prompt, or chat. WHERE is a run, a Hugging Face folder, a known model's name, or org/name on the hub."""
    from tidemill.rollout.engine import Sampling
    from tidemill.run.trained import Speaker, open_trained

    trained = open_trained(where, raw=raw, step=step, best=best)
    room = trained.loaded.window - 1
    speaker = Speaker(
        trained, Sampling(temperature=temperature, top_p=top_p, max_tokens=min(max_tokens, room), seed=seed)
    )
    if interactive:
        console.print("one line in, one answer out; an empty line or Ctrl-D ends", style="dim")
        with _history():
            for reply in speaker.chat(iter(_ask, "")):
                console.print(reply)
        return
    text = prompt if prompt is not None else sys.stdin.read().strip()
    for completion in speaker.answer(speaker.encode([{"role": "user", "content": text}]), n):
        print(speaker.text(completion))


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@contextlib.contextmanager
def _history():  # type: ignore[no-untyped-def]
    """Turn on line editing, and the lines of earlier chats by the arrow keys, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    from tidemill.models.box.known import cache

    file: Path = cache() / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(MOST_HISTORY)
            readline.write_history_file(file)
