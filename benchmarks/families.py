"""Which of transformers' causal language models work: each is made tiny, opened as a run does, rolled out and learned.

tidemill bench families --json
tidemill bench families --only qwen3_5_text,llama
tidemill bench families --write       # and write the table in docs/models.md anew

A family *works* if, in float32, the native engine's greedy tokens and log-probabilities are those of transformers' own
cache (groups, pauses, several turns), and the learner's log-probabilities and gradients of packed samples are those of
each sample alone. It is *refused* if opening it says why it cannot be trained, and *wrong* if it opens and differs.
"""

from __future__ import annotations

import re
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import _families_tiny as tiny

ABOUT = "which of transformers' causal language models work, by parity of rollout and learner with transformers' own"
OPTIONS: dict[str, Any] = {"only": [], "write": False}
DOCS = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: made by `tidemill bench families --write` -->", "<!-- families: end -->"


def run(options: dict[str, Any]) -> dict[str, Any]:
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    wanted = options["only"] or tiny.families()
    found = {}
    for family in wanted:
        started = time.perf_counter()
        found[family] = outcome(family)
        said = " ".join(str(part) for part in found[family].values())
        print(f"{family}: {said} ({time.perf_counter() - started:.1f} s)", flush=True)
    lists = {kind: [f for f, one in found.items() if one["outcome"] == kind] for kind in ("works", "refused", "wrong")}
    if options["write"]:
        DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8"), found), encoding="utf-8")
    counts = {f"families_{kind}": len(names) for kind, names in lists.items()}
    return {**counts, **lists, "families": found}


def outcome(family: str) -> dict[str, str]:
    """`outcome`, and `how` it is computed or why it is not."""
    from benchmarks import _families_parity as parity
    from tidemill.errors import ModelError
    from tidemill.models.attention.registry import is_dense
    from tidemill.models.recurrent import mixers
    from tidemill.models.trial import try_out
    from tidemill.rollout.native.trial import try_rollout

    try:
        ours, theirs = tiny.models(family)
    except tiny.Unmade as error:
        return {"outcome": "refused", "how": f"not tried: {error}"}
    try:
        try_out(ours)
        try_rollout(parity.make_engine(ours))
    except ModelError as error:
        return {"outcome": "refused", "how": str(error).splitlines()[0]}
    except Exception as error:
        return {"outcome": "wrong", "how": _where(error)}
    how = "dense" if is_dense(ours) else "packed, with states" if mixers.has_some(ours) else "packed"
    try:
        parity.check(ours, theirs)
    except Exception as error:
        return {"outcome": "wrong", "how": f"{how}: {_where(error)}"}
    return {"outcome": "works", "how": how}


def _where(error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    line = re.sub(r"\s+", " ", str(error))[:300]
    return f"{type(error).__name__}: {line} ({Path(at.filename).name}:{at.lineno})"


def with_table(text: str, found: dict[str, dict[str, str]]) -> str:
    """The page with rows of these families, others as they are."""
    head, rest = text.split(BEGIN)
    before, tail = rest.split(END)
    rows = rows_of(before) | {family: row(family, one) for family, one in found.items()}
    lines = ["| `model_type` | class | |", "|---|---|---|", *(rows[family] for family in sorted(rows))]
    return "\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"])


def row(family: str, one: dict[str, str]) -> str:
    said = one["how"] if one["outcome"] == "works" else f"{one['outcome']}: {one['how']}"
    return f"| {family} | `{tiny.class_name(family)}` | {said.replace('|', '/')} |"


def rows_of(table: str) -> dict[str, str]:
    """By family."""
    lines = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| `model_type`")]
    return {line.split("|")[1].strip(): line for line in lines}
