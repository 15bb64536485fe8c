"""What the terminal shows while a run goes on: a live panel, one plain line a step, or nothing."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, Literal

from tidemill.observe.curve import sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Mode = Literal["auto", "rich", "plain", "off"]
REFRESH_HZ = 4
SAY_EVERY_S = 15.0  # between lines about a long evaluation, without a panel
LONG = ("evaluating", "scoring answers")
RECENT = 20  # steps whose mean pace tells the time left
CURVES = ("reward", "loss")  # the first that a run has is drawn


class Progress:
    """`with Progress(…) as progress: progress.step(n, metrics)`; shows reward or loss, accuracy and tokens/s."""

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        *,
        title: str = "",
        start_step: int = 0,
        console: Console | None = None,
        out: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = _choose(mode, out or sys.stdout)
        self.total, self.title, self.curve_key = total_steps, title, ""
        self._step = start_step
        self._stage, self._stage_done, self._stage_total = "", 0, 0
        self._stage_at, self._stage_from, self._said_at = clock(), 0, clock()
        self._latest: dict[str, float] = {}
        self._curve: list[float] = []
        self._clock, self._started = clock, clock()
        self._pace: deque[float] = deque(maxlen=RECENT)
        self._last_at = self._started
        self._out = out or sys.stdout
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._live = _live(self._render, console) if self.mode == "rich" else None

    def __enter__(self) -> Progress:
        self._last_at = self._clock()
        if self._live is not None:
            self._live.start(refresh=True)
            self._moved = _handlers_to(sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            for handler, stream in self._moved:
                handler.setStream(stream)
            self._moved = []

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """What is being done within the step, how far it is, and how long it has to go."""
        if what != self._stage or done < self._stage_done:
            self._stage_at, self._stage_from = self._clock(), done
        self._stage, self._stage_done, self._stage_total = what, done, total
        if self.mode == "plain" and what in LONG:
            self._say_now_and_then()

    def _say_now_and_then(self) -> None:
        """A long evaluation is heard of without a terminal too."""
        now = self._clock()
        if now - max(self._stage_at, self._said_at) >= SAY_EVERY_S:
            self._said_at = now
            self._say(self.activity())

    def activity(self) -> str:
        """'evaluating 120 of 200, 0:35 left', or nothing."""
        if not self._stage_total:
            return self._stage
        text = f"{self._stage} {self._stage_done:,} of {self._stage_total:,}"
        made = self._stage_done - self._stage_from
        if made <= 0:
            return text
        left = (self._clock() - self._stage_at) / made * (self._stage_total - self._stage_done)
        return f"{text}, {clock_text(left)} left"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        self._pace.append((now - self._last_at) / max(1, step - self._step))
        self._last_at, self._step, self._stage = now, step, ""
        self._latest |= metrics
        self.curve_key = self.curve_key or next((key for key in CURVES if key in metrics), "")
        if self.curve_key in metrics:
            self._curve.append(float(metrics[self.curve_key]))
        if self.mode == "plain":
            self._say(self.line())

    def note(self, text: str) -> None:
        """A sentence that stays, above the live panel."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif self.mode == "plain":
            self._say(text)

    def seconds_left(self) -> float | None:
        if not self._pace:
            return None
        return (self.total - self._step) * sum(self._pace) / len(self._pace)

    def line(self) -> str:
        parts = [f"step {self._step:>{len(str(self.total))}}/{self.total}", *self._facts()]
        return "  ".join(parts)

    def _facts(self) -> list[str]:
        known = self._latest
        facts = []
        if self.curve_key in known:
            facts.append(f"{self.curve_key} {known[self.curve_key]:.3f}")
        if "accuracy" in known:
            facts.append(f"accuracy {percent(known['accuracy'])}")
        if "tokens_per_s" in known:
            facts.append(f"{_short(known['tokens_per_s'])} tokens/s")
        left = self.seconds_left()
        if left is not None:
            facts.append(f"{clock_text(left)} left")
        return facts

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _render(self) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Text()
        head.append(f"step {self._step}/{self.total}", style="bold")
        doing = f"  {self.activity()}" if self._stage else ""
        head.append(f"{doing}   {clock_text(self._clock() - self._started)} so far", style="dim")
        lines: list[RenderableType] = [head, ProgressBar(total=self.total, completed=self._step)]
        if self._facts():
            lines.append(Text("   ".join(self._facts())))
        if len(self._curve) > 1:
            line = Text()
            line.append(f"{self.curve_key} ", style="dim")
            line.append(sparkline(self._curve, 56), style="green")
            lines.append(line)
        grid = Table.grid(expand=True)
        for row in lines:
            grid.add_row(row)
        return Panel(grid, title=self.title or None, title_align="left", width=78)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def clock_text(seconds: float) -> str:
    """12:34, or 1:23:45."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.1f}k"


def _choose(mode: Mode, out: IO[str]) -> str:
    if mode != "auto":
        return mode
    return "rich" if out.isatty() else "plain"


def _handlers_to(stream: Any) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Let loggers write above the panel, not into it: those that kept the terminal itself are given `stream`."""
    loggers = [logging.getLogger(), *(x for x in logging.Logger.manager.loggerDict.values() if hasattr(x, "handlers"))]
    found = [
        (handler, handler.stream)
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__)
    ]
    for handler, _ in found:
        handler.setStream(stream)
    return found


class _Redrawn:
    """Rich draws this anew at every refresh, so clocks move between steps."""

    def __init__(self, render: Callable[[], RenderableType]) -> None:
        self.render = render

    def __rich__(self) -> RenderableType:
        return self.render()


def _live(render: Callable[[], RenderableType], console: Console | None):  # type: ignore[no-untyped-def]
    from rich.live import Live

    return Live(_Redrawn(render), console=console, refresh_per_second=REFRESH_HZ, transient=False)
