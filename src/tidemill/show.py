"""What the commands print: tables of settings, recipes and findings, the plan before a run and the result after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.algorithms import registry
from tidemill.estimate import plan as plans
from tidemill.observe import curve
from tidemill.observe.progress import Progress, clock_text, percent
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config

if TYPE_CHECKING:
    from tidemill.doctor import Finding
    from tidemill.flow.records import Answered, Evaluation
    from tidemill.flow.workers import Workers
    from tidemill.run.loop import Summary, Watcher
else:
    Watcher = object  # the loop brings torch; drawing does not need it

MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warn": ("!", "yellow"), "bad": ("✗", "red")}
SHOWN_PROBLEMS = 3
LONGEST_TEXT = 160


# Tables


def config_table(loaded: recipe.LoadedRecipe) -> RenderableType:
    """Every key, its value, where it came from, its help; what was set stands out."""
    table = _table("key", "value", "from", "help")
    for key, value, source, help in recipe.describe(loaded):
        style = "dim" if source.startswith(recipe.DEFAULT) else "bold"
        table.add_row(Text(key, style=style), Text(_value(value)), Text(source, style="dim"), Text(help, style="dim"))
    return table


def recipes_table() -> RenderableType:
    rows = recipe.listing()
    if not rows:
        return Text("no recipes found; set TIDEMILL_RECIPES to a folder of them")
    table = _table("recipe", "what it is for")
    for name, about in rows:
        table.add_row(Text(name, style="bold"), Text(about))
    return table


def benches_table(rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = _table("benchmark", "what it measures")
    for name, about in rows:
        table.add_row(Text(name, style="bold"), Text(about))
    return table


def doctor_table(findings: Sequence[Finding]) -> RenderableType:
    table = _table("", "", "", "remedy")
    for finding in findings:
        mark, style = MARKS[finding.status]
        table.add_row(
            Text(mark, style=style), Text(finding.area, style="bold"), Text(finding.what), Text(finding.remedy)
        )
    bad = sum(f.status == "bad" for f in findings)
    verdict = f"{bad} of these will make a run fail" if bad else "nothing here keeps a run from working"
    return Group(table, Text(verdict, style="red" if bad else "green"))


def plan_table(config: Config, parameters: int | None = None) -> RenderableType:
    """What the batch settings come to, before training."""
    table = _table("", "", "how")
    for label, value, how in plans.plan(config, parameters):
        table.add_row(Text(label), Text(value, style="bold"), Text(how, style="dim"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if hasattr(value, "model_dump"):
        return _value(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_value(v)}" for k, v in value.items()) + "}"
    return _short(str(value))


def _short(text: str) -> str:
    flat = text.replace("\n", "⏎")
    return flat if len(flat) <= LONGEST_TEXT else f"{flat[: LONGEST_TEXT - 1]}…"


# While it runs


class RunWatcher(Watcher):
    """Draws a run: the plan, then progress. A warm start is a run of its own before the main one."""

    def __init__(self, console: Console, config: Config) -> None:
        self.console, self.config = console, config
        self._progress: Progress | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.folder).expanduser() / self.config.name

    def started(self, workers: Workers, first_step: int) -> None:
        self._stop()
        config = workers.config
        if config.observe.progress != "off":
            self.console.print(plan_table(config, workers.parameters))
        self._progress = Progress(
            config.observe.progress,
            config.train.steps,
            title=config.name,
            start_step=first_step,
            console=self.console,
            out=self.console.file,
        ).__enter__()

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        sampled = "".join(f", pass@{k} {percent(share)}" for k, share in evaluation.pass_at.items())
        self.noted(f"step {step}: held-out accuracy {percent(evaluation.accuracy)}{sampled}")

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if self._progress is not None:
            self._progress.step(step, metrics)

    def noted(self, message: str) -> None:
        if self._progress is not None:
            self._progress.note(message)
        elif self.config.observe.progress != "off":
            self.console.print(Text(message))

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.__exit__()
            self._progress = None

    def __enter__(self) -> RunWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


# After it


def ending(console: Console, config: Config, folder: Path, summary: Summary) -> None:
    """The result: accuracy before and after, some problems, the curve, what to try next."""
    if summary.is_stopped:
        console.print(Text(f"stopped after step {summary.steps} of {config.train.steps}; everything is saved"))
        console.print(Text(f"  → tidemill resume {folder}"))
        return
    console.print(result_table(summary))
    if summary.before is not None and summary.after is not None:
        console.print(problems_table(summary.before.answers, summary.after.answers))
    title, values = _curve_of(config, summary)
    console.print(Text(curve.terminal_curve(values, width=72, height=11, title=title, xlabel="step"), style="green"))
    points = {title: [(i + 1.0, v) for i, v in enumerate(values)]}
    console.print(Text(curve.save_png(folder / "curve.png", points, title=config.name, ylabel=title), style="dim"))
    console.print(next_steps(config, folder))


def _curve_of(config: Config, summary: Summary) -> tuple[str, list[float]]:
    """The loop keeps a run without rewards as minus its loss."""
    if registry.of(config).input_kind != "prompts":
        return "loss", [-v for v in summary.rewards]
    return "reward", list(summary.rewards)


def result_table(summary: Summary) -> RenderableType:
    table = _table("", "before", "after")
    if summary.accuracy_before is not None or summary.accuracy_after is not None:
        before, after = (_share(a) for a in (summary.accuracy_before, summary.accuracy_after))
        table.add_row("held-out accuracy", before, Text(after, style="bold green"))
    if summary.before is not None and summary.after is not None:
        for k in summary.after.pass_at:
            table.add_row(f"pass@{k}, sampled", _share(summary.before.pass_at.get(k)), _share(summary.after.pass_at[k]))
    early = ", ended early: the accuracy asked for was reached" if summary.is_early else ""
    pace = f"{summary.steps} steps in {clock_text(summary.seconds)}, {summary.tokens_per_s:,.0f} tokens/s{early}"
    return Group(table, Text(pace, style="dim"))


def evaluation_table(evaluation: Evaluation) -> RenderableType:
    table = _table("", "")
    table.add_row("held-out accuracy, greedy", Text(percent(evaluation.accuracy), style="bold"))
    for k, share in evaluation.pass_at.items():
        table.add_row(f"pass@{k}, sampled", percent(share))
    table.add_row("reward, greedy", f"{evaluation.reward:.3f}")
    table.add_row("problems", str(len(evaluation.answers)))
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def problems_table(before: Sequence[Answered], after: Sequence[Answered]) -> RenderableType:
    """Some held-out problems with the answers before and after."""
    table = _table("problem", "answer", "before", "after")
    table.title, table.title_justify, table.title_style = "three held-out problems", "left", "dim"
    pairs = [(b, a) for b, a in zip(before, after) if b.prompt == a.prompt]
    learned = [i for i, (b, a) in enumerate(pairs) if a.correct and not b.correct]
    wrong = [i for i, (_, a) in enumerate(pairs) if not a.correct]
    # Two that show what was learned and one that was not, when there are such: no picture better than the run.
    order = dict.fromkeys([*learned[: SHOWN_PROBLEMS - 1], *wrong[:1], *learned, *range(len(pairs))])
    for b, a in [pairs[i] for i in order][:SHOWN_PROBLEMS]:
        table.add_row(Text(_short(a.prompt)), Text(_short(a.answer)), _response(b), _response(a))
    return table


def _response(answered: Answered) -> Text:
    return Text(
        f"{'✓' if answered.correct else '✗'} {_short(answered.response)}", style="green" if answered.correct else "red"
    )


def next_steps(config: Config, folder: Path) -> RenderableType:
    table = _table("try next", "")
    for command, why in (
        (f"tidemill generate {folder} -i", "talk to the model"),
        (f"tidemill eval {folder}", "measure it again, with your own settings"),
        (f"tidemill export {folder} --to my-model", "a Hugging Face folder"),
        (f"tensorboard --logdir {folder}/tensorboard", "every metric of every step"),
        ("tidemill recipes", "other runs; any setting changes with key=value"),
        ("tidemill train RECIPE model.path=FOLDER", "the same with your own model"),
    ):
        table.add_row(Text(command, style="bold"), Text(why, style="dim"))
    return table
