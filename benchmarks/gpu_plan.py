"""Measure what the model of time predicts, on one accelerator: a calibration, then whole GRPO steps of 39 settings.

    PYTHONPATH=SITE:src python benchmarks/gpu_plan.py --out FOLDER       # about five minutes on an H200

First kernels are compiled by processes side by side; then `calibrate`; then the run of each setting, one by one.
Results are written line by line: FOLDER/settings.jsonl, FOLDER/calibration.json, FOLDER/points.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

from benchmarks._plan_settings import Setting, everything, model_settings  # noqa: E402

WARM_S = 100.0
GIB = 2**30


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default=os.environ.get("OUT", "."))
    options.add_argument("--only", default="", help="compile, calibrate or settings")
    options.add_argument("--models", default="1.5b,7b,3b,moe,0.5b")
    options.add_argument("--limit", type=float, default=320.0, help="seconds in all: no setting begins later")
    options.add_argument("--warm", default="", help="compile this model's kernels and end")
    options.add_argument("--measure", default="", help="measure this model's settings and end")
    options.add_argument("--calibrate", action="store_true", help="calibrate and end")
    asked = options.parse_args()
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    if asked.warm:
        warm(asked.warm)
    elif asked.measure:
        measure(asked.measure, out, asked.limit)
    elif asked.calibrate:
        calibrate(out)
    else:
        conduct(asked, out)


def conduct(asked: Any, out: Path) -> None:
    began = time.perf_counter()
    models = asked.models.split(",")
    only = asked.only

    def left() -> float:
        return asked.limit - (time.perf_counter() - began)

    def child(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, "--out", str(out), *words])

    def ended(process: subprocess.Popen[bytes], limit_s: float) -> None:
        try:
            process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            print("killed: out of time", flush=True)

    if only in ("", "compile"):
        processes = [child("--warm", model) for model in models]
        deadline = time.perf_counter() + WARM_S
        for process in processes:
            ended(process, deadline - time.perf_counter())
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    if only in ("", "calibrate"):
        ended(child("--calibrate"), left())
        print(f"calibrated after {time.perf_counter() - began:.0f} s", flush=True)
    if only in ("", "settings"):
        for model in models:
            if left() > 5:
                ended(child("--measure", model, "--limit", f"{left():.0f}"), left() + 10)
                print(f"{model} after {time.perf_counter() - began:.0f} s", flush=True)
    print(f"took {time.perf_counter() - began:.0f} s", flush=True)


def calibrate(out: Path) -> None:
    from tidemill.plan.calibrate import calibrate as taken

    points: list[Any] = []
    made = taken(lambda text: print(f"calibrate: {text}", flush=True), limit_s=120.0, keep=points)
    (out / "calibration.json").write_text(made.dump(), encoding="utf-8")
    (out / "points.json").write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")


# A model that is made once, and runs that find it instead of loading it


def tokenizer() -> Any:
    """Of bytes: every letter of the prompts is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.train_from_iterator(
        ["abc 123"],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<pad>", "<start>", "<end>"], initial_alphabet=alphabet,
            show_progress=False,
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>", padding_side="left")


class Bench:
    """One model on the device, and whole runs over it."""

    def __init__(self, model: str, folder: Path, layers: int | None = None) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig

        from tidemill.models import load as loading
        from tidemill.reward.registry import BUILT_IN, BuiltIn

        BUILT_IN["noise"] = BuiltIn("benchmarks._step_ours:noise", True)
        self.folder, self.on_device = folder, torch.accelerator.is_available()
        plain = model_settings(model, layers)
        self.config = AutoConfig.for_model(plain.pop("model_type"), **plain)
        self.dtype = torch.bfloat16 if self.on_device else torch.float32
        torch.manual_seed(0)
        place = torch.device(torch.accelerator.current_accelerator() if self.on_device else "cpu")  # type: ignore[arg-type]
        with place:
            module = loading.from_config(self.config, dtype=self.dtype)
        self.module, self.tokens = module, tokenizer()
        (folder / "model").mkdir()
        self.config.save_pretrained(folder / "model")
        self.tokens.save_pretrained(folder / "model")
        save_file({"unused": torch.zeros(1)}, folder / "model" / "model.safetensors")  # what a folder must have
        wrapped = loading.wrap(module, self.tokens, plain["max_position_embeddings"])
        loading.open_folder = lambda *_, **__: wrapped  # type: ignore[assignment]
        self.learned: str | None = None

    def clear(self, learn: dict[str, Any]) -> None:
        """Whatever the run before did to the model, undone; compiled code stays where the same will be compiled."""
        import torch

        from tidemill.learn import layers
        from tidemill.models import lora

        key = json.dumps(learn, sort_keys=True)
        layers.undo(self.module)
        lora.detach(self.module)
        if self.learned not in (None, key):
            torch._dynamo.reset()  # type: ignore[no-untyped-call]
        self.learned = key
        for p in self.module.parameters():
            p.grad = None
            p.requires_grad_(True)
        gc.collect()
        if self.on_device:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def run(self, setting: Setting) -> dict[str, Any]:
        import torch

        from tidemill.device import mapped
        from tidemill.run import start as launch
        from tidemill.run.watcher import Watcher

        self.clear(setting.learn)
        laps: list[dict[str, float]] = []
        on_device = self.on_device

        class Enough(Exception):
            pass

        class Clock(Watcher):
            def started(self, workers: Any, first_step: int) -> None:
                self.start = time.perf_counter()

            def stepped(self, step: int, metrics: dict[str, float]) -> None:
                if on_device:
                    torch.accelerator.synchronize()
                end = time.perf_counter()
                timed = {name: value for name, value in metrics.items() if name.startswith("time/")}
                tokens = metrics["prompt_tokens"] + metrics["made_tokens"]
                laps.append({"seconds": end - self.start, "tokens": tokens, "made": metrics["made_tokens"], **timed})
                self.start = end
                if step == setting.steps:
                    raise Enough

        began = time.perf_counter()
        prompts = self.folder / "prompts.jsonl"
        draw = random.Random(0)
        lines = (
            "".join(draw.choices("qwertyuiopxzvnm", k=setting.prompt)) for _ in range(setting.prompts * setting.steps)
        )
        prompts.write_text("".join(json.dumps({"prompt": line, "answer": "1"}) + "\n" for line in lines))
        recipe = setting.recipe(
            str(self.folder / "model"), str(prompts), str(self.folder / "runs"), str(self.dtype).partition(".")[2]
        )
        with contextlib.suppress(Enough):
            launch.train(recipe, watch=Clock())
        peak = torch.accelerator.max_memory_allocated() + mapped.most_bytes() if on_device else 0
        return {
            "setting": setting.name,
            "seconds": min(lap["seconds"] for lap in laps[1:]),
            "laps": laps,
            "peak_gib": round(peak / GIB, 2),
            "took_s": round(time.perf_counter() - began, 1),
        }


@contextlib.contextmanager
def bench(model: str, layers: int | None = None) -> Iterator[Bench]:
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=fast) as folder:
        yield Bench(model, Path(folder), layers)


