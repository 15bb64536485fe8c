"""Industry: an alarm log to the machine at fault, the fault, and the action that the plant's table says.

Alarms of one fault come in its order, and some faults share their alarms: what came first tells them apart. Other
machines' alarms and harmless ones lie between. Alarms that fit no fault of the table are `unknown`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidemill.data.generators import Problem
from tidemill.errors import DataError


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    action: str
    alarms: tuple[str, ...]  # in the order in which they come


FAULTS = (
    Fault("cavitation", "clean strainer", ("suction pressure low", "vibration high", "flow low")),
    Fault("dry running", "fill tank", ("tank level low", "suction pressure low", "flow low")),
    Fault("blocked outlet", "open outlet valve", ("outlet pressure high", "flow low", "motor current low")),
    Fault("stuck valve", "free valve", ("valve travel timeout", "outlet pressure high", "flow low")),
    Fault("worn bearing", "replace bearing", ("bearing hot", "vibration high", "motor current high")),
    Fault("overload", "reduce load", ("motor current high", "winding hot", "drive trip")),
    Fault("cooling failure", "restore cooling", ("cooling flow low", "winding hot", "drive trip")),
    Fault("power dip", "restart drive", ("bus voltage low", "drive trip", "flow low")),
    Fault("seal leak", "replace seal", ("seal pot low", "leak detected", "outlet pressure low")),
    Fault("lost signal", "check transmitter", ("flow signal bad", "flow low", "control in manual")),
)
UNKNOWN = ("unknown", "call maintenance")
HARMLESS = ("cabinet door open", "battery low", "filter due", "lamp test", "clock not in sync", "operator logged in")
RULE = "From the alarm log name the machine, the fault and the action."


def industry(rng: random.Random, noise: int = 1, unknown: float = 0.1, in_order: bool = True) -> Problem:
    """A log of one fault among up to `noise` alarms of other machines. A share `unknown` fits no fault. Without
    `in_order`, lines are shuffled and only their times say what came first."""
    if noise < 0 or not 0 <= unknown <= 1:
        raise DataError(f"data.args of industry: noise must be 0 or more, unknown a share, got {noise} and {unknown}")
    tag = machine(rng)
    fault = rng.choice(FAULTS)
    is_unknown = rng.random() < unknown
    alarms = mixed_up(rng) if is_unknown else fault.alarms
    name, action = UNKNOWN if is_unknown else (fault.name, fault.action)
    log = [(tag, alarm) for alarm in alarms]
    for _ in range(rng.randint(0, noise)):
        log.insert(rng.randint(0, len(log)), (other(rng, tag), rng.choice(HARMLESS)))
    time, lines = 0, []
    for machine_tag, alarm in log:
        lines.append(f"+{time}s {machine_tag} {alarm}")
        time += rng.randint(1, 9)
    if not in_order:
        rng.shuffle(lines)
    answer = f"{tag} {name}: {action}"
    meta = {"machine": tag, "fault": name, "action": action}
    return Problem("\n".join([RULE, *lines, "Diagnosis:"]), answer, f" {answer}", meta)


def machine(rng: random.Random) -> str:
    return f"{rng.choice('PKMV')}{rng.randint(10, 99)}"


def other(rng: random.Random, tag: str) -> str:
    return next(found for found in iter(lambda: machine(rng), "") if found != tag)


def mixed_up(rng: random.Random) -> tuple[str, ...]:
    """Three alarms of three faults that belong to none together."""
    while True:
        chosen = tuple(rng.choice(fault.alarms) for fault in rng.sample(FAULTS, 3))
        fits = any(len(set(chosen) & set(fault.alarms)) > 1 for fault in FAULTS)
        if len(set(chosen)) == 3 and not fits:
            return chosen
