"""From a recipe to a job somewhere else: check, pack, send; then ask, stop and resume by the job's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.check import precheck
from tidemill.errors import ConfigError
from tidemill.launch import job as jobs
from tidemill.launch import options as option_words
from tidemill.launch import snapshot, steps
from tidemill.launch.job import Job, Status
from tidemill.launch.targets.ssh import SshOptions, chosen
from tidemill.launch.targets.table import find
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config

SNAPSHOTS = "snapshots"
ON_RAY = ("cluster.executor=ray", "cluster.address=auto")


def prepare(
    recipe: str,
    overrides: Sequence[str],
    where: str,
    given: Mapping[str, Any],
    include: Sequence[Path] = (),
    is_resume: bool = False,
    is_dry: bool = False,
) -> Job:
    """Everything up to sending. A dry run claims no name and writes only the snapshot."""
    target = find(where)
    options = option_words.parse(target.options, given, where)
    nodes = len(chosen(options)) if isinstance(options, SshOptions) else options.nodes
    on_ray = ON_RAY if nodes > 1 or target.is_cluster else ()
    config = recipes.load(recipe, [*overrides, *on_ray]).config
    if not is_dry:
        steps.require(target.programs)
    config = config.model_copy(update={"folder": target.run_folder(options, config.folder)})
    if target.shares_files:
        precheck.check(config)
        _refuse_other_run(config, is_resume)
    archive = snapshot.pack(recipes.dump(config), jobs.home() / SNAPSHOTS, include)
    folder = jobs.next_folder(config.name) if is_dry else jobs.new_folder(config.name)
    return Job(
        name=folder.name,
        where=where,
        options=options.model_dump(exclude_unset=True),
        folder=folder,
        archive=archive.path,
        digest=archive.digest,
        run=f"{config.folder}/{config.name}",
    )


def _refuse_other_run(config: Config, is_resume: bool) -> None:
    path = Path(config.folder) / config.name
    if not is_resume and (path / "config.yaml").exists():
        raise ConfigError(
            f"{path} already holds a run, which the job would continue",
            "add --resume if you want that; else give the job another name: name=NAME",
        )


def send(job: Job) -> Job:
    target = find(job.where)
    planned = target.steps(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    job.save()  # before it is sent: a launch that is cut off leaves a trace
    sent = job.sent(target.reference(job, steps.perform(planned)))
    sent.save()
    return sent


def show(job: Job) -> str:
    head = f"# snapshot {job.archive} (sha256 {job.digest})\n# the run will be {job.run}"
    return f"{head}\n\n{steps.show(find(job.where).steps(job))}"


def status(name: str) -> tuple[Job, Status]:
    job = jobs.load(name)
    if not job.launched:
        return job, Status("lost", "the launch was cut off before it was sent; `launch resume` sends it")
    return job, find(job.where).status(job)


def progress(job: Job) -> str:
    """The last step that the run recorded, where its folder can be seen from here."""
    metrics = Path(job.run) / "metrics.jsonl"
    if not find(job.where).shares_files or not metrics.exists():
        return ""
    lines = metrics.read_bytes().split(b"\n")
    return f"step {json.loads(lines[-2])['step']}" if len(lines) > 1 else ""


def logs(name: str, lines: int) -> str:
    job = jobs.load(name)
    return find(job.where).logs(job, lines)


def stop(name: str) -> Status:
    job, now = status(name)
    if now.state in jobs.ENDED:
        return now
    find(job.where).stop(job)
    return Status(now.state, "asked to save and end")


def resume(name: str) -> Job:
    """Send a job again that has ended before its run was done; the run goes on from its last checkpoint."""
    job, now = status(name)
    if now.state not in jobs.ENDED:
        raise ConfigError(f"{name} is {now.state}: there is nothing to resume", f"tidemill launch status {name}")
    (job.folder / "stop").unlink(missing_ok=True)
    return send(replace(job, attempt=job.attempt + 1))
