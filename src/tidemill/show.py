"""Prints what commands show: tables of settings, recipes and findings, the plan before a run and the result after
it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.estimate import plan as plans
from tidemill.observe import curve
from tidemill.observe.progress import Progress, clock_text, percent
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config
from tidemill.run.watcher import Watcher

if TYPE_CHECKING:
    from rich.status import Status

    from tidemill.data.survey import Lengths
    from tidemill.doctor import Finding
    from tidemill.flow.records import Activity, Answered, Evaluation
    from tidemill.flow.workers import Workers
    from tidemill.run.summary import Summary

MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warn": ("!", "yellow"), "bad": ("✗", "red")}
SHOWN_PROBLEMS = 3
LONGEST_TEXT = 160
WIDE = 140  # from this many columns on, a setting fits one line


# Tables


FIRST_KEYS = (  # in `tidemill config`: settings that most people change stand first in their sections
    "name", "model.path", "data.source", "train.steps", "train.prompts_per_step", "train.samples_per_prompt",
    "rollout.max_new_tokens", "rollout.temperature", "rewards.functions", "algorithm.name", "learn.lr",
)  # fmt: skip
GROUPS = (  # in `tidemill recipes`: heading, and a pattern of names
    ("start here", r"quickstart|own"),
    ("real models", r"real/.*"),
    ("algorithms, seconds each on a CPU", r"cpu/(?!tools|game|judge|grpo_reward_model).*"),
    ("domains: tools, games, judges", r"domains/.*|cpu/.*"),
    ("full size", r"(full|cluster)/.*"),
    ("parts of the quickstart, and others", r".*"),
)


def config_table(loaded: recipe.LoadedRecipe, changed: bool = False, width: int = 80) -> RenderableType:
    """Show every key, its value, where it came from and its help, by section; the most important first. A key is
    never broken over lines, so that it can be copied. `changed`: only settings that are not defaults."""
    rows = [row for row in recipe.describe(loaded) if not (changed and row[2].startswith(recipe.DEFAULT))]
    groups: dict[str, list[tuple[str, Any, str, str]]] = {"what matters most": []}
    for row in rows:
        title = row[0].partition(".")[0] if "." in row[0] else "the run"
        groups.setdefault("what matters most" if row[0] in FIRST_KEYS else title, []).append(row)
    groups["what matters most"].sort(key=lambda row: FIRST_KEYS.index(row[0]))
    parts = [_settings(title, found, width) for title, found in groups.items() if found]
    return Group(*parts) if parts else Text("every setting is a default")


def _settings(title: str, rows: Sequence[tuple[str, Any, str, str]], width: int) -> RenderableType:
    if width < WIDE:
        return _narrow(title, rows)
    table = _table("key", "value", "from", "help")
    table.title, table.title_justify, table.title_style = title, "left", "bold underline"
    table.columns[0].no_wrap = True
    for key, value, source, help in rows:
        style = "dim" if source.startswith(recipe.DEFAULT) else "bold"
        table.add_row(Text(key, style=style), Text(_value(value)), Text(source, style="dim"), Text(help, style="dim"))
    return table


def _narrow(title: str, rows: Sequence[tuple[str, Any, str, str]]) -> RenderableType:
    """Show a setting in two lines: key, value and source, then its help, indented."""
    lines: list[RenderableType] = [Text(title, style="bold underline")]
    for key, value, source, help in rows:
        is_default = source.startswith(recipe.DEFAULT)
        head = Text(key, style="" if is_default else "bold").append(f" = {_value(value)}", style="cyan")
        if not is_default:
            head.append(f"  ({source})", style="dim")
        head.overflow = "fold"
        lines += [head, Text(f"    {help}", style="dim", overflow="fold")]
    return Group(*lines, Text())


def recipes_table() -> RenderableType:
    rows = recipe.listing()
    if not rows:
        return Text("no recipes found; set TIDEMILL_RECIPES to a folder of them")
    first = ["quickstart", "own"]
    rows.sort(key=lambda row: first.index(row[0]) if row[0] in first else len(first))
    parts: list[RenderableType] = []
    for heading, pattern in GROUPS:
        found = [row for row in rows if re.fullmatch(pattern, row[0])]
        rows = [row for row in rows if row not in found]
        if found:
            parts += [Text(heading, style="bold underline"), _named(found)]
    return Group(*parts)


def _named(rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = _table("", "")
    table.columns[0].no_wrap = True
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
    verdict = f"{bad} of these would make a run fail" if bad else "runs will work on this machine"
    return Group(table, Text(verdict, style="red" if bad else "green"))


def plan_table(config: Config, parameters: int | None = None, lengths: Lengths | None = None) -> RenderableType:
    """Show what the batch settings amount to, before training; with the data's own lengths where these are known."""
    table = _table("", "", "how")
    rows = plans.plan(config if lengths is None else lengths.bounded(config), parameters)
    if lengths is not None:
        responses = f", responses up to {lengths.longest_response:,}" if lengths.longest_response else ""
        cut = f", {lengths.cut:,} of them cut" if lengths.cut else ""
        mean = f"{lengths.mean_prompt:,.0f} on average, in {lengths.rows:,} rows looked at"
        rows.insert(5, ("tokens in the data", f"prompts up to {lengths.longest_prompt:,}{responses}{cut}", mean))
    for label, value, how in rows:
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
    """Draws a run: the plan, then the progress. A warm start is a run of its own before the main one."""

    def __init__(self, console: Console, config: Config) -> None:
        self.console, self.config = console, config
        self._progress: Progress | None = None
        self._status: Status | None = None  # before there is a panel
        self._lengths: Lengths | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.folder).expanduser() / self.config.name

    def prepared(self, config: Config, lengths: Lengths) -> None:
        self.config, self._lengths = config, lengths

    def doing(self, activity: Activity) -> None:
        if self._progress is not None:
            self._progress.doing(activity.what, activity.done, activity.total)
        elif self._status is None and self.console.is_terminal and self.config.observe.progress in ("auto", "rich"):
            self._status = self.console.status(Text(f"{activity.what} …"))
            self._status.start()
        elif self._status is not None:
            self._status.update(Text(f"{activity.what} …"))

    def started(self, workers: Workers, first_step: int) -> None:
        self._stop()
        config = workers.config
        if config.observe.progress != "off":
            lengths = self._lengths if config.name == self.config.name else None  # a warm start has its own data
            self.console.print(plan_table(config, workers.parameters, lengths))
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
            self.console.print(Text(message), soft_wrap=True)

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._progress is not None:
            self._progress.__exit__()
            self._progress = None

    def __enter__(self) -> RunWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


