"""Agents: what is learned of their conversations is what was sampled, and four of them learn, over seeds.

The agents are those of recipes/agents and the self-play of recipes/cpu/duel; their packages are in the environments
that `make test-clients` makes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import _conversations
from benchmarks._recipe_runs import Came, Job, read, run_one
from tidemill.errors import ConfigError

ABOUT = "agents: sampled against learned tokens over conversations, and accuracy before and after by agent and seed"
# agents: which learn; none: `--agents none`. conversations: compared, none at 0. venvs: where `make test-clients` put
# its environments, up to the hyphen. runs: a folder that keeps the runs; a finished run found there is not repeated.
OPTIONS = {
    "agents": ["openai", "mcp", "duel", "verifiers"],
    "seeds": 3,
    "conversations": 1000,
    "clients": 64,
    "venvs": ".venv-clients",
    "runs": "",
    "settings": [],
}
RECIPES = {
    "openai": ("agents/openai", "agents"),
    "openai-agents": ("agents/openai-agents", "agents"),
    "langchain": ("agents/langchain", "agents"),
    "mcp": ("agents/mcp", "agents"),
    "verifiers": ("agents/verifiers", "verifiers"),
    "duel": ("cpu/duel", ""),
}
BELOW, ABOVE = 0.4, 0.75
LIMIT_S = 4 * 3600.0


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if options["conversations"]:
        result |= _conversations.measure(int(options["conversations"]), int(options["clients"]))
        result |= _conversations.same_alone(64, int(options["clients"]))
    agents = [name for name in options["agents"] if name not in ("", "none", "None")]
    with tempfile.TemporaryDirectory(prefix="tidemill-agents-") as place:
        folder = Path(str(options["runs"]) or place)
        folder.mkdir(parents=True, exist_ok=True)
        for name in agents:
            result |= learned(name, int(options["seeds"]), folder, str(options["venvs"]), options["settings"])
    if agents:
        result["agents_that_learn"] = sum(bool(result[f"{name}/learns"]) for name in agents)
    return result


def learned(name: str, seeds: int, folder: Path, venvs: str, settings: list[str]) -> dict[str, Any]:
    if name not in RECIPES:
        raise ConfigError(f"bench agents: there is no agent {name!r}", f"there are {', '.join(RECIPES)}")
    recipe, group = RECIPES[name]
    own = list(settings)
    if group:
        python = Path(f"{venvs}-{group}").resolve() / "bin" / "python"
        own.append(f"environment.python={python}")
        own += [f"data.args.python={python}"] if name == "verifiers" else []
    before, after, seconds = list[float](), list[float](), list[float]()
    for seed in range(1, seeds + 1):
        job = Job(recipe, seed, tuple(own))
        came = finished(job, folder) or run_one(job, folder, time.monotonic() + LIMIT_S)
        before.append(came.before["greedy"])
        after.append(came.after["greedy"])
        seconds.append(came.summary["seconds"])
    return {
        f"{name}/before": before,
        f"{name}/after": after,
        f"{name}/learns": int(max(before) < BELOW and min(after) > ABOVE),
        f"{name}/seconds": statistics.median(seconds),
    }


def finished(job: Job, folder: Path) -> Came | None:
    """Read a run that an earlier call brought to its end."""
    place = folder / job.name
    if not (place / "summary.json").exists():
        return None
    came = read(job, place)
    return came if came.summary["accuracy_after"] is not None else None