def of(model: str) -> Sequence[Setting]:
    return [setting for setting in everything() if setting.model == model] or [Setting(model, 4, 16, 24)]


def measure(model: str, out: Path, limit_s: float) -> None:
    began = time.perf_counter()
    with bench(model) as made, (out / "settings.jsonl").open("a", encoding="utf-8") as results:
        for setting in of(model):
            if time.perf_counter() - began > limit_s:
                print(f"left out: {setting.name}", flush=True)
                continue
            try:
                found = made.run(setting)
            except Exception:
                found = {"setting": setting.name, "error": traceback.format_exc()[-1500:]}
            results.write(json.dumps(found) + "\n")
            results.flush()
            said = f"{found['seconds']:.3f} s of {found['took_s']}" if "seconds" in found else found["error"]
            print(f"{setting.name}: {said}", flush=True)


def warm(model: str) -> None:
    """Compile what its settings need, with two of its layers and little work: kernels are kept on disk."""
    began = time.perf_counter()
    with bench(model, layers=2) as made:
        forms: dict[str, Setting] = {}
        for setting in of(model):
            forms.setdefault(json.dumps(setting.learn, sort_keys=True), setting)
        for setting in forms.values():
            small = replace(setting, prompts=2, prompt=128, response=24, concurrent=16, micro=2048, steps=1)
            try:
                made.run(small)
            except ValueError:
                pass  # one step: nothing was timed
            except Exception as error:
                print(f"warm {setting.name}: {error!r}"[:600], flush=True)
    print(f"warm {model}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
