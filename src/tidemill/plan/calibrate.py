"""Take a calibration of this device: matrix products, a copy, then our own engine and learner on small models.

Products give a grid of efficiencies; the engine's steps, the learner's passes and updates give what is left as a few
coefficients (`fit`): kernels that are not products, starting them, the host's part.
"""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from tidemill import device as devices
from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.device import host
from tidemill.models.shape import ModelShape, parse
from tidemill.observe.run_folder import versions
from tidemill.plan import features
from tidemill.plan.calibration import Calibration, Cost, Grid
from tidemill.plan.features import Cut
from tidemill.plan.fit import fit, off
from tidemill.plan.trials import EngineTrial, LearnTrial, TrialModel, Trials, on_accelerator, on_cpu
from tidemill.recipe.config import Config

ALONE = Cut()
ENOUGH_S = 0.03  # of repeats of one product
Point = tuple[Cost, float]
# Where points of a small model cannot tell: what larger ones on the same kind of device came to.
PRIOR = {
    "cpu": {"decode.attention": 2.0, "decode.head": 1.5, "decode.matmul": 1.2, "prefill.matmul": 1.2,
            "learn.matmul": 1.0, "learn.elements": 5.0, "learn.logprob": 1.0, "update.bytes": 1.5},
    "cuda": {"decode.attention": 1.3, "decode.head": 1.2, "decode.matmul": 1.0, "decode.draw": 1.2,
             "decode.experts": 1.1, "decode.layer": 2e-5, "decode.once": 1e-3, "prefill.matmul": 1.0,
             "prefill.attention": 2.0, "prefill.head": 1.0, "learn.matmul": 1.0, "learn.elements": 1.0,
             "learn.attention": 1.6, "learn.logprob": 1.3, "learn.experts": 1.3, "learn.shared": 2.0,
             "learn.lora": 3.0, "learn.fp8": 3.0, "update.bytes": 1.1},
}  # fmt: skip


def calibrate(
    say: Callable[[str], None] = lambda text: None,
    trials: Trials | None = None,
    limit_s: float = 170.0,
    keep: list[Any] | None = None,
) -> Calibration:
    """Measure the device that a run would take, within `limit_s`: what is not reached keeps its usual value. `keep`:
    takes what was measured, one record a point."""
    began = time.perf_counter()
    chosen = devices.pick("auto")
    trials = trials or (on_cpu() if chosen.kind == "cpu" else on_accelerator())
    meter = _Meter(chosen, trials, say, began + limit_s)
    base = meter.rates()
    points = meter.points(base)
    prior = PRIOR["cpu" if chosen.kind == "cpu" else "cuda"]
    coefficients: dict[str, float] = {}
    errors: dict[str, float] = {}
    for phase, own in points.items():
        usual = {name: value for name, value in prior.items() if name.startswith(phase)}
        found = fit(own, usual)
        coefficients |= usual | found
        errors[phase] = round(off(own, found), 4)
        if keep is not None:
            keep += [{"phase": phase, "seconds": seconds, "cost": cost} for cost, seconds in own]
    say(f"took {time.perf_counter() - began:.0f} s")
    return Calibration(
        **{name: getattr(base, name) for name in ("device", "made", "versions", "flops", "flops8", "bytes_per_s")},
        matmul=base.matmul,
        coefficients={name: float(f"{value:.6g}") for name, value in sorted(coefficients.items())},
        source="tidemill calibrate: " + ", ".join(f"{len(own)} points of {phase}" for phase, own in points.items()),
        errors=errors,
        threads=torch.get_num_threads() if chosen.kind == "cpu" else 1,
    )


