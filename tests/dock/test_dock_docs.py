"""Every snippet of docs/dock.md runs, one after the other, as a reader would try them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

PAGE = Path(__file__).parents[2] / "docs" / "dock.md"
HERE = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.1", "wait=60": "wait=0.3", "64 << 30": "1 << 28"}


def snippets() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for ours, theirs in HERE.items():
        found = [snippet.replace(ours, theirs) for snippet in found]
    return found


def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    alone, across, placed, done, counting = snippets()
    exec(alone, names)
    assert names["dock"].progress("rollout").is_done
    exec(across, names)
    assert names["dock"].progress("rollout").is_done and names["dock"].progress("reward").ready == 2
    names["dock"].close()
    names["server"].close()
    with caplog.at_level(logging.WARNING):
        exec(placed, names)
    assert names["lease"].batch.values("id").tolist() == [2, 3] and "which continues" in caplog.text
    from tidemill.dock import LocalDock

    names["dock"] = LocalDock(names["stages"], group_size=2)
    put = "dock.put(Batch({'id': np.arange(2), 'group': np.zeros(2, int), 'prompt': Column.text(['a', 'b'])}))\n"
    exec(put + "lease = dock.take('rollout', Want(rows=2))", names)
    answers = "answers = [np.array([52, 0]), np.array([53, 53, 0])]\n"
    exec(answers + counting, names)
    exec(done, names)
    assert names["progress"].is_done
