"""Benchmarks by name. Each is a module in `benchmarks/` with `ABOUT`, `run(options) -> dict` and, where it has them,
`OPTIONS` (name: default) and `PEERS` (name: importable module).

The result is one flat object of numbers, with what a peer measured under `peers.NAME` in the same keys.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.device import host
from tidemill.device.host import OPENMP
from tidemill.errors import ConfigError, did_you_mean
from tidemill.observe import run_folder
from tidemill.recipe import dialect

if TYPE_CHECKING:
    from rich.console import RenderableType

COMMON = {"repeats": 3, "peers": []}
INSTALL_PEERS = "pip install 'tidemill[peers]'"


def peer_environment() -> dict[str, str]:
    """This process's environment as it was before importing Tidemill: how our threads wait is not a peer's choice."""
    return {name: value for name, value in os.environ.items() if OPENMP.get(name) != value}


def folder() -> Path:
    return Path(__file__).resolve().parents[2] / "benchmarks"


def listing() -> list[tuple[str, str]]:
    """Name and one line about each, read without running any."""
    found = [(p.stem.rstrip("_"), _about(p)) for p in sorted(folder().glob("*.py"))]
    return [(name, about) for name, about in found if about]  # the others are parts of these


def run(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run a benchmark. A peer that is not installed is named in `missing_peers` with the command that installs it."""
    module = _load(name)
    chosen = _options(name, module, options or {})
    known: Mapping[str, str] = getattr(module, "PEERS", {})
    for peer in chosen["peers"]:
        if peer not in known:
            raise ConfigError(f"bench {name} has no peer {peer!r}{did_you_mean(peer, known)}", _peers_known(known))
    missing = {p: INSTALL_PEERS for p in chosen["peers"] if importlib.util.find_spec(known[p]) is None}
    chosen["peers"] = [p for p in chosen["peers"] if p not in missing]
    started = time.perf_counter()
    result = module.run(chosen)
    record = {"bench": name, **result, "options": chosen, "bench_seconds": time.perf_counter() - started}
    if missing:
        record["missing_peers"] = missing
    return {**record, "machine": machine(), "versions": run_folder.versions()}


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value` or `key=value`, values as YAML; `--peer NAME` may be said several times."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not equals and word.startswith("--"):
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        elif not equals:
            raise ConfigError(f"{word!r} is not an option", "write --key value or key=value, such as --repeats 5")
        key = key.strip().lstrip("-").replace("-", "_")
        if key in ("peer", "peers"):
            found.setdefault("peers", []).extend(v for v in value.strip("[]").replace(" ", "").split(",") if v)
        else:
            found[key] = dialect.parse(value)
    return found


def repeat(measure: Callable[[], Any], times: int, warmup: int = 0) -> dict[str, Any]:
    """Median, spread (largest minus smallest, as a share of the median) and every run.

    `measure` gives a number, or a mapping of numbers (then so is the result), or nothing: then it is timed, in seconds.
    """
    for _ in range(warmup):
        measure()
    runs = [_timed(measure) for _ in range(max(1, times))]
    if isinstance(runs[0], Mapping):
        return {key: summary([float(r[key]) for r in runs]) for key in runs[0]}
    return summary([float(r) for r in runs])


def summary(runs: list[float]) -> dict[str, Any]:
    median = statistics.median(runs)
    return {"median": median, "spread": (max(runs) - min(runs)) / abs(median) if median else 0.0, "runs": runs}


def _timed(measure: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    value = measure()
    return time.perf_counter() - started if value is None else value


def machine() -> dict[str, Any]:
    memory = host.memory()
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": host.processor(),
        "cores": host.cores(),
        "memory_bytes": memory.total,
    }
    if "torch" in sys.modules:  # a benchmark that needs no torch is not made to load it
        from tidemill import device

        found["accelerators"] = [d.name for d in device.available() if d.kind != "cpu"]
    return found


# Output


@contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Send whatever a library prints to standard error, so that the JSON object is all there is on standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def as_json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, default=str)


def render(result: Mapping[str, Any]) -> RenderableType:
    """A table: one row a measure, one column for Tidemill and each peer, and how they compare."""
    from rich.console import Group
    from rich.table import Table

    peers: Mapping[str, Mapping[str, Any]] = result.get("peers", {})
    table = Table(title=f"bench {result['bench']}", title_justify="left")
    table.add_column("")
    for column in ("tidemill", *peers):
        table.add_column(column, justify="right")
    if peers:
        table.add_column("tidemill / peer", justify="right")
    for key, value in result.items():
        if key in ("bench", "bench_seconds", "repeats") or not _is_measure(value):
            continue
        others = [peer.get(key) for peer in peers.values()]
        ratio = [", ".join(_ratio(value, other) for other in others)] if peers else []
        table.add_row(key, _cell(value), *[_cell(o) for o in others], *ratio)
    where = result["machine"]
    notes = [
        f"{where['processor']}, {where['cores']} cores; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    ]
    notes += [f"{peer} is not installed: {command}" for peer, command in result.get("missing_peers", {}).items()]
    return Group(table, *notes)


def _is_measure(value: Any) -> bool:
    return isinstance(value, int | float | str) or (isinstance(value, Mapping) and "median" in value)


def _middle(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("median")
    return float(value) if isinstance(value, int | float) else None


def _cell(value: Any) -> str:
    middle = _middle(value)
    if middle is None:
        return "–" if value is None else str(value)
    text = f"{middle:,.0f}" if abs(middle) >= 1000 or float(middle).is_integer() else f"{middle:.4g}"
    spread = value.get("spread") if isinstance(value, Mapping) else None
    return f"{text} ± {100 * spread / 2:.0f} %" if spread else text


def _ratio(ours: Any, theirs: Any) -> str:
    a, b = _middle(ours), _middle(theirs)
    return f"{a / b:.2f}×" if a is not None and b else "–"


# Modules


def _about(path: Path) -> str:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ABOUT":
            return str(ast.literal_eval(node.value))
    return ""


def _load(name: str) -> Any:
    known = [n for n, _ in listing()]
    name = name.replace("-", "_")
    if name not in known:
        hint = f"benchmarks are {', '.join(known)}" if known else "benchmarks come with the repository, not the package"
        raise ConfigError(f"there is no benchmark {name!r}{did_you_mean(name, known)}", hint)
    root = str(folder().parent)
    if root not in sys.path:
        sys.path.insert(0, root)  # benchmarks import one another as `benchmarks.NAME`
    file = name if (folder() / f"{name}.py").exists() else f"{name}_"  # math_.py: math.py would be in the library's way
    return importlib.import_module(f"benchmarks.{file}")


def _options(name: str, module: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    known = COMMON | getattr(module, "OPTIONS", {})
    for key in given:
        if key not in known:
            raise ConfigError(
                f"bench {name} has no option {key!r}{did_you_mean(key, known)}", f"it has {', '.join(known)}"
            )
    # One word, or several with commas, where a list is expected.
    lists = {k: str(v).split(",") for k, v in given.items() if isinstance(known[k], list) and not isinstance(v, list)}
    return {**known, **given, **lists, "peers": list(given.get("peers", known["peers"]))}


def _peers_known(known: Mapping[str, str]) -> str:
    return f"its peers are {', '.join(known)}" if known else "it has none"