class _Meter:
    def __init__(self, device: Any, trials: Trials, say: Callable[[str], None], until: float) -> None:
        self.device, self.trials, self.say, self.until = device, trials, say, until
        self.on = device.torch_device
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[trials.dtype]
        self.width = 4 if trials.dtype == "float32" else 2

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.until

    # Rates

    def rates(self) -> Calibration:
        bytes_per_s = self._copies()
        measured = {(m, e): self._product(m, e) for e in self.trials.elements for m in self.trials.rows}
        flops = max(2 * m * k * n / s for (m, _), (k, n, s) in measured.items())
        share = []
        for m in self.trials.rows:
            row = []
            for e in self.trials.elements:
                k, n, s = measured[m, e]
                floor = max(2 * m * k * n / flops, (k * n + m * k + m * n) * self.width / bytes_per_s)
                row.append(round(floor / s, 4))
            share.append(tuple(row))
        flops8 = self._flops8()
        self.say(f"products {flops / 1e12:.3g} TFLOP/s, 8-bit {flops8 / 1e12:.3g}, copies {bytes_per_s / 1e9:.4g} GB/s")
        return Calibration(
            device="cpu" if self.device.kind == "cpu" else self.device.name,
            made=datetime.datetime.now(datetime.UTC).date().isoformat(),
            versions=versions() | {"processor": host.processor()},
            flops=flops,
            flops8=flops8,
            bytes_per_s=bytes_per_s,
            matmul=Grid(self.trials.rows, self.trials.elements, tuple(share)),
            coefficients={},
        )

    def _copies(self) -> float:
        copied = torch.empty(self.trials.copy_bytes, dtype=torch.uint8, device=self.on).random_(0, 255)
        target = torch.empty_like(copied)
        return 2 * self.trials.copy_bytes / self._seconds(lambda: target.copy_(copied))

    def _product(self, m: int, elements: int) -> tuple[int, int, float]:
        """Of several matrices in turn, as a decoder's layers are, so that a device's cache does not hold them."""
        k = max(16, round((elements / 3) ** 0.5 / 16) * 16)
        n = max(16, elements // k // 16 * 16)
        copies = 3 if self.on.type == "cpu" else max(2, min(48, (256 << 20) // (k * n * self.width)))
        weights = [torch.randn(n, k, device=self.on, dtype=self.dtype) for _ in range(copies)]
        x = torch.randn(m, k, device=self.on, dtype=self.dtype)

        def all_of_them() -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        return k, n, self._captured_seconds(all_of_them) / copies

    def _flops8(self) -> float:
        if self.on.type != "cuda":
            return 0.0
        try:
            a = torch.randn(8192, 4096, device=self.on).to(torch.float8_e4m3fn)
            b = torch.randn(8192, 4096, device=self.on).to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=self.on)
            spent = self._seconds(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16))
        except (RuntimeError, AttributeError, ValueError):
            return 0.0
        return 2 * 8192 * 4096 * 8192 / spent

    def _captured_seconds(self, work: Callable[[], Any]) -> float:
        """Without the time that the host takes to start each kernel: decoding runs captured."""
        if self.on.type != "cuda":
            return self._seconds(work)
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return self._seconds(graph.replay)

    def _seconds(self, work: Callable[[], Any]) -> float:
        """The median of rounds; a round is as many repeats as take a while."""
        work()
        self.device.synchronize()
        began = time.perf_counter()
        work()
        self.device.synchronize()
        times = max(1, min(200, int(ENOUGH_S / 3 / max(1e-7, time.perf_counter() - began))))
        rounds = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(times):
                work()
            self.device.synchronize()
            rounds.append((time.perf_counter() - began) / times)
        return median(rounds)

    # Engine and learner

    def points(self, base: Calibration) -> dict[str, list[Point]]:
        found: dict[str, list[Point]] = {"decode": [], "prefill": [], "learn": [], "update": []}
        for model, engines in self.trials.engines:
            if not self.is_late:
                self._guarded(f"engine {model.hidden}", partial(self._engine, base, model, engines, found))
        for model, learners in self.trials.learners:
            for trial in learners:
                if not self.is_late:
                    name = f"learner {model.hidden} {trial.learn or ''}"
                    self._guarded(name, partial(self._learner, base, model, trial, found))
        return found

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        """One trial that this device cannot run leaves the others their points."""
        began = time.perf_counter()
        try:
            work()
            self.say(f"{name}: {time.perf_counter() - began:.1f} s")
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self.say(f"{name}: left out ({str(error).splitlines()[0][:120]})")
        gc.collect()
        if self.on.type != "cpu":
            torch.accelerator.empty_cache()

    def _model(self, trial: TrialModel, window: int) -> tuple[Any, ModelShape]:
        from transformers import AutoConfig

        from tidemill.models.load import from_config

        plain = trial.settings(window)
        config = AutoConfig.for_model(plain.pop("model_type"), **plain)
        torch.manual_seed(0)
        with self.on:
            made = from_config(config, dtype=self.dtype)
        made.config.use_cache = False
        shape = parse(made.config.to_dict())
        assert shape is not None
        return made.eval(), shape

    def _engine(
        self, base: Calibration, model: TrialModel, trials: Sequence[EngineTrial], found: dict[str, list[Point]]
    ) -> None:
        from tidemill.rollout.engine import Request, Sampling
        from tidemill.rollout.native.engine import NativeEngine

        longest = max(t.prompt + t.steps for t in trials) + 8
        cache = max(t.rows * (t.prompt + t.steps + 40) for t in trials)
        module, shape = self._model(model, longest + 8)
        engine = NativeEngine(
            module, eos_ids=(), max_seqs=max(t.rows for t in trials), max_len=longest, cache_tokens=cache,
            speculate="auto",
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for number, trial in enumerate(trials):
            sampling = Sampling(max_tokens=trial.steps + 4, ignore_eos=True)
            for repeat in range(2):  # the first compiles and captures
                prompts = rng.integers(3, model.vocabulary, (trial.rows, trial.prompt)).tolist()
                for i, prompt in enumerate(prompts):
                    engine.submit(Request((number * 2 + repeat) * 10_000 + i, prompt, sampling))
                self.device.synchronize()
                began = time.perf_counter()
                while engine.scheduler.waiting or engine.scheduler.reading or engine.scheduler.ready:
                    engine.step()
                self.device.synchronize()
                read_s = time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(trial.steps):
                    engine.step()
                self.device.synchronize()
                step_s = (time.perf_counter() - began) / trial.steps
                while engine.has_work:
                    engine.step()
            context = trial.rows * (trial.prompt + 1 + trial.steps / 2)
            cost = features.decode(base, shape, trial.rows, context, self.width, ALONE)
            found["decode"].append((cost, step_s))
            tokens = trial.rows * trial.prompt
            read = features.prefill(base, shape, tokens, tokens * trial.prompt / 2, trial.rows, self.width, ALONE)
            budget = engine.scheduler.step_tokens
            times = max(1, -(-tokens // budget))
            read |= {name: amount * times for name, amount in read.items() if name.endswith((".once", ".layer"))}
            found["prefill"].append((read, read_s))

    def _learner(self, base: Calibration, model: TrialModel, trial: LearnTrial, found: dict[str, list[Point]]) -> None:
        from tidemill.algorithms.shared.registry import get
        from tidemill.learn.engine import Learner

        module, shape = self._model(model, trial.prompt + trial.response + 8)
        tokens = trial.groups * (trial.prompt + trial.each * trial.response) * 2
        config = Config.model_validate(
            {
                "algorithm": {"name": "grpo"},
                "train": {
                    "tokens_per_microbatch": 2 * trial.groups * trial.each * (trial.prompt + trial.response) + tokens,
                    "prompts_per_step": trial.groups,
                    "samples_per_prompt": trial.each,
                },
                "data": {"max_prompt_tokens": trial.prompt},
                "rollout": {"max_new_tokens": trial.response},
                "model": {"dtype": self.trials.dtype},
                "learn": trial.learn,
            }
        )
        learner = Learner(module, config, get("grpo"), 100)
        batch = samples(trial, model.vocabulary)
        try:
            rounds = []
            for _ in range(4):
                began = time.perf_counter()
                learner.accumulate(batch)
                self.device.synchronize()
                middle = time.perf_counter()
                learner.update()
                self.device.synchronize()
                rounds.append((middle - began, time.perf_counter() - middle))
            pass_s, update_s = (median(column) for column in list(zip(*rounds, strict=True))[:2])
            pass_s = median(r[0] for r in rounds[1:])
            update_s = median(r[1] for r in rounds[1:])
            score_s = []
            for _ in range(2):
                began = time.perf_counter()
                learner.logprobs(batch)
                self.device.synchronize()
                score_s.append(time.perf_counter() - began)
        finally:
            learner.gradients.close()
        work = features.pass_of(config, [trial.prompt] * trial.groups, [[trial.response] * trial.each] * trial.groups)
        found["learn"].append((features.learn(base, shape, work, self.width, ALONE), pass_s))
        if not trial.learn:
            scored = features.learn(base, shape, replace(work, trains=False), self.width, ALONE)
            found["learn"].append((scored, score_s[-1]))
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        bytes_each = 7 * self.width
        found["update"].append((features.update(base, trained, bytes_each), update_s))


def samples(trial: LearnTrial, vocabulary: int) -> Batch:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(trial.groups):
        shared = rng.integers(3, vocabulary, trial.prompt)
        rows += [np.concatenate([shared, rng.integers(3, vocabulary, trial.response)]) for _ in range(trial.each)]
    count = trial.groups * trial.each
    return Batch(
        {
            ID: np.arange(count),
            GROUP: np.repeat(np.arange(trial.groups), trial.each),
            "tokens": Column.jagged(rows, np.int32),
            "prompt_length": np.full(count, trial.prompt, np.int32),
            "mask": Column.jagged([np.ones(trial.response)] * count, np.uint8),
            "logprobs": Column.jagged([np.full(trial.response, -np.log(vocabulary))] * count, np.float32),
            "advantages": rng.normal(size=count).astype(np.float32),
        }
    )
