"""Two thousand steps on one accelerator: host memory, device memory, descriptors, threads and shared memory stay flat.

    PYTHONPATH=SITE:src python benchmarks/gpu_soak.py                                       # 150 s at most
    PYTHONPATH=SITE:src python benchmarks/gpu_soak.py --device cpu --steps 60 --prompts 2   # to see that it runs

A run of a small model as any other, with evaluations and checkpoints, in this process. It ends at --limit with the
steps made by then, may be stopped and continued (SIGSTOP, SIGCONT) at any time, and prints a table and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--limit", type=float, default=130.0, help="seconds of training; starting comes on top")
    given = parser.parse_args()

    from benchmarks import soak

    options = {**soak.OPTIONS, "executor": "local", "limit_s": given.limit, "every": 5}
    options |= {name: getattr(given, name) for name in ("device", "steps", "prompts", "samples")}
    result = soak.run(options)
    for key, row in result["table"].items():
        means = " ".join(f"{row[name]:12.2f}" for name in ("first_tenth", "second_tenth", "last_tenth"))
        print(f"{key:32s} {means} {100 * row['growth']:+8.2f} %")
    print(json.dumps({"bench": "gpu_soak", **result, "options": options}))
    return 0 if result["is_flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
