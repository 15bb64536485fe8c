"""Records: a sentence and a JSON schema to the JSON object that the sentence says, checked by reward `record`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.data.generators import Problem
from tidemill.errors import DataError

NAMES = ("Ana", "Bilal", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jale", "Kofi", "Lena", "Milo")
ITEMS = ("mugs", "lamps", "chairs", "notebooks", "cables", "shirts", "plates", "towels", "candles", "pens")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
CITIES = ("Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Porto", "Riga", "Accra", "Turin", "Perth")
ROOMS = ("A1", "B2", "C3", "D4")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record: its fields' schemas, values for them, and sentences with places for the values."""

    fields: dict[str, dict[str, Any]]
    draw: Callable[[random.Random], dict[str, Any]]
    sentences: tuple[str, ...]


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def order(rng: random.Random) -> dict[str, Any]:
    return {
        "customer": rng.choice(NAMES),
        "item": rng.choice(ITEMS),
        "colour": rng.choice(COLOURS),
        "count": rng.randint(2, 10),
        "paid": rng.random() < 0.5,
    }


def trip(rng: random.Random) -> dict[str, Any]:
    start, end = rng.sample(CITIES, 2)
    return {
        "traveller": rng.choice(NAMES),
        "from": start,
        "to": end,
        "day": rng.choice(DAYS),
        "bags": rng.randint(1, 5),
    }


def meeting(rng: random.Random) -> dict[str, Any]:
    return {
        "host": rng.choice(NAMES),
        "room": rng.choice(ROOMS),
        "day": rng.choice(DAYS),
        "hour": rng.randint(8, 17),
        "guests": rng.sample(NAMES, rng.randint(1, 2)),
    }


KINDS = {
    "order": Kind(
        {"customer": TEXT, "item": TEXT, "colour": {"enum": list(COLOURS)}, "count": WHOLE, "paid": FLAG},
        order,
        (
            "{customer} ordered {count_word} {colour} {item} and {paid_word}.",
            "Order of {count} {item} in {colour} for {customer}, who {paid_word}.",
            "{count_word} {colour} {item} go to {customer}; this customer {paid_word}.",
        ),
    ),
    "trip": Kind(
        {"traveller": TEXT, "from": TEXT, "to": TEXT, "day": {"enum": list(DAYS)}, "bags": WHOLE},
        trip,
        (
            "{traveller} flies from {from} to {to} on {day} with {bags_word} bags.",
            "On {day}, {traveller} leaves {from} for {to} and takes {bags} bags.",
            "To {to} on {day}: {traveller}, coming from {from}, {bags_word} bags.",
        ),
    ),
    "meeting": Kind(
        {
            "host": TEXT,
            "room": TEXT,
            "day": {"enum": list(DAYS)},
            "hour": WHOLE,
            "guests": {"type": "array", "items": TEXT},
        },
        meeting,
        (
            "{host} meets {guests_word} in room {room} on {day} at {hour}:00.",
            "Room {room}, {day}, {hour} o'clock: {host} invites {guests_word}.",
            "At {hour}:00 on {day} {host} expects {guests_word} in {room}.",
        ),
    ),
}


def records(rng: random.Random, kinds: list[str] | None = None, fields: int = 3) -> Problem:
    """A sentence about an order, a trip or a meeting, and a schema that asks for `fields` of its fields."""
    chosen = list(KINDS) if kinds is None else kinds
    if not chosen or set(chosen) - set(KINDS) or not 1 <= fields <= 5:
        raise DataError(
            f"data.args of records: kinds must be among {', '.join(KINDS)}, fields 1 to 5, got {kinds!r} and {fields}"
        )
    kind = KINDS[rng.choice(chosen)]
    values = kind.draw(rng)
    asked = rng.sample(list(kind.fields), min(fields, len(kind.fields)))
    schema = {
        "type": "object",
        "properties": {name: kind.fields[name] for name in asked},
        "required": asked,
        "additionalProperties": False,
    }
    sentence = rng.choice(kind.sentences).format(**values, **words(values))
    answer = json.dumps({name: values[name] for name in asked})
    wanted = ", ".join(f"{name} ({described(kind.fields[name])})" for name in asked)
    prompt = f"Text: {sentence[0].upper()}{sentence[1:]}\nFields: {wanted}\nJSON:"
    return Problem(prompt, answer, f" {answer}", {"schema": schema})


def words(values: dict[str, Any]) -> dict[str, str]:
    """Return how a sentence says numbers, flags and lists."""
    said: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, bool):
            said[f"{name}_word"] = "has paid" if value else "has not paid yet"
        elif isinstance(value, int) and value < len(NUMBERS):
            said[f"{name}_word"] = NUMBERS[value]
        elif isinstance(value, list):
            said[f"{name}_word"] = " and ".join(value)
    return said


def described(schema: dict[str, Any]) -> str:
    """Name a field's type as the prompt says it."""
    if "enum" in schema:
        return "text"
    return {"string": "text", "integer": "number", "boolean": "true or false", "array": "list"}[schema["type"]]
