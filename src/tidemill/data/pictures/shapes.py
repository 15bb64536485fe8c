"""Questions about pictures that are drawn on the spot: counting, reading a number or a chart, and where things are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.data.generators import Problem
from tidemill.data.pictures.opened import pillow
from tidemill.errors import DataError, did_you_mean

Box = tuple[int, int, int, int]
KINDS = ("circle", "square", "triangle")
COLOURS = {
    "red": (214, 40, 40),
    "green": (30, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 30),
    "black": (20, 20, 20),
}
PAPER = (250, 250, 245)
SIDES = ("left", "right", "above", "below")


def shapes(
    rng: random.Random,
    tasks: Sequence[str] = ("count", "number", "chart", "relation"),
    size: int = 96,
    most: int = 5,
    cells: int = 4,
    kinds: Sequence[str] = KINDS,
) -> Problem:
    """A picture of `size` × `size` pixels and a question whose answer only the picture tells.

    `count`: how many of one kind, 1 to `most`, among others. `number`: one of 0 to 99. `chart`: how high a bar is, or
    which is highest. `relation`: on which side of one shape another lies. Shapes lie in a grid of `cells` × `cells`.
    """
    _check(tasks, size, most, cells, kinds)
    task = rng.choice(list(tasks))
    paper = Paper(size)
    question, answer, drawn = _TASKS[task](rng, paper, most, cells, list(kinds))
    return Problem(
        f"<image>{question} ", answer, answer, {"task": task}, images=(paper.pixels(),), key=f"{question} {drawn}"
    )


def _check(tasks: Sequence[str], size: int, most: int, cells: int, kinds: Sequence[str]) -> None:
    for name, given, known in (("tasks", tasks, _TASKS), ("kinds", kinds, KINDS)):
        unknown = [one for one in given if one not in known]
        if isinstance(given, str) or not given or unknown:
            wrong = unknown[0] if unknown and not isinstance(given, str) else given
            nearest = did_you_mean(wrong, known) if isinstance(wrong, str) else ""
            raise DataError(f"data.args.{name} has {wrong!r}{nearest}; it is a list of {', '.join(known)}")
    if not 24 <= size <= 2048:
        raise DataError(f"data.args.size must be from 24 to 2,048 pixels, got {size}")
    if not 2 <= cells <= size // 8:
        raise DataError(f"data.args.cells must be from 2 to {size // 8} at this size, got {cells}")
    if not 1 <= most <= cells * cells - 2:
        raise DataError(f"data.args.most must be from 1 to {cells * cells - 2} in {cells} × {cells} cells, got {most}")
    if "relation" in tasks and len(kinds) < 2:
        raise DataError("data.args.kinds must name two kinds or more for the task relation")


class Paper:
    """A picture in the making."""

    def __init__(self, size: int) -> None:
        pil = pillow()
        import PIL.ImageDraw
        import PIL.ImageFont

        self.size = size
        self._fonts = PIL.ImageFont
        self._image = pil.Image.new("RGB", (size, size), PAPER)
        self._draw = PIL.ImageDraw.Draw(self._image)

    def pixels(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._image).copy()

    def cell(self, row: int, column: int, cells: int) -> Box:
        """The box of a cell, with a margin inside of it."""
        side = self.size / cells
        margin = max(1, round(side / 8))
        top, left = round(row * side), round(column * side)
        return left + margin, top + margin, round(left + side) - margin - 1, round(top + side) - margin - 1

    def shape(self, kind: str, box: Box, colour: str) -> None:
        fill = COLOURS[colour]
        if kind == "circle":
            self._draw.ellipse(box, fill=fill)
        elif kind == "square":
            self._draw.rectangle(box, fill=fill)
        else:
            left, top, right, bottom = box
            self._draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=fill)

    def line(self, ends: Box, colour: str = "black") -> None:
        self._draw.line(ends, fill=COLOURS[colour], width=max(1, self.size // 64))

    def text(self, words: str, left: int, top: int, height: int, colour: str = "black") -> None:
        self._draw.text((left, top), words, fill=COLOURS[colour], font=self._fonts.load_default(size=height))


Asked = tuple[str, str, str]  # a question, its answer, and what was drawn


def _count(rng: random.Random, paper: Paper, most: int, cells: int, kinds: list[str]) -> Asked:
    asked = rng.choice(kinds)
    number = rng.randint(1, most)
    others = [kind for kind in kinds if kind != asked]
    free = cells * cells - number
    beside = rng.randint(0, min(free, most)) if others else 0
    places = rng.sample(range(cells * cells), number + beside)
    drawn = []
    for i, place in enumerate(places):
        kind = asked if i < number else rng.choice(others)
        colour = rng.choice(list(COLOURS))
        paper.shape(kind, paper.cell(*divmod(place, cells), cells), colour)
        drawn.append((kind, place, colour))
    return f"How many {asked}s?", str(number), str(sorted(drawn))


def _number(rng: random.Random, paper: Paper, most: int, cells: int, kinds: list[str]) -> Asked:
    number, colour = rng.randint(0, 99), rng.choice(list(COLOURS))
    height = rng.randint(paper.size // 3, paper.size // 2)
    room = max(0, paper.size - round(height * 1.25))
    left, top = rng.randint(0, room), rng.randint(0, max(0, paper.size - round(height * 1.2)))
    paper.text(str(number), left, top, height, colour)
    return "Which number?", str(number), f"{number} {colour} {height} {left} {top}"


def _chart(rng: random.Random, paper: Paper, most: int, cells: int, kinds: list[str]) -> Asked:
    bars = rng.sample(list(COLOURS), min(4, len(COLOURS)))
    heights = rng.sample(range(1, most + 1), min(most, len(bars)))
    bars = bars[: len(heights)]
    margin = max(2, paper.size // 12)
    base, room = paper.size - margin, paper.size - 2 * margin
    paper.line((margin, base, paper.size - margin, base))
    for level in range(1, most + 1):
        y = base - level * room // most
        paper.line((margin // 2, y, margin, y))
    wide = room // len(bars)
    for i, (colour, height) in enumerate(zip(bars, heights)):
        left = margin + i * wide + wide // 6
        paper.shape("square", (left, base - height * room // most, left + wide * 2 // 3, base - 1), colour)
    drawn = f"{bars} {heights}"
    if rng.random() < 0.5:
        return "Which bar is highest?", bars[heights.index(max(heights))], drawn
    asked = rng.randrange(len(bars))
    return f"How high is {bars[asked]}?", str(heights[asked]), drawn


def _relation(rng: random.Random, paper: Paper, most: int, cells: int, kinds: list[str]) -> Asked:
    one, other = rng.sample(kinds, 2)
    side = rng.choice(SIDES)
    along, low, high = rng.randrange(cells), *sorted(rng.sample(range(cells), 2))
    first, second = (low, high) if side in ("left", "above") else (high, low)
    places = [(along, first), (along, second)] if side in ("left", "right") else [(first, along), (second, along)]
    colours = [rng.choice(list(COLOURS)) for _ in places]
    for kind, place, colour in zip((one, other), places, colours):
        paper.shape(kind, paper.cell(*place, cells), colour)
    question = f"Is the {one} left, right, above or below the {other}?"
    return question, side, f"{one} {other} {places} {colours}"


_TASKS = {"count": _count, "number": _number, "chart": _chart, "relation": _relation}
