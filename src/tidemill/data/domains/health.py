"""Health: a triage note to a level and structured codes (ICD-10), with one rule that must never be broken.

The rule: a note with a red flag (a symptom or a measured value of RED below) gets the level red. To call
a harmless case red costs a little; to call a red flag anything else is a broken rule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidemill.data.generators import Problem
from tidemill.errors import DataError


@dataclass(frozen=True, slots=True)
class Symptom:
    code: str
    level: str
    said: tuple[str, ...]


RED, AMBER, GREEN = "red", "amber", "green"
LEVELS = (GREEN, AMBER, RED)
SYMPTOMS = (
    Symptom("R07.4", RED, ("chest pain", "crushing pain in the chest", "tight chest pain into the left arm")),
    Symptom("R06.0", RED, ("short of breath at rest", "cannot get enough air", "gasping for breath")),
    Symptom("R47.8", RED, ("slurred speech", "speech suddenly unclear", "cannot find words since noon")),
    Symptom("R55", RED, ("fainted twice", "collapsed and was unconscious", "passed out at work")),
    Symptom("R56.8", RED, ("had a fit", "convulsions this morning", "seizure at home")),
    Symptom("R04.2", RED, ("coughing up blood", "blood in the sputum")),
    Symptom("K92.0", RED, ("vomiting blood", "vomit like coffee grounds")),
    Symptom("R10.4", AMBER, ("belly pain", "abdominal cramps", "pain in the lower abdomen")),
    Symptom("R50.9", AMBER, ("fever for three days", "high temperature since yesterday", "feverish")),
    Symptom("R00.2", AMBER, ("palpitations", "heart racing on and off")),
    Symptom("R51", AMBER, ("bad headache", "headache behind the eyes", "throbbing headache")),
    Symptom("R42", AMBER, ("dizzy when standing up", "giddiness")),
    Symptom("R07.0", GREEN, ("sore throat", "throat hurts on swallowing")),
    Symptom("R05", GREEN, ("dry cough", "cough for a week", "coughs at night")),
    Symptom("H92.0", GREEN, ("earache", "pain in the right ear")),
    Symptom("M54.5", GREEN, ("low back pain", "back hurts after lifting")),
    Symptom("R21", GREEN, ("itchy rash on the arms", "red spots on the skin")),
    Symptom("J00", GREEN, ("runny nose", "a cold")),
    Symptom("S93.4", GREEN, ("twisted ankle", "ankle sprain")),
    Symptom("G47.0", GREEN, ("sleeps badly", "trouble falling asleep")),
)
LEAST_OXYGEN, LEAST_PRESSURE = 90, 90  # below: a red flag
DENIED = ("no {}", "denies {}")
PAST = ("{} years ago, gone since", "had {} last year, not now")
RULE = "Give the level (red, amber or green) and the codes. Any red flag is red."


def health(
    rng: random.Random, symptoms: int = 2, denied: float = 0.4, red_share: float = 0.4, measured: float = 0.3
) -> Problem:
    """A note of up to `symptoms` symptoms; with the chance `denied` one more that the patient does not have. A share
    `red_share` of the notes has a red flag, and of these a share `measured` has it in a measured value alone."""
    shares = (denied, red_share, measured)
    if not 1 <= symptoms <= 4 or not all(0 <= share <= 1 for share in shares):
        raise DataError(
            f"data.args of health: symptoms must be 1 to 4, denied, red_share and measured between 0 and 1, "
            f"got {symptoms}, {', '.join(map(str, shares))}"
        )
    is_red = rng.random() < red_share
    has_red_value = is_red and rng.random() < measured
    present = choose(rng, rng.randint(1, symptoms), is_red and not has_red_value)
    absent = [s for s in SYMPTOMS if s.code not in {p.code for p in present}]
    oxygen, pressure = values(rng, has_red_value)
    level = RED if has_red_value else max((s.level for s in present), key=LEVELS.index)
    said = [rng.choice(s.said) for s in present]
    if rng.random() < denied:
        said.append(not_present(rng, rng.choice(absent)))
    age = rng.randint(5, 92)
    person = rng.choice(("boy", "girl") if age < 18 else ("man", "woman"))
    parts = [f"{person}, {age}: {', '.join(said)}"]
    parts.append(f"SpO2 {oxygen}, BP {pressure}/{max(40, round(pressure * rng.uniform(0.55, 0.7)))}")
    codes = [s.code for s in present]
    meta = {"level": level, "codes": codes, "is_red_flag": level == RED}
    answer = " ".join([level, *codes])
    return Problem(f"{RULE}\n{'. '.join(parts)}.\nTriage:", answer, f" {answer}", meta)


def choose(rng: random.Random, count: int, with_red: bool) -> list[Symptom]:
    """Choose different symptoms, at least one of them red or none."""
    harmless = [s for s in SYMPTOMS if s.level != RED]
    if not with_red:
        return rng.sample(harmless, count)
    first = rng.choice([s for s in SYMPTOMS if s.level == RED])
    found = [first, *rng.sample([s for s in SYMPTOMS if s is not first], count - 1)]
    rng.shuffle(found)
    return found


def values(rng: random.Random, is_red: bool) -> tuple[int, int]:
    """Oxygen saturation and systolic pressure, one of them a red flag or none."""
    oxygen, pressure = rng.randint(LEAST_OXYGEN, 99), rng.randint(LEAST_PRESSURE + 10, 165)
    if not is_red:
        return oxygen, pressure
    if rng.random() < 0.5:
        return rng.randint(70, LEAST_OXYGEN - 1), pressure
    return oxygen, rng.randint(60, LEAST_PRESSURE - 1)


def not_present(rng: random.Random, symptom: Symptom) -> str:
    form = rng.choice(DENIED if symptom.level == RED else DENIED + PAST)
    return form.format(symptom.said[0])
