"""Where two runs begin to differ: settings, then the first step, stage and tensor whose values are not the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import TidemillError
from tidemill.flow.dump import FOLDER, file_of
from tidemill.observe.metrics import is_computed
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config

LOOKED = "eval/"  # metrics that evaluations measure
LEARNED = ("gradient", "weight")  # parts of a dump that each update has
NAMES = frozenset({"name", "folder", "about"})  # settings that change no number


@dataclass(frozen=True, slots=True)
class Difference:
    step: int
    stage: str  # or "metrics", "checkpoint"
    tensor: str
    how: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.stage}, {self.tensor}: {self.how}"


@dataclass(frozen=True, slots=True)
class Comparison:
    settings: tuple[str, ...]
    metrics: Difference | None
    dumps: Difference | None
    checkpoints: Difference | None
    dumped: tuple[int, ...]  # steps that both runs dumped
    saved: tuple[int, ...]  # steps that both runs have checkpoints of

    @property
    def first(self) -> Difference | None:
        """Find the first difference. A dump says most about a step."""
        found = [d for d in (self.dumps, self.metrics, self.checkpoints) if d is not None]
        return min(found, key=lambda d: d.step) if found else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "first": None if self.first is None else asdict(self.first)}


def compare(a: str | Path, b: str | Path) -> Comparison:
    one, other = (RunFolder.open(run, exclusive=False) for run in (a, b))
    dumped = sorted(_steps(one.path / FOLDER) & _steps(other.path / FOLDER))
    saved = sorted(_steps(one.checkpoints) & _steps(other.checkpoints))
    return Comparison(
        settings=tuple(_settings(one.config, other.config)),
        metrics=next(_metrics(one.metrics_file, other.metrics_file), None),
        dumps=next((d for step in dumped for d in _dumps(one.path, other.path, step)), None),
        checkpoints=next((d for step in saved for d in _checkpoints(one.checkpoints, other.checkpoints, step)), None),
        dumped=tuple(dumped),
        saved=tuple(saved),
    )


def render(found: Comparison) -> str:
    lines = [f"setting {line}" for line in found.settings]
    lines.append(f"first difference: {found.first}" if found.first else "no difference")
    for what in (found.dumps, found.metrics, found.checkpoints):
        if what is not None and what is not found.first:
            lines.append(f"also {what}")
    if found.first is not None and found.first is not found.dumps:
        lines.append(f"to see the stage and the tensor, run both with observe.dump=[{found.first.step}]")
    lines.append(f"compared: metrics, dumps of steps {list(found.dumped)}, checkpoints of steps {list(found.saved)}")
    return "\n".join(lines)


def _settings(a: Config, b: Config) -> Iterator[str]:
    one, other = dict(recipe.leaves(a)), dict(recipe.leaves(b))
    for key in dict.fromkeys([*one, *other]):  # a section that is null in one run has keys only in the other
        if key not in NAMES and one.get(key) != other.get(key):
            yield f"{key}: {one.get(key)!r} and {other.get(key)!r}"


def _metrics(a: Path, b: Path) -> Iterator[Difference]:
    one, other = _by_step(a), _by_step(b)
    for step in sorted(one.keys() | other.keys()):
        if step not in one or step not in other:
            yield Difference(
                step, "metrics", "all", f"only the {'first' if step in one else 'second'} run has the step"
            )
            continue
        for name in sorted(one[step].keys() | other[step].keys()):
            if name.startswith(LOOKED) and (name not in one[step] or name not in other[step]):
                continue  # one run evaluated and the other did not, as a shorter run does at its end
            values = one[step].get(name, "nothing"), other[step].get(name, "nothing")
            is_speed = not is_computed(name)
            if not is_speed and values[0] != values[1]:
                yield Difference(step, "metrics", name, f"{values[0]} and {values[1]}")


def _by_step(path: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break  # cut short by a kill
        found.setdefault(int(record["step"]), {}).update(record)
    return found


def _dumps(a: Path, b: Path, step: int) -> Iterator[Difference]:
    one, other = (_tensors(file_of(run, step)) for run in (a, b))
    order = {stage: i for i, stage in enumerate(dict.fromkeys([*one[1], *other[1]]))}
    names = list(dict.fromkeys([*one[0], *other[0]]))
    for name in sorted(names, key=lambda n: _when(n, order)):  # a stable sort: equals stay in their order
        stage, _, tensor = name.partition("/")
        if name not in one[0] or name not in other[0]:
            yield Difference(step, stage, tensor, f"only the {'first' if name in one[0] else 'second'} run has it")
        elif how := _unlike(one[0][name], other[0][name]):
            yield Difference(step, stage, tensor, how)


def _when(name: str, stages: dict[str, int]) -> tuple[int, int, bool]:
    """Order by stage; for the learner also by update, gradients before weights."""
    stage, what, update = [*name.split("/", 3), "", ""][:3]
    if what not in LEARNED or not update.isdigit():
        return stages.get(stage, len(stages)), 0, False
    return stages.get(stage, len(stages)), int(update), what == "weight"


def _checkpoints(a: Path, b: Path, step: int) -> Iterator[Difference]:
    from tidemill.learn import checkpoint

    one, other = (checkpoint.load(folder / f"step-{step:06d}")[0] for folder in (a, b))
    for name, tensor in one.items():
        if name not in other:
            yield Difference(step, "checkpoint", name, "only the first run has it")
        elif how := _unlike(_array(tensor), _array(other[name])):
            yield Difference(step, "checkpoint", name, how)
    for name in other:
        if name not in one:
            yield Difference(step, "checkpoint", name, "only the second run has it")


def _unlike(a: Any, b: Any) -> str:
    """Say how two arrays differ, or None. Equal means the same bits, NaN included."""
    if a.shape != b.shape:
        return f"{list(a.shape)} and {list(b.shape)} values"
    if a.tobytes() == b.tobytes():
        return ""
    same = (a == b) | ((a != a) & (b != b))
    at = np.flatnonzero(~same.reshape(-1))
    if not len(at):
        return ""  # 0 and -0, or different NaNs
    place = np.unravel_index(at[0], a.shape)
    gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    first = f"first at {[int(i) for i in place]}: {a[place]} and {b[place]}"
    return f"{len(at):,} of {a.size:,} values, {first}, by at most {np.nanmax(gap):.3g}"


def _tensors(path: Path) -> tuple[dict[str, Any], list[str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            came = told["names"].split("\n") if told.get("names") else sorted(file.keys())
            return {name: _array(file.get_tensor(name)) for name in came}, told.get("stages", "").split(",")
    except SafetensorError as error:
        raise TidemillError(
            f"{path} cannot be read: {error}", "the run was killed while it wrote the dump; remove the file"
        ) from error


def _array(tensor: Any) -> Any:
    """Convert bfloat16, which numpy lacks, to float32, which holds each of its values."""
    return tensor.float().numpy() if "bfloat16" in str(tensor.dtype) else tensor.numpy()


def _steps(folder: Path) -> set[int]:
    names = (p.name.removesuffix(".safetensors").removeprefix("step-") for p in folder.glob("step-*"))
    return {int(name) for name in names if name.isdigit()}
