"""A calibration: what a device was measured to do, as efficiencies that a model of time multiplies rooflines with.

A small JSON file. `tidemill calibrate` writes one for this machine; those of an H200 and of one CPU come along. A
device without one borrows the efficiencies of the nearest kind, and plans say so.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from tidemill.errors import ConfigError

FORMAT = 1
OWN = "TIDEMILL_CALIBRATIONS"  # a folder of files that go before those that come along
SHIPPED = Path(__file__).parent / "data"
Cost = dict[str, float]  # seconds on the roofline, or counts, by feature: what coefficients are multiplied with


@dataclass(frozen=True, slots=True)
class Grid:
    """Efficiency of matrix products: the roofline's time over the measured one, by rows and the matrix's elements."""

    rows: tuple[int, ...]
    elements: tuple[int, ...]
    share: tuple[tuple[float, ...], ...]  # [row][element]

    def at(self, rows: float, elements: float) -> float:
        """Between measured points by the logarithm of both."""
        i, u = _between(self.rows, rows)
        j, v = _between(self.elements, elements)
        top = self.share[i][j] * (1 - v) + self.share[i][j + 1] * v
        low = self.share[i + 1][j] * (1 - v) + self.share[i + 1][j + 1] * v
        return top * (1 - u) + low * u


def _between(points: tuple[int, ...], value: float) -> tuple[int, float]:
    at = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    low, high = math.log(points[at]), math.log(points[at + 1])
    share = (math.log(max(value, 1e-9)) - low) / (high - low)
    return at, min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True)
class Calibration:
    device: str
    made: str  # the date
    versions: Mapping[str, str]
    flops: float  # reached by a large product of the model's usual type
    flops8: float  # of 8-bit products; 0: not measured
    bytes_per_s: float  # of a large copy, reads and writes counted
    matmul: Grid
    coefficients: Mapping[str, float]  # by feature: multiples of the roofline's seconds, or seconds each
    source: str = ""  # what was measured
    errors: Mapping[str, float] = field(default_factory=dict)  # by phase: how far the fit is from its own points
    threads: int = 1  # of a CPU

    def matmul_s(self, m: float, k: float, n: float, width: int, flops: float | None = None, mats: int = 1) -> float:
        """`mats` products of (m, k) and (k, n). `flops`: another rate, such as that of 8-bit products."""
        if m <= 0:
            return 0.0
        floor = max(2 * m * k * n / (flops or self.flops), (k * n + m * k + m * n) * width / self.bytes_per_s)
        return mats * floor / self.matmul.at(m, k * n)

    def seconds(self, cost: Mapping[str, float]) -> float:
        known = self.coefficients
        return sum(amount * known.get(name, default_of(name)) for name, amount in cost.items())

    def for_device(self, device: str, flops: float, bytes_per_s: float, ratio: tuple[float, float]) -> Calibration:
        """The same efficiencies on another device, by its data sheet. `ratio`: what this one reached of its own."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        borrowed = f"efficiencies of {self.device}"
        return Calibration(
            **{
                **plain,
                "device": device,
                "flops": flops * ratio[0],
                "bytes_per_s": bytes_per_s * ratio[1],
                "source": borrowed,
            }
        )

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def default_of(name: str) -> float:
    """Of a feature that was not measured: the roofline itself, or nothing where it counts what happens each time."""
    return 0.0 if name.split(".")[-1] in COUNTS else 1.0


COUNTS = frozenset({"once", "layer", "rows", "expert_layer"})


def parse(text: str, where: str) -> Calibration:
    try:
        plain = json.loads(text)
        if plain.pop("format") != FORMAT:
            raise ValueError("it has another format")
        grid = plain.pop("matmul")
        share = tuple(tuple(map(float, row)) for row in grid["share"])
        return Calibration(matmul=Grid(tuple(grid["rows"]), tuple(grid["elements"]), share), **plain)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is no calibration ({type(error).__name__}: {error})", "make it again with `tidemill calibrate`"
        ) from error


def load(path: str | Path) -> Calibration:
    try:
        return parse(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(
            f"--calibration {path}: {error.strerror}", "`tidemill calibrate --out FILE` makes one"
        ) from error


def own_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(OWN) or Path(base) / "tidemill" / "calibrations")


def file_name(device: str, threads: int = 1) -> str:
    words = "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
    return f"{words}.json" if threads == 1 else f"{words}-{threads}.json"


@cache
def shipped(name: str) -> Calibration:
    return load(SHIPPED / name)


def find(device: str, kind: str, threads: int = 1) -> Calibration | None:
    """Of this device by its name: one made here, else one that comes along."""
    for folder in (own_folder(), SHIPPED):
        file = folder / file_name("cpu" if kind == "cpu" else device, threads)
        if file.exists():
            return load(file)
    return None
