"""What else the native engine does on an accelerator: a cache of one byte, sleep and wake, and how near rollout is to
the learner and why not nearer.

    PYTHONPATH=src python benchmarks/gpu_rollout_more.py                      # about two minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_rollout_more.py --device cpu         # a tiny shape, to see that it runs

Sections are guarded: one that fails is printed and the rest go on. One JSON object comes last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._gpu_rollout import FIGURES, Setup, roll, run, say


def speeds(setup: Setup) -> None:
    for dtype in ("auto", "fp8", "int8"):
        for kind, work in setup.works.items():
            engine = setup.engine(work, cache_dtype=dtype)
            roll(engine, work, most=3)
            rates = []
            for _ in range(2):
                started = setup.wait()
                done, steps = roll(engine, work)
                rates.append(sum(len(c.tokens) for c in done) / (setup.wait() - started))
            gib = engine.store.nbytes / 2**30
            say(f"{kind}, cache {dtype}", f"{max(rates):,.0f} tokens/s (both {rates[0]:,.0f} {rates[1]:,.0f}), "
                f"{steps} steps, cache {gib:.2f} GiB")  # fmt: skip
            FIGURES[f"{kind}-{dtype}"] = {"tokens_per_s": max(rates), "cache_gib": gib}
            engine.sleep()


def speculation(setup: Setup) -> None:
    """Greedy text, which repeats itself, in few rows and in more: tokens a second without drafts, with, and by choice.
    Sampled text does not repeat with random weights: there choosing must cost nothing."""
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.speculate import ON_ACCELERATOR, Speculator

    work = setup.works["fixed"]
    each = 2 if setup.is_small else 8
    most = 24 if setup.is_small else 400
    for rows in (8, 64):
        for temperature in (0.0, 1.0) if rows == 64 else (0.0,):
            how = Sampling(temperature=temperature, max_tokens=most, ignore_eos=True)
            rates, texts = {}, {}
            for when in ("off", "on", "auto"):
                if when == "on" and temperature:
                    continue
                engine = setup.engine(work, max_seqs=min(rows, len(work.prompts) * each), speculate=when)
                if when == "auto" and engine.decoder is not None:  # a recipe's `auto` leaves it off there so far
                    engine.speculator = Speculator("auto", engine.scheduler, ON_ACCELERATOR)
                for measured in (False, True):
                    for i in range(min(rows // each, len(work.prompts))):
                        engine.submit(Request(i, work.prompts[i], how, n=each))
                    started, done = setup.wait(), []
                    while engine.has_work:
                        done += engine.step()
                    if measured:
                        rates[when] = sum(len(c.tokens) for c in done) / (setup.wait() - started)
                texts[when] = {(c.request.id, c.index): c.tokens for c in done}
                if engine.speculator is not None and when != "off":
                    drafted, kept = engine.speculator.drafted, engine.speculator.kept
                    same = np.mean([_agree(t, texts["off"][k]) / len(t) for k, t in texts[when].items()])
                    say(f"{rows} rows, temperature {temperature}, speculate {when}",
                        f"{rates[when]:,.0f} tokens/s, {rates[when] / rates['off']:.2f} x off; {kept} of {drafted} "
                        f"drafts right; {same:.0%} of each text as without")  # fmt: skip
                    FIGURES[f"speculate-{rows}-{temperature}-{when}"] = rates[when] / rates["off"]
                engine.sleep()


def learner_logprobs(setup: Setup, done: list[Any], budget: int, share: bool = True) -> np.ndarray:
    from tidemill.batch import Batch, Column
    from tidemill.learn.engine import score
    from tidemill.recipe.config import Config

    batch = Batch(
        {
            "id": np.arange(len(done)),
            "group": np.array([c.request.id for c in done]),
            "tokens": Column.jagged([[*c.request.prompt, *c.tokens] for c in done], np.int32),
            "prompt_length": np.array([len(c.request.prompt) for c in done], np.int32),
        }
    )
    settings = {"algorithm": "grpo", "learn": {"share_prompts": share}, "train": {"tokens_per_microbatch": budget}}
    return score(setup.shape.model, batch, Config.model_validate(settings)).values


def flat(done: list[Any]) -> np.ndarray:
    return np.concatenate([np.array(c.logprobs, np.float32) for c in done])


def gap_words(met: Any) -> str:
    return (
        f"mean {met.mean:.2e}, max {met.max:.2e}, ratio mean {met.ratio_mean:.6f}, more than a tenth off "
        f"{met.ratio_far:.4f} of {met.tokens}"
    )


def nearness(setup: Setup) -> None:
    """Rollout against the learner, and what each does to itself when only its batch changes: the floor of the first."""
    from tidemill.rollout.mismatch import measure

    work = setup.works["fixed"]
    for dtype in ("auto", "fp8", "int8"):
        engine = setup.engine(work, cache_dtype=dtype)
        done, _ = roll(engine, work, prompts=16, most=128)
        say(f"rollout and learner, cache {dtype}", gap_words(measure(flat(done), learner_logprobs(setup, done, 16384))))
        engine.sleep()
        if dtype == "auto":
            first = done
    whole = learner_logprobs(setup, first, 16384)
    say("learner, other micro-batches", gap_words(measure(whole, learner_logprobs(setup, first, 3000))))
    say("learner, prompts not shared", gap_words(measure(whole, learner_logprobs(setup, first, 16384, share=False))))
    few = setup.engine(work, max_seqs=8)
    again, _ = roll(few, work, prompts=16, most=128)
    pairs = [(a, b) for a, b in zip(first, again)]
    same = [min(_agree(a.tokens, b.tokens), 128) for a, b in pairs]
    say("tokens equal before the first difference, other batch", f"{np.mean(same):.1f} of 128")
    heads = [(a.logprobs[:n], b.logprobs[:n]) for (a, b), n in zip(pairs, same)]
    ours, theirs = (np.concatenate([np.array(h[i], np.float32) for h in heads]) for i in (0, 1))
    say("rollout, other batch size", gap_words(measure(ours, theirs)))


def _agree(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def sleep_and_wake(setup: Setup) -> None:
    work = setup.works["fixed"]
    before = setup.memory()
    started = setup.wait()
    engine = setup.engine(work)
    ready = setup.wait() - started
    roll(engine, work, most=3)
    awake = setup.memory()
    started = setup.wait()
    engine.sleep()
    if not setup.is_small:
        torch.accelerator.empty_cache()
    slept = setup.wait() - started
    asleep = setup.memory()
    started = setup.wait()
    engine.wake()
    roll(engine, work, most=3)
    woken = setup.wait() - started
    say("engine ready", f"{ready:.2f} s")
    say("sleep", f"{(before - awake) / 2**30:.2f} GiB taken by cache and graphs, {(asleep - awake) / 2**30:.2f} given "
        f"back in {slept:.3f} s; {woken:.2f} s from waking to {work.lengths.size} first tokens")  # fmt: skip


if __name__ == "__main__":
    run(__doc__, {"sleep": sleep_and_wake, "speeds": speeds, "nearness": nearness, "speculation": speculation})
