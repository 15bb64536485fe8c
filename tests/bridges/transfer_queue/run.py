"""Runs the cases with one implementation and prints what each answered, as one JSON object, last on standard output.

python -m tests.bridges.transfer_queue.run theirs|ours [--ray] [session ...]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.bridges.transfer_queue.cases import CASES, Room, outcome

MODULES = {"theirs": "transfer_queue", "ours": "tidemill.bridges.transfer_queue"}
os.environ.setdefault("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "1")  # waits of a second, not of five
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")


def sessions(tq: Any) -> dict[str, dict[str, Any] | None]:
    """The settings of each session; None: the cases start the system themselves, or need none."""
    flows = importlib.import_module("tests.bridges.transfer_queue.cases_flows")
    return {
        "none": None,
        "not started": None,
        "kv": {},
        "refusals": {},
        "client": {},
        "small": {"backend": {"SimpleStorage": {"total_storage_size": 8}}},
        "polling": {"controller": {"polling_mode": True}},
        "prealloc": {},
        "groups": {"controller": {"sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=2), "polling_mode": False}},
        "ranks": {"controller": {"sampler": "RankAwareSampler", "polling_mode": True}},
        "balanced": {"controller": {"sampler": tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)}},
        "own sampler": {"controller": {"sampler": flows.last_first_sampler(tq)}},
        "stream": {"controller": {"sampler": "RankAwareSampler", "polling_mode": True}},
        "checkpoint": {},
        "checkpoint ranks": {"controller": {"sampler": tq.RankAwareSampler, "polling_mode": True}},
    }


def run(side: str, chosen: list[str], with_ray: bool) -> dict[str, Any]:
    for name in ("meta", "samplers", "kv", "client", "flows"):
        importlib.import_module(f"tests.bridges.transfer_queue.cases_{name}")
    if with_ray:
        import ray

        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq = importlib.import_module(MODULES[side])
    flows = importlib.import_module("tests.bridges.transfer_queue.cases_flows")
    found: dict[str, Any] = {}
    chosen = chosen or [session for session in sessions(tq) if session != "prealloc"]
    for session, settings in sessions(tq).items():
        if session not in chosen:
            continue
        config = None if settings is None else tq.init(flows.settings(settings))
        with tempfile.TemporaryDirectory() as folder:
            for name, case in CASES[session].items():
                began = time.monotonic()
                room = Room(name, Path(folder), config)
                found[f"{session}: {name}"] = outcome(partial(case, tq, room))
                print(f"{time.monotonic() - began:6.2f} s  {session}: {name}", file=sys.stderr, flush=True)
        if settings is not None:
            tq.close()
    return found


if __name__ == "__main__":
    words = [word for word in sys.argv[2:] if not word.startswith("--")]
    sys.stdout.flush()
    kept, _ = os.dup(1), os.dup2(2, 1)  # whatever a library prints goes to standard error
    result = run(sys.argv[1], words, with_ray="--ray" in sys.argv)
    sys.stdout.flush()
    os.write(kept, (json.dumps(result) + "\n").encode())
    os._exit(0)  # Ray's own farewell takes long
