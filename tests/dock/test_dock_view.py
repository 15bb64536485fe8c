"""What people and Prometheus see of a dock."""

import numpy as np

from tidemill.batch import Batch
from tidemill.dock import LocalDock, Want
from tidemill.dock.api import DockState, StageCounts
from tidemill.dock.view import in_units, prometheus, render
from tidemill.graph import Stage


def some_state() -> DockState:
    dock = LocalDock((Stage("learn", "actor", ("x",)), Stage("log", "driver", ("x",))))
    dock.put(Batch({"id": np.arange(5), "group": np.arange(5), "x": np.zeros((5, 1000))}))
    dock.take("learn", Want(rows=2))
    return dock.state()


def test_the_table_has_a_line_per_stage_with_its_counts():
    lines = render(some_state()).splitlines()
    assert lines[0].startswith("rows 5   bytes 40.0 kB")
    learn = next(line for line in lines if line.startswith("learn"))
    assert learn.split()[:4] == ["learn", "3", "2", "0"]
    assert any(line.startswith("log") for line in lines)


def test_waiting_producers_and_warehouses_are_shown():
    state = DockState(puts_waiting=2, put_wait_s=3.5, warehouses={"node0": {"used_bytes": 2_000_000, "sent_bytes": 5}})
    text = render(state)
    assert "producers waiting 2, 3.5 s" in text and "2.0 MB" in text


def test_prometheus_text_has_help_type_and_one_value_per_label():
    text = prometheus(some_state())
    assert 'tidemill_dock_stage_ready{stage="learn"} 3' in text
    assert 'tidemill_dock_stage_leased{stage="learn"} 2' in text
    assert text.count("# TYPE tidemill_dock_stage_ready gauge") == 1
    for line in text.splitlines():
        assert line.startswith("#") or (len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0)


def test_large_counts_lose_no_digit():
    """A counter that is rounded stands still and then jumps."""
    text = prometheus(DockState(ended=12_345_678, bytes=302_000_001, reissued=3, tags={"step 4": 7_654_321}))
    for line in (
        "ended_total 12345678",
        "bytes 302000001",
        "leases_reissued_total 3",
        'tag_rows{tag="step 4"} 7654321',
    ):
        assert f"tidemill_dock_{line}\n" in text


def test_labels_are_escaped():
    state = DockState(stages={'a"b': StageCounts(ready=1)})
    assert 'stage="a\\"b"' in prometheus(state)


def test_sizes_are_readable():
    sizes = [in_units(n) for n in (0, 999, 1000, 302_000_000, 5e15)]
    assert sizes == ["0 B", "999 B", "1.0 kB", "302.0 MB", "5000.0 TB"]


def test_the_in_process_dock_needs_neither_zeromq_nor_torch():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['msgspec'] = None\n"
        "from tidemill.dock import LocalDock\n"
        "from tidemill.errors import MissingExtra\n"
        "assert 'torch' not in sys.modules\n"
        "import tidemill.dock\n"
        "try: tidemill.dock.connect\n"
        "except (MissingExtra, ImportError) as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("MissingExtra", "ModuleNotFoundError")
