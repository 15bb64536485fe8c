"""Count the bytes that cross between warehouses, and compare with the formula of docs/scaling.md.

python benchmarks/dock_scaling.py --json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import numpy as np

from tidemill.batch import Batch
from tidemill.dock import Want
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.graph import Stage

STAGES = (Stage("first", "worker", ("x",)), Stage("second", "worker", ("x",)))
ROWS, WIDTH = 8, 8192  # a group of eight samples of 32 kB: one chunk of 262 kB
SETTLE_S = 5.0


def counted(nodes: int, chunks: int, stages: int, seed: int = 0) -> dict[str, Any]:
    """Every node writes `chunks` groups; `stages` readers take each group on a node drawn at random."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(nodes)]
    setup = DockSetup(STAGES[:stages], memory_bytes=256 << 20, segment_bytes=4 << 20)
    with DockServer(setup, nodes=names) as server:
        docks = [server.connect(name) for name in names]
        writer_of: dict[int, int] = {}
        for i in range(nodes * chunks):
            ids = np.arange(i * ROWS, (i + 1) * ROWS)
            docks[i % nodes].put(Batch({"id": ids, "group": ids // ROWS, "x": np.zeros((ROWS, WIDTH), np.float32)}))
            writer_of[i] = i % nodes
        seen: set[tuple[int, int]] = set()  # (chunk, node) pairs that had to cross
        for stage in STAGES[:stages]:
            for _ in range(nodes * chunks):
                reader = rng.randrange(nodes)
                lease = docks[reader].take(stage.name, Want(rows=ROWS), wait=60)
                chunk = int(lease.batch.values("id")[0]) // ROWS
                if writer_of[chunk] != reader:
                    seen.add((chunk, reader))
                lease.commit()
                del lease
        size = ROWS * WIDTH * 4
        exact = len(seen) * size
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and _pulled(docks[0]) < exact:
            time.sleep(0.05)
        pulled = _pulled(docks[0])
        for dock in docks:
            dock.close()
    step = nodes * chunks * size
    share = (nodes - 1) / nodes
    # A node pulls a chunk once: two stages that meet on one node share the copy.
    ours = step * (nodes - 1) * (1 - (1 - 1 / nodes) ** stages)
    return {
        "nodes": nodes,
        "stages": stages,
        "step_bytes": step,
        "counted": pulled,
        "who_read_what": exact,
        "formula": round(ours),
        "counted_over_formula": round(pulled / ours, 3),
        "central_formula": round(step * share * (1 + stages)),
        "hashed_formula": round(step * share * (1 + stages)),
    }


def _pulled(dock: Any) -> int:
    return sum(figures.get("pulled_bytes", 0) for figures in dock.figures()["warehouses"].values())


def run(options: dict[str, Any] | None = None) -> dict[str, Any]:
    options = options or {}
    nodes = options.get("nodes") or [2, 4, 8]
    chunks = options.get("chunks") or 24
    return {"runs": [counted(n, chunks, stages) for n in nodes for stages in (1, 2)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--nodes", type=int, nargs="*")
    parser.add_argument("--chunks", type=int)
    arguments = parser.parse_args()
    result = run(vars(arguments))
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
