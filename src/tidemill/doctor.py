"""Reports what this machine can do: devices, versions, memory, disk, extras; and what a recipe would need of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Literal

from tidemill import device
from tidemill.check import parallel, precheck, rules
from tidemill.device import hints, host
from tidemill.device.ascend import settings as npu_settings
from tidemill.device.ascend import smi as npu_smi
from tidemill.errors import TidemillError, human
from tidemill.estimate import handover as turns
from tidemill.estimate import ranks_memory
from tidemill.estimate import run as estimate
from tidemill.estimate.memory import MemoryEstimate, host_bytes, host_cache_bytes, memory
from tidemill.models import published
from tidemill.models.box import find
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config
from tidemill.recipe.load import LoadedRecipe
from tidemill.rollout.native.ranks.grid import Grid

Status = Literal["ok", "note", "warn", "bad"]  # bad: will fail; warn: may fail or be slow; note: not needed

NEEDED = {
    "torch": "2.11",
    "transformers": "5.9",
    "safetensors": "0.5",
    "numpy": "2.0",
    "pydantic": "2.9",
    "PyYAML": "6",
    "typer": "0.15",
    "rich": "13",
    "tensorboard": "2.18",
}
# Extra → what it is for, and the modules that prove it.
EXTRAS = {
    "data": ("Parquet files and dataset folders", ("pyarrow",)),
    "plot": ("the reward curve as PNG", ("matplotlib",)),
    "gguf": ("GGUF files, and the models that come in them", ("gguf",)),
    "cluster": ("many processes and machines", ("ray", "msgspec", "psutil")),
    "rewards": ("mathematics, reasoning tasks, JSON schemas", ("math_verify", "reasoning_gym", "jsonschema")),
    "peers": ("`tidemill bench` beside other trainers", ("trl",)),
    "dev": ("`make test`", ("pytest", "hypothesis", "ruff", "mypy")),
}
ENGINES = {"vllm": "rollout.engine=vllm"}
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # where Ray records the cluster that runs on this machine
LITTLE_DISK, LITTLE_MEMORY = 2 * 10**9, 2 * 10**9


@dataclass(frozen=True, slots=True)
class Finding:
    area: str
    what: str
    status: Status = "ok"
    remedy: str = ""


def examine(loaded: LoadedRecipe | None = None) -> list[Finding]:
    found = [*_machine(loaded.config.folder if loaded else "runs"), *_packages(), *_devices(), *_extras()]
    if loaded is not None:
        found += _recipe(loaded.config)
    return found


def is_healthy(findings: list[Finding]) -> bool:
    return not any(f.status == "bad" for f in findings)


def _machine(folder: str) -> Iterator[Finding]:
    yield Finding("machine", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processor", f"{host.processor()}, {host.cores()} cores available")
    memory = host.memory()
    yield Finding(
        "memory",
        f"{human(memory.free)} free of {human(memory.total)}",
        "warn" if memory.free < LITTLE_MEMORY else "ok",
        "close other programs" if memory.free < LITTLE_MEMORY else "",
    )
    place = Path(folder).expanduser().resolve()
    while not place.exists():
        place = place.parent
    disk = shutil.disk_usage(place)
    little = disk.free < LITTLE_DISK
    remedy = "free some space, or set folder=… to another disk" if little else ""
    yield Finding(
        "disk", f"{human(disk.free)} free of {human(disk.total)} at {place}", "warn" if little else "ok", remedy
    )
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm")
        yield Finding("shared memory", f"{human(shared.free)} free of {human(shared.total)}")


def _packages() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for package, least in NEEDED.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed", "bad", f"pip install '{package}>={least}'")
            continue
        old = _parts(version) < _parts(least)
        remedy = f"pip install --upgrade '{package}>={least}'" if old else ""
        yield Finding(package, version + (f", older than {least}" if old else ""), "bad" if old else "ok", remedy)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def _devices() -> Iterator[Finding]:
    try:
        usable = device.available()
    except Exception as error:  # a broken torch may raise anything; finding that out is what this is for
        first = (str(error).splitlines() or [type(error).__name__])[0]
        yield Finding("device", f"torch cannot be used: {first}", "bad", "reinstall torch")
        return
    for one in usable:
        memory = one.memory()
        narrow = "float32 and bfloat16" if one.supports("bfloat16") else "float32; bfloat16 works but slowly"
        kind = f"device={one.kind}" + (f":{one.index}" if one.kind != "cpu" else "")
        yield Finding(kind, f"{one.name}; {human(memory.free)} free of {human(memory.total)}; {narrow}")
    for seen, remedy in hints.unused({one.kind for one in usable}):
        yield Finding("device", f"{seen}, but torch does not use it", "warn", remedy)
    if any(one.kind == "npu" for one in usable) or npu_smi.versions():
        yield from _ascend()


def _ascend() -> Iterator[Finding]:
    """From the driver up: what an NPU's software is made of, and what of the environment is not as it should be."""
    found = npu_smi.versions()
    for part in npu_smi.VERSION_FILES:
        if part in found:
            yield Finding(part, found[part])
        else:
            remedy = "source the CANN set_env.sh" if part in ("CANN", "HCCL") else "install it (docs/ascend.md)"
            yield Finding(part, "not found", "warn", remedy)
    try:
        package = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        yield Finding("torch_npu", "not installed", "warn", "pip install it in the version that goes with this torch")
        return
    fits = _parts(package)[:2] == _parts(metadata.version("torch"))[:2]
    remedy = "" if fits else f"pip install torch_npu=={metadata.version('torch').split('+')[0]}, or that torch"
    yield Finding("torch_npu", package + ("" if fits else ", made for another torch"), "ok" if fits else "bad", remedy)
    for name, given, wanted in npu_settings.unlike_wanted():
        yield Finding("environment", f"{name}={given}; Tidemill would set {wanted}", "note", "see docs/ascend.md")


