"""`tidemill simulate`: a run in virtual time, with what goes wrong; or a run that is over, replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.frame import SCALE, Overrides, app, say
from tidemill.cli.plan import Cluster, Json, Lengths, Measured

if TYPE_CHECKING:
    from tidemill.plan.simulate.run import Simulation
    from tidemill.plan.time_model import TimeModel


@app.command(rich_help_panel=SCALE)
def simulate(
    recipe: Annotated[str, typer.Argument(help="a recipe's name or path; with --replay, a run's folder")],
    overrides: Overrides = None,
    cluster: Cluster = "",
    steps: Annotated[int, typer.Option(help="steps to simulate", min=1)] = 20,
    lengths: Lengths = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="replay a run that was made with observe.timeline=work from its traces")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write; `tidemill watch` opens it")] = None,
    mtbf_hours: Annotated[
        float, typer.Option(help="mean hours between failures of one device; 0: no failures", min=0)
    ] = 0.0,
    restart_s: Annotated[float, typer.Option(help="seconds until a lost worker is back", min=0)] = 60.0,
    save_every: Annotated[int, typer.Option(help="steps between checkpoints; 0: the recipe's", min=0)] = 0,
    slow_share: Annotated[float, typer.Option(help="share of devices that are slower", min=0, max=1)] = 0.0,
    slow_factor: Annotated[float, typer.Option(help="how many times slower they are", min=1)] = 2.0,
    spread: Annotated[float, typer.Option(help="standard deviation of the log of the devices' speeds", min=0)] = 0.0,
    contention: Annotated[float, typer.Option(help="share by which moving weights may take longer", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="seed of lengths, speeds and failures")] = 0,
    calibration: Measured = None,
    as_json: Json = False,
) -> None:
    """Simulate a run on a cluster in virtual time, with the real driver, ledger and schedules."""
    from tidemill.errors import ConfigError
    from tidemill.plan.ask import asked
    from tidemill.plan.simulate import written
    from tidemill.plan.simulate.failures import Faults
    from tidemill.plan.simulate.replay import replay as replayed
    from tidemill.plan.simulate.run import simulate as simulated

    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: it is a file", "name a folder")
    more: dict[str, Any] = {}
    if replay:
        again = replayed(recipe)
        found, said = again.simulation, f"the traces of {recipe}"
        more = {"replay_error": again.error, "measured_s": list(again.measured)}
    else:
        question = asked(recipe, overrides or (), cluster, lengths, calibration)
        check_devices(question.model)
        faults = Faults(spread, slow_share, slow_factor, mtbf_hours, restart_s, contention, seed)
        found = simulated(
            question.model, question.lengths, steps=steps, faults=faults, seed=seed, save_every=save_every
        )
        said = question.said
    files = written.write(found, out) if out is not None else []
    if as_json:
        print(json.dumps(written.plain(found) | more))
        return
    _show(found, said)
    if replay:
        off = f"{100 * again.error:+.1f} %"
        say(f"the run itself took {sum(again.measured):.3g} s; after its first steps the replay is off by {off}")
    if files:
        say(f"{', '.join(file.name for file in files)} were written to {out}; to look: tidemill watch {out}")


def check_devices(model: TimeModel) -> None:
    """Refuse a recipe that asks for more accelerators than the cluster has."""
    from tidemill.errors import ConfigError

    have, name = model.machines.devices, model.machines.topology.name
    if model.machines.sheet.kind != "cpu" and model.devices > have:
        raise ConfigError(
            f"the recipe asks for {model.devices} devices, and {name} has {have}",
            "name a larger --cluster, or take a layout that fits: tidemill plan RECIPE --cluster … --write FILE",
        )


def _show(found: Simulation, said: str) -> None:
    from tidemill.observe.curve import sparkline
    from tidemill.plan.simulate import written

    p = written.plain(found)
    median = f"{p['step_s']:.3g} s a step in the median, {p['seconds']:.4g} s in all"
    say(f"{p['steps']} steps on {p['devices']} devices: {median}, {p['tokens_per_s']:,.0f} tokens/s learned")
    say(f"seconds a step  {sparkline([s.seconds for s in found.steps], 60)}")
    for name, share in p["idle"].items():
        say(f"{name:<16}{'█' * round(30 * share):<30} {100 * share:.0f} %")
    if p["staleness_max"]:
        say(f"staleness       {p['staleness']:.2f} steps on average, {p['staleness_max']:.0f} at most")
    if found.lost:
        lost = f"{p['workers_lost']} workers lost, {p['rewinds']} times back to a checkpoint"
        times = f"{p['wasted_s']:.0f} s made again, {p['saving_s']:.0f} s saving"
        say(f"goodput         {100 * p['goodput']:.1f} %: {lost}, {times}")
    say(f"{p['events']:,} events in {p['took_s']:.1f} s of this machine; rests on {said}", style="dim")
