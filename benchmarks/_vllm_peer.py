"""vLLM alone in a process, as `benchmarks/rollout.py` measures it.

Nothing of Tidemill is imported: what importing it sets for this process (how OpenMP's threads wait) must not slow a
peer. Settings are those under which vLLM 0.24 was measured fastest on an H200 before (16 ms a step for 512 sequences of
a 1.5 B shape): its defaults, prefix caching, room for 512 sequences, no statistics, no text.
Takes a job (JSON) and writes what it measured after each case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(job: dict[str, Any], result: Path) -> None:
    is_cpu = job["device"] == "cpu"
    folder = job["folder"] if job["is_dummy"] else with_weights(job)
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(
        folder, load_format="dummy" if job["is_dummy"] else "auto", dtype=job["dtype"], seed=0,
        max_model_len=job["window"], max_num_seqs=job["sequences"], enable_prefix_caching=job["prefix_caching"],
        disable_log_stats=True, quantization=job["quantization"],
        **({} if is_cpu else {"gpu_memory_utilization": 0.6}),
    )  # fmt: skip
    start_s = time.perf_counter() - started
    clock = time.process_time if is_cpu else time.perf_counter
    rows: dict[str, Any] = {}
    for name, case in job["cases"].items():
        roll(llm, case, job["vocab"], attempt=0, most=3)
        seconds = []
        for attempt in range(1, job["repeats"] + 1):
            before = clock()
            roll(llm, case, job["vocab"], attempt)
            seconds.append(clock() - before)
        rows[name] = {"seconds": seconds, "start_s": start_s, "peak_gib": peak_gib(is_cpu), "about": about()}
        result.write_text(json.dumps(rows))


def roll(llm: Any, case: dict[str, Any], vocab: int, attempt: int, most: int = 1 << 30) -> None:
    """One request with n samples where lengths are alike, else one request per sample. Each attempt has prompts of its
    own, so that none is found in the prefix cache."""
    from vllm import SamplingParams

    def how(length: int, n: int) -> Any:
        return SamplingParams(
            n=n, temperature=1.0, max_tokens=min(length, most), ignore_eos=True, logprobs=0, detokenize=False
        )

    prompts, sampling = [], []
    for prompt, lengths in zip(case["prompts"], case["lengths"]):
        moved = [(token - 3 + attempt) % (vocab - 3) + 3 for token in prompt]
        if len(set(lengths)) == 1:
            prompts.append({"prompt_token_ids": moved})
            sampling.append(how(lengths[0], len(lengths)))
        else:
            prompts += [{"prompt_token_ids": moved} for _ in lengths]
            sampling += [how(length, 1) for length in lengths]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    made = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    wanted = sum(min(length, most) for lengths in case["lengths"] for length in lengths)
    assert made == wanted, f"{made} tokens made, {wanted} asked for"


def with_weights(job: dict[str, Any]) -> str:
    """Random weights as a checkpoint beside the config, as anyone would give vLLM a model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder: str = job["folder"]
    torch.manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    with torch.device(job["device"]):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.save_pretrained(folder)
    del model
    if job["device"] != "cpu":
        torch.accelerator.empty_cache()
    return folder


def peak_gib(is_cpu: bool) -> float:
    if is_cpu:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    import torch

    free, everything = torch.accelerator.get_memory_info()  # the engine may be in another process
    return (everything - free) / 2**30


def about() -> dict[str, str]:
    """What could explain a figure afterwards."""
    import torch
    import transformers
    import vllm

    names = [name for name in os.environ if name.startswith(("VLLM_", "OMP_", "GOMP_"))]
    return {
        "vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "threads": str(torch.get_num_threads()), **{name: os.environ[name] for name in sorted(names)},
    }  # fmt: skip


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