def _extras() -> Iterator[Finding]:
    for extra, (purpose, modules) in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        if missing:
            what = f"{purpose}: no, without {', '.join(missing)}"
            yield Finding(f"[{extra}]", what, "note", f"pip install 'tidemill[{extra}]'")
        else:
            yield Finding(f"[{extra}]", f"{purpose}: yes")
    for package, purpose in ENGINES.items():
        if importlib.util.find_spec(package) is None:
            yield Finding(
                package,
                f"{purpose}: not installed; the native engine works without it",
                "note",
                f"pip install {package}",
            )


def _recipe(config: Config) -> Iterator[Finding]:
    known = published.shape_of(config.model)
    if known is not None and not find.look(config.model.path or "").is_dir():
        yield from _on_paper(config, known)
        return
    try:
        precheck.check(config)
        yield Finding("recipe", f"{config.name}: its settings are valid")
    except TidemillError as error:
        yield Finding("recipe", error.message, "bad", error.remedy)
        return
    yield from (Finding("recipe", line, "note") for line in rules.unread(config))
    shape = shape_of(recipe.model_of(config))
    try:
        chosen = device.pick(config.device)
    except TidemillError as error:
        yield Finding("recipe device", error.message, "bad", error.remedy)
        return
    if config.learn.parallel.ranks > 1 and shape is not None:
        yield from _ranks(config, shape)
        return
    yield from _devices_here(config)
    yield from _one_rank(config, shape, chosen)


def _one_rank(config: Config, shape: ModelShape | None, chosen: device.Device) -> Iterator[Finding]:
    """Say whether a learner on one device fits it."""
    needed = memory(config, shape, on_accelerator=chosen.kind != "cpu") if shape else None
    if needed is None or shape is None:
        yield Finding("recipe memory", "the model's folder does not tell its size", "note")
        return
    free = chosen.memory().free
    parts = ", ".join(f"{name} {human(size)}" for name, size in needed.parts() if size)
    handed_over = turns.chosen(config, recipe.model_of(config), chosen)
    most = turns.peak(needed, handed_over)
    taken = "" if handed_over == "never" else f", at once {human(most)} with flow.hand_over={handed_over}"
    what = f"{human(needed.total)} by estimate ({parts}){taken}; {human(free)} is free on {chosen.kind}"
    yield _fitting("recipe memory", what, most <= free, "; ".join(_savings(config, needed)))
    if config.rollout.ranks > 1:  # on devices of its own, without the learner
        alone = ranks_memory.RankMemory(*(0 for _ in fields(ranks_memory.RankMemory)))
        have = chosen.memory().total // (config.rollout.ranks * config.cluster.rollouts if chosen.kind == "cpu" else 1)
        yield _beside_learner(config, shape, alone, have)
    on_host = host_bytes(config, shape) + turns.host_bytes(needed, handed_over) if chosen.kind != "cpu" else 0
    if on_host:
        remedy = "learn.moments=int8 makes the optimizer's state small; learn.offload=none"
        if config.rollout.cache_on_host_gb:
            remedy += "; a smaller rollout.cache_on_host_gb"
        yield _on_host(on_host, remedy)
    if not chosen.supports(config.model.dtype):
        yield Finding("recipe dtype", f"{config.model.dtype} is slow on this device", "warn", "model.dtype=float32")


