"""The learner across ranks on a machine with many cores: products against one rank, bytes and memory, checkpoints under
load, learning on four layouts; and one accelerator as a world of one.

    PYTHONPATH=SITE:src python benchmarks/gpu_parallel.py                    # about five minutes on 16 cores
    PYTHONPATH=SITE:src python benchmarks/gpu_parallel.py --only products,bench
    PYTHONPATH=SITE:src python benchmarks/gpu_parallel.py --only learning --seeds 3

Ranks compute on processor cores and speak gloo. Each section is guarded; a table and one JSON object come last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CLOSE = 1e-5
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dense", {"fsdp": 2}),
    ("untied", {"fsdp": 4}),
    ("experts", {"fsdp": 4}),
    ("dense", {"replicate": 2, "fsdp": 2}),
    ("dense", {"tp": 4}),
    ("few_keys", {"tp": 4}),
    ("latent", {"fsdp": 2, "tp": 2}),
    ("experts", {"fsdp": 2, "tp": 2}),
    ("untied", {"replicate": 2, "fsdp": 2, "tp": 2}),
    ("dense", {"cp": 2, "cp_form": "ring", "fsdp": 2}),
    ("few_keys", {"cp": 2, "tp": 2}),
    ("experts", {"fsdp": 2, "ep": 2}),
    ("dense", {"pp": 2, "fsdp": 2}),
    ("deep", {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2, "tp": 2}),
)


def products() -> dict[str, Any]:
    from tests.learn.parallel.products import Case, product

    from tidemill.cluster.start.ranks import Ranks

    worst, failed, began = 0.0, [], time.perf_counter()
    ranks = Ranks(8, timeout_s=60.0, preload=["tests.learn.parallel.products"])
    for model, parallel in CASES:
        case = Case(model, parallel)
        try:
            if not ranks.is_alive:
                ranks = Ranks(8, timeout_s=60.0, preload=["tests.learn.parallel.products"])
            found = ranks.call(product, case, on=case.ranks)[0]
            far = max(v for v in found.values() if isinstance(v, float))
            worst = max(worst, far)
            print(f"  {case}: {far:.1e}", flush=True)
            if far > CLOSE:
                failed.append(str(case))
        except Exception as error:
            failed.append(str(case))
            print(f"  {case}: {str(error)[-1500:]}", flush=True)
    ranks.close()
    seconds = time.perf_counter() - began
    return {"products": len(CASES), "products_failed": failed, "worst": worst, "products_seconds": seconds}


def bench() -> dict[str, Any]:
    from benchmarks import parallel
    from tidemill import bench as benches

    found = benches.run("parallel", {"repeats": 5, "rounds": 12})
    kept = {k: v for k, v in found.items() if "/" in k or k.endswith("_worst")}
    for name in parallel.LAYOUTS:
        sent = kept.get(f"{name}/sent_over_minimum", 1.0)
        held, seconds = kept[f"{name}/memory_over_estimate"], kept[f"{name}/seconds"]
        print(f"  {name}: sent / least {sent:.4f}, memory / estimate {held:.3f}, {seconds:.3f} s", flush=True)
    return kept


def learning(steps: int, seeds: int, first: int, layouts: str) -> dict[str, Any]:
    from benchmarks import parallel

    return parallel.learning(
        steps, seeds, first=first, layouts=layouts.split(",") if layouts else tuple(parallel.STUDY)
    )


def accelerator() -> dict[str, Any]:
    """A world of one on the device: the same numbers as the learner that knows no ranks."""
    import copy

    import torch
    import torch.distributed as dist
    from tests.learn.parallel.products import make_model, recipe, samples

    from tidemill import device
    from tidemill.algorithms.shared.registry import get
    from tidemill.device.collective import backend
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    chosen = device.pick("auto")
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    dist.init_process_group(backend(chosen.kind), store=store, rank=0, world_size=1)
    off = {"learn": {"compile": "off"}}
    model = make_model("dense").to(chosen.torch_device)
    alone = Learner(copy.deepcopy(model), recipe({}, off), get("grpo"), 2)
    config = recipe({}, off)
    cut = Learner(model, config, get("grpo"), 2, mesh.build(config.learn.parallel, chosen.kind))
    worst = 0.0
    for i in range(2):
        for learner in (alone, cut):
            learner.accumulate(samples(i))
        a, b = alone.update(), cut.update()
        worst = max(worst, *(abs(a[k] - b[k]) for k in ("loss", "grad_norm", "entropy")))
    cut.close()
    dist.destroy_process_group()
    return {"accelerator": chosen.name, "accelerator_difference": worst, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="accelerator,products,bench,learning")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--layouts", default="", help="some of the learning study's, to run several beside each other")
    chosen = parser.parse_args()
    sections = {
        "accelerator": accelerator,
        "products": products,
        "bench": bench,
        "learning": lambda: learning(chosen.steps, chosen.seeds, chosen.first_seed, chosen.layouts),
    }
    figures: dict[str, Any] = {}
    for name in chosen.only.split(","):
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        try:
            figures |= sections[name]()
        except Exception:
            figures[f"{name}_failed"] = True
            traceback.print_exc()
        print(f"   {time.perf_counter() - began:.0f} s", flush=True)
    for key, value in figures.items():
        print(f"{key:40} {value}")
    print(json.dumps(figures, default=str))


if __name__ == "__main__":
    main()
