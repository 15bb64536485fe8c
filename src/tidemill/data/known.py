"""Published data sets by name: `data.source: gsm8k` is its folder, found in the usual places of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import DataError
from tidemill.models.box import find
from tidemill.models.box.known import cache

ENV_DATA = "TIDEMILL_DATA"  # more folders of data sets, separated like PATH


@dataclass(frozen=True, slots=True)
class Known:
    about: str
    license: str
    url: str
    files: tuple[str, ...]


KNOWN = {
    "gsm8k": Known(
        about="grade-school mathematics: 7,473 training and 1,319 test problems",
        license="MIT",
        url="https://github.com/openai/grade-school-math (grade_school_math/data)",
        files=("train.jsonl", "test.jsonl"),
    ),
}


def places() -> list[Path]:
    """Return the folders that are searched, the user's own first."""
    own = [Path(p).expanduser() for p in os.environ.get(ENV_DATA, "").split(os.pathsep) if p]
    return [*own, Path("data"), Path("shared/data"), Path("../shared/data"), cache() / "data"]


def folder(name: str) -> Path | None:
    """Return where a known data set lies; None for other names, and where it is not at hand."""
    if name not in KNOWN or Path(name).exists():
        return None
    files = KNOWN[name].files
    return next((p / name for p in places() if all((p / name / file).is_file() for file in files)), None)


def is_on_hub(name: str) -> bool:
    """Whether a source can only be a data set of the Hugging Face hub: `org/name`, and no path here begins so."""
    return find.HUB_ID.fullmatch(name) is not None and find.is_fetchable(name) and not Path(name).suffix


def missing(name: str) -> DataError:
    """Say what the data set is, where it was looked for, and where it can be had."""
    known = KNOWN[name]
    looked = ", ".join(str(p / name) for p in places())
    return DataError(
        f"the data set {name} ({known.about}; {known.license} licence) is not on this machine: looked in {looked}",
        f"get {' and '.join(known.files)} from {known.url}, put them into {cache() / 'data' / name}, or say where "
        f"they are: data.source=FOLDER",
    )