def _on_host(needed: int, remedy: str) -> Finding:
    room = host.memory().free
    what = f"{human(needed)} by estimate on the host instead of the device; {human(room)} is free"
    return _fitting("recipe host memory", what, needed <= room, remedy)


def _fitting(area: str, what: str, fits: bool, remedy: str) -> Finding:
    return Finding(area, what, "ok" if fits else "bad", "" if fits else remedy)


def _on_paper(config: Config, shape: ModelShape) -> Iterator[Finding]:
    """Judge the layout of a large model whose folder is not here by its published sizes."""
    missing = "model.path="  # what precheck says about a missing folder
    problems = [p for p in precheck.problems(config, config.model) if not p.startswith(missing)]
    problems += parallel.size_problems(config.learn.parallel, shape)
    if config.rollout.ranks > 1:
        problems += parallel.engine_problems(Grid.of(config.rollout), shape)
    if problems:
        yield Finding("recipe", recipe.as_list(list(dict.fromkeys(problems))), "bad", "change these keys")
        return
    what = f"{config.name}: its settings are valid; {config.model.path} is not here: judged by its published sizes"
    yield Finding("recipe", f"{what} ({shape.total / 1e9:.0f} billion parameters)")
    yield from _ranks(config, shape)


def _devices_here(config: Config) -> Iterator[Finding]:
    """Say whether the devices that the recipe is written for are here, unless it joins a cluster elsewhere."""
    is_elsewhere = config.cluster.executor == "ray" and _is_cluster_running(config.cluster.address)
    sizes, cluster, kind = config.learn.parallel, config.cluster, config.device.partition(":")[0]
    is_for_cpu = kind == "cpu" or (kind == "auto" and sizes.device_gb is None)
    if is_elsewhere or is_for_cpu:
        return
    wanted = 1 if cluster.executor == "local" and sizes.ranks == 1 else max(sizes.ranks, cluster.learners)
    if cluster.executor != "local" and cluster.placement.rollout == "separated":
        wanted += cluster.rollouts * config.rollout.ranks
    found, here = device.count()
    if here >= wanted:
        return
    each = f" of {sizes.device_gb:g} GB" if sizes.device_gb is not None else ""
    seen = f"{here} ({found})" if here else "none"
    yield Finding(
        "recipe devices",
        f"it cannot work here: it is written for {wanted} devices{each}, and this machine has {seen}",
        "bad",
        "run it on such a machine, or name a running cluster with cluster.address=HOST:PORT",
    )


def _is_cluster_running(address: str) -> bool:
    """Say whether Ray would join a cluster; `auto` finds the one that this machine is part of."""
    if address in ("local", "auto"):
        return address == "auto" and ("RAY_ADDRESS" in os.environ or CURRENT_CLUSTER.exists())
    return True


def _ranks(config: Config, shape: ModelShape) -> Iterator[Finding]:
    """Say whether each rank's share fits a device."""
    yield from _devices_here(config)
    layout = config.learn.parallel
    if layout.device_gb is not None:
        have, is_cpu = int(layout.device_gb * 1e9), False
    else:
        chosen = device.pick(config.device)
        is_cpu = chosen.kind == "cpu"
        have = chosen.memory().total // (layout.ranks if is_cpu else 1)  # a machine's ranks share its memory
    needed = ranks_memory.per_rank(config, shape, on_accelerator=not is_cpu)
    parts = ", ".join(f"{name} {human(size)}" for name, size in needed.parts() if size)
    what = f"{human(needed.total)} of {human(have)} on each of {layout.ranks} ranks by estimate ({parts})"
    yield _fitting("recipe memory", what, needed.total <= have, "; ".join(_rank_savings(shape, needed)))
    if config.cluster.executor != "local":
        yield _beside_learner(config, shape, needed, have)
    if evicted := host_cache_bytes(config):
        yield _on_host(evicted, "a smaller rollout.cache_on_host_gb")