# After it


def ending(console: Console, config: Config, folder: Path, summary: Summary) -> None:
    """Show the result: accuracy before and after, some problems, the curve, what to try next."""
    if summary.is_stopped:
        console.print(Text(f"stopped after step {summary.steps} of {config.train.steps}; everything is saved"))
        console.print(Text(f"  → tidemill resume {folder}"))
        return
    console.print(result_table(summary))
    if summary.before is not None and summary.after is not None:
        console.print(problems_table(summary.before.answers, summary.after.answers))
    title, values = _curve_of(summary)
    console.print(Text(curve.terminal_curve(values, width=72, height=11, title=title, xlabel="step"), style="green"))
    console.print(Text(plot([folder], folder / "curve.png", {title: values}), style="dim"))
    console.print(next_steps(config, folder))


def _curve_of(summary: Summary) -> tuple[str, list[float]]:
    """Undo the loop's sign: it keeps minus the loss for a run without rewards."""
    if not summary.has_rewards:
        return "loss", [-v for v in summary.rewards]
    return "reward", list(summary.rewards)


def plot(runs: Sequence[Path], to: Path, without_metrics: Mapping[str, list[float]] | None = None) -> str:
    """Draw the curves of runs into one picture; return a sentence about it. `without_metrics`: used for a run that
    has none."""
    from tidemill.observe.run_folder import metrics_of

    panels: dict[str, list[curve.Line]] = {}
    names = [run.resolve().name for run in runs]
    for run, name in zip(runs, names):
        label = name if names.count(name) == 1 else str(run)
        for measure, line in curve.lines_of(metrics_of(run), label).items():
            panels.setdefault(measure, []).append(line)
    if not panels:
        spare = {key: list(enumerate(values, 1)) for key, values in (without_metrics or {}).items()}
        panels = {key: [curve.Line(names[0], points)] for key, points in spare.items()}
    if not panels:
        return f"no PNG of the curve: {', '.join(map(str, runs))} has made no step yet"
    return curve.save_png(to, panels, title=names[0] if len(names) == 1 else "")


def result_table(summary: Summary) -> RenderableType:
    table = _table("", "before", "after")
    if summary.accuracy_before is not None or summary.accuracy_after is not None:
        before, after = (_share(a) for a in (summary.accuracy_before, summary.accuracy_after))
        table.add_row("held-out accuracy", before, Text(after, style="bold green"))
    if summary.before is not None and summary.after is not None:
        for k in summary.after.pass_at:
            table.add_row(f"pass@{k}, sampled", _share(summary.before.pass_at.get(k)), _share(summary.after.pass_at[k]))
    early = ", ended early: train.stop_at_accuracy or stop_at_reward was reached" if summary.is_early else ""
    steps = "1 step" if summary.steps == 1 else f"{summary.steps:,} steps"
    pace = f"{steps} in {clock_text(summary.seconds)}, {summary.tokens_per_s:,.0f} tokens/s{early}"
    skipped = f", {summary.bad_rows:,} rows of the data left out" if summary.bad_rows else ""
    return Group(table, Text(pace + skipped, style="dim"))


def evaluation_table(evaluation: Evaluation, full: bool = False) -> RenderableType:
    table = _table("", "")
    table.add_row("held-out accuracy, greedy", Text(percent(evaluation.accuracy), style="bold"))
    for k, share in evaluation.pass_at.items():
        table.add_row(f"pass@{k}, sampled", percent(share))
    table.add_row("reward, greedy", f"{evaluation.reward:.3f}")
    table.add_row("response tokens, greedy", f"{evaluation.response_tokens:,.1f}")
    table.add_row("problems", str(len(evaluation.answers)))
    if not evaluation.failed:
        return Group(table, answers_table(evaluation.answers, full))
    failed = f"{evaluation.failed} of {evaluation.scored}"
    table.add_row("rewards that failed", Text(failed, style="bold red"))
    first = Text(f"the first: {evaluation.first_failure}", style="red")
    return Group(table, first, answers_table(evaluation.answers, full))


def answers_table(answers: Sequence[Answered], full: bool = False) -> RenderableType:
    """Show a few answers, right and wrong ones, in their order."""
    table = _table("problem", "answer", "response")
    wrong = [i for i, a in enumerate(answers) if not a.correct]
    right = [i for i, a in enumerate(answers) if a.correct]
    for i in sorted([*right[:2], *wrong[: SHOWN_PROBLEMS - min(2, len(right))]]):
        one = answers[i]
        prompt = Text(one.prompt if full else _short(one.prompt))
        table.add_row(prompt, Text(_short(one.answer)), _response(one, full))
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def problems_table(before: Sequence[Answered], after: Sequence[Answered]) -> RenderableType:
    """Show some held-out problems with the answers before and after."""
    table = _table("problem", "answer", "before", "after")
    table.title, table.title_justify, table.title_style = "held-out problems", "left", "dim"
    pairs = [(b, a) for b, a in zip(before, after) if b.prompt == a.prompt]
    learned = [i for i, (b, a) in enumerate(pairs) if a.correct and not b.correct]
    wrong = [i for i, (_, a) in enumerate(pairs) if not a.correct]
    # Two problems that were learned and one that was not, where such exist: the choice must not look better than the
    # run.
    order = dict.fromkeys([*learned[: SHOWN_PROBLEMS - 1], *wrong[:1], *learned, *range(len(pairs))])
    for b, a in [pairs[i] for i in order][:SHOWN_PROBLEMS]:
        table.add_row(Text(_short(a.prompt)), Text(_short(a.answer)), _response(b), _response(a))
    return table


def _response(answered: Answered, full: bool = False) -> Text:
    text = answered.response if full else _short(answered.response)
    return Text(f"{'✓' if answered.correct else '✗'} {text}", style="green" if answered.correct else "red")


def next_steps(config: Config, folder: Path) -> RenderableType:
    table = _table("try next", "")
    table.columns[0].no_wrap = True  # a command is copied whole
    is_judge = config.algorithm.name == "reward_model"  # a reward model gives numbers, not text
    talk = (f"tidemill generate {folder} -i", "chat with the model")
    judge = ("rewards: {functions: [{function: model, args: {path: my-model}}]}", "use it as the reward of another run")
    for command, why in (
        *(() if is_judge else (talk, (f"tidemill eval {folder}", "measure it again, with your own settings"))),
        (f"tidemill export {folder} --to my-model", "a Hugging Face folder"),
        *((judge,) if is_judge else ()),
        (f"tidemill resume {folder} train.steps={2 * config.train.steps}", "train on"),
        (f"tidemill watch {folder}", "every metric and sample, in the browser"),
        ("tidemill recipes", "other runs; any setting changes with key=value"),
        ("tidemill train own model.path=FOLDER data.source=FILE", "your own model and data"),
    ):
        table.add_row(Text(command, style="bold"), Text(why, style="dim"))
    return table