SIZES = ("tp", "dp", "pp")


def _beside_learner(config: Config, shape: ModelShape, learner: ranks_memory.RankMemory, have: int) -> Finding:
    """Say whether an engine's share of the weights and of its cache fits, too. Colocated, rollout takes turns with
    learning."""
    is_colocated = config.cluster.placement.rollout == "colocated"
    most_handed = "all" if config.flow.hand_over == "auto" else config.flow.hand_over
    what: turns.HandedOver = most_handed if is_colocated and turns.are_taken(config) else "never"
    mine = learner if is_colocated else ranks_memory.RankMemory(*(0 for _ in fields(ranks_memory.RankMemory)))
    grid = Grid.of(config.rollout)
    copy, cache = ranks_memory.engine_share(config, shape, grid)
    most = turns.rank_peak(mine, copy, cache, what, grid.ranks > 1)
    whose = "an engine's whole copy" if grid.ranks == 1 else f"a share of an engine of {grid}"
    text = f"{human(most)} of {human(have)} with {whose} ({human(copy)}) and its cache ({human(cache)})"
    if most <= have:
        return Finding("recipe rollout", text)
    grids = parallel.engine_grids(config, shape)
    for wider in grids:
        copy, cache = ranks_memory.engine_share(config, shape, wider)
        token = max(1, cache * wider.dp // estimate.cache_tokens(config))  # of one replica's ranks
        room = (have - turns.at_rest(mine, what) - copy) // token * wider.dp
        if (
            turns.rank_peak(mine, copy, 0, what, wider.ranks > 1) <= have
            and room >= estimate.longest(config) * wider.dp
        ):
            keys = " ".join(f"rollout.{n}={v}" for n in SIZES if (v := getattr(wider, n)) != getattr(grid, n))
            tokens = f"rollout.cache_tokens={room}" if room < estimate.cache_tokens(config) else ""
            return Finding("recipe rollout", text, "warn", f"{keys} {tokens}".strip() + " would fit")
    no_more = f"larger devices; an engine of this model has at most {grids[-1].ranks} ranks here"
    return Finding("recipe rollout", text, "warn", no_more)


def _rank_savings(shape: ModelShape, needed: ranks_memory.RankMemory) -> list[str]:
    """What would help, the largest part first."""
    more_ranks = "more ranks: a larger learn.parallel.fsdp"
    gathered = "a larger learn.parallel.tp" + (" or ep: no rank then gathers all experts" if shape.experts else "")
    advice = {
        "gathered": gathered,
        "reducing": gathered,
        "weights": more_ranks,
        "gradients": more_ranks,
        "optimizer": f"learn.optimizer_on_host=true; {more_ranks}",
        "activations": "learn.recompute=full, a larger learn.parallel.cp, or a smaller train.tokens_per_microbatch",
        "logits": "a smaller learn.logprob_chunk, or a larger learn.parallel.tp",
        "reference": f"algorithm.kl.coef=0; {more_ranks}",
        "critic": f"an algorithm without a critic (grpo); {more_ranks}",
        "mean": f"learn.ema=0; {more_ranks}",
    }
    largest = sorted(needed.parts(), key=lambda part: -part[1])
    words = [w for name, size in largest if size > needed.total / 20 for w in advice[name].split("; ")]
    return list(dict.fromkeys(words))


def _savings(config: Config, needed: MemoryEstimate) -> Iterator[str]:
    """What would help, the largest part first."""
    learn = config.learn
    advice = {
        "activations": "learn.recompute=full (or mlp, or selective), or a smaller train.tokens_per_microbatch",
        "logits": "a smaller learn.logprob_chunk",
        "layer": "a smaller train.tokens_per_microbatch",
        "optimizer": "learn.optimizer_on_host=true, or learn.moments=int8",
        "gradients": "learn.lora_rank=16 learns few weights" if not learn.lora_rank else "a smaller learn.lora_rank",
        "cache": "a smaller rollout.concurrent or rollout.cache_tokens",
        "host_cache": "a smaller rollout.cache_on_host_gb",
        "reference": "algorithm.kl.coef=0 needs no reference model",
        "mean": "learn.ema=0 keeps no running mean of the weights",
    }
    for name, _ in sorted(needed.parts(), key=lambda part: -part[1]):
        if name in advice and getattr(needed, name) > needed.total / 20:
            yield advice[name]
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16 halves the weights"
