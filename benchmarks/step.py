"""A whole GRPO step (roll out, score, learn) beside TRL's GRPOTrainer: same model, prompts, lengths and batch.

Each system runs in a process of its own, one after the other, round by round. The job is the quickstart's, with its
model warmed up on worked answers (so responses end by themselves), and with one ten times larger. Nothing of ours is
imported above the functions: a peer's process must load torch as if we were not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ABOUT = "a whole GRPO step in tokens/s, on the quickstart's model and one ten times larger; peer: trl"
PEERS = {"trl": "trl"}
OPTIONS: dict[str, Any] = {
    "models": ["quickstart", "10x"],
    "steps": 4,  # timed, after `warmup` steps that are not
    "warmup": 2,
    "threads": 0,  # 0: all cores
    "schedule": "sync",
    "trl_batch": 256,  # samples in TRL's forward pass; the whole step at once was the fastest here
    "crowd": 0,  # cores that stress-ng keeps busy beside every system
}
SHAPES = {
    "quickstart": {},
    "10x": {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 1408},
}
WARM_UP_STEPS = {"quickstart": 100, "10x": 40}  # enough that responses end by themselves
JOB = {"prompts": 32, "samples": 8, "max_new_tokens": 40}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    large = [name for name in options["models"] if name not in SHAPES]
    if large:  # `--models 1.5b,0.5b`: on an accelerator, where TRL generates with vLLM
        from benchmarks import gpu_step

        return gpu_step.run({**gpu_step.OPTIONS, "shapes": large, "peers": options["peers"]})
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options["models"]:
            model = make_model(name, Path(folder) / name, options)
            systems = ["ours", *options["peers"]]
            rounds: dict[str, list[dict[str, Any]]] = {s: [] for s in systems}
            for _ in range(int(options["repeats"])):
                for system in systems:
                    rounds[system].append(in_process(system, model, options))
            case = merged(rounds["ours"])
            case["peers"] = {peer: merged(rounds[peer]) for peer in options["peers"]}
            for theirs in case["peers"].values():
                theirs["ratio_tokens_per_s"] = case["tokens_per_s"]["median"] / theirs["tokens_per_s"]["median"]
                theirs["ratio_tokens_per_cpu_s"] = (
                    case["tokens_per_cpu_s"]["median"] / theirs["tokens_per_cpu_s"]["median"]
                )
            cases[name] = case
    return {"cases": cases, "job": JOB, **flat(cases)}


def flat(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The first case's numbers at the top too: what one compares first."""
    first = next(iter(cases.values()))
    return {"tokens_per_s": first["tokens_per_s"], "peers": first["peers"]}


def merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread over rounds of each round's own median step."""
    from tidemill.bench import summary

    keys = [k for k, v in rounds[0].items() if isinstance(v, int | float)]
    return {key: summary([r[key] for r in rounds]) for key in keys}


def make_model(name: str, folder: Path, options: Mapping[str, Any]) -> Path:
    """Warmed up just enough that responses have their natural lengths; both systems load the same folder."""
    code = (
        "import sys, json; from pathlib import Path\n"
        "from tidemill.run import start as launch; from tidemill.run.trained import export\n"
        "folder, overrides = sys.argv[1], json.loads(sys.argv[2])\n"
        "launch.train('quickstart-worked', overrides)\n"
        "export(folder + '/sft', Path(folder) / 'model')\n"
    )
    shape = [f"model.tiny.{key}={value}" for key, value in SHAPES[name].items()]
    overrides = [
        *shape,
        f"train.steps={WARM_UP_STEPS[name]}",
        f"folder={folder}",
        "name=sft",
        "observe.progress=off",
        *threads(options),
    ]
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(overrides)], check=True, stdout=sys.stderr)
    return folder / "model"


def threads(options: Mapping[str, Any]) -> list[str]:
    return [f"threads={options['threads']}"] if options["threads"] else []


def in_process(system: str, model: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.bench import peer_environment

    command = [sys.executable, __file__, json.dumps({**options, "system": system, "model": str(model)})]
    with crowded(int(options["crowd"])):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=peer_environment())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def crowded(cores: int) -> Iterator[None]:
    """Somebody else's work on the last so many cores, as heavy for every system (`apt-get install stress-ng`)."""
    if not cores:
        yield
        return
    taken = ",".join(map(str, sorted(os.sched_getaffinity(0))[-cores:]))
    with subprocess.Popen(["stress-ng", "--quiet", "--cpu", f"{cores}", "--taskset", taken]) as other:
        try:
            yield
        finally:
            other.terminate()


def measured(laps: list[tuple[float, float, float]], warmup: int) -> dict[str, float]:
    """Laps are (seconds, CPU seconds, tokens) of each step."""
    from statistics import median

    timed = laps[warmup:]
    return {
        "tokens_per_s": median(tokens / seconds for seconds, _, tokens in timed),
        "tokens_per_cpu_s": median(tokens / cpu for _, cpu, tokens in timed),
        "step_s": median(seconds for seconds, _, _ in timed),
        "tokens_per_step": median(tokens for _, _, tokens in timed),
    }


def ours(job: Mapping[str, Any]) -> dict[str, float]:
    from tidemill.run import start as launch
    from tidemill.run.loop import Watcher

    laps: list[tuple[float, float, float]] = []

    class Clock(Watcher):
        def started(self, workers: Any, first_step: int) -> None:
            self.at, self.cpu = time.perf_counter(), time.process_time()

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            now, cpu = time.perf_counter(), time.process_time()
            tokens = metrics["prompt_tokens"] + metrics["made_tokens"]
            laps.append((now - self.at, cpu - self.cpu, tokens))
            self.at, self.cpu = now, cpu

    with tempfile.TemporaryDirectory() as folder:
        launch.train(
            "quickstart",
            [
                f"model.path={job['model']}",
                f"train.steps={job['steps'] + job['warmup']}",
                f"train.prompts_per_step={JOB['prompts']}",
                f"train.samples_per_prompt={JOB['samples']}",
                f"rollout.max_new_tokens={JOB['max_new_tokens']}",
                f"flow.schedule={job['schedule']}",
                "eval.before=false",
                "eval.after=false",
                "eval.every=0",
                "checkpoint.every=0",
                f"folder={folder}",
                *threads(job),
            ],
            watch=Clock(),
        )
    return measured(laps, job["warmup"])


def trl(job: Mapping[str, Any]) -> dict[str, float]:
    import torch  # before tidemill, which would choose how torch's threads wait for each other

    assert "tidemill" not in sys.modules
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tidemill.data.source import open_source
    from tidemill.recipe import load as recipe
    from tidemill.reward.api import Sample
    from tidemill.reward.verifiers.answers import last_number

    if job["threads"]:
        torch.set_num_threads(int(job["threads"]))
    config = recipe.load("quickstart").config
    source, _ = open_source(config.data, config.seed)
    steps = job["steps"] + job["warmup"]
    rows = [source.example(i) for i in range(steps * JOB["prompts"])]
    data = Dataset.from_dict({"prompt": [r.prompt for r in rows], "answer": [r.answer for r in rows]})

    def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(last_number(Sample(prompt="", response=c, answer=a))) for c, a in zip(completions, answer)]

    laps: list[tuple[float, float, float]] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.at, self.cpu, self.tokens = time.perf_counter(), time.process_time(), 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
            if "num_tokens" not in (logs or {}):
                return
            now, cpu, tokens = time.perf_counter(), time.process_time(), float(logs["num_tokens"])
            laps.append((now - self.at, cpu - self.cpu, tokens - self.tokens))
            self.at, self.cpu, self.tokens = now, cpu, tokens

    samples = JOB["prompts"] * JOB["samples"]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job["trl_batch"],
            gradient_accumulation_steps=samples // job["trl_batch"],
            num_generations=JOB["samples"],
            max_completion_length=JOB["max_new_tokens"],
            max_steps=steps,
            learning_rate=config.learn.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            loss_type="grpo",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = GRPOTrainer(
            model=job["model"], reward_funcs=correct, args=settings, train_dataset=data, callbacks=[Clock()]
        )
        trainer.train()
    return measured(laps, job["warmup"])


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"ours": ours, "trl": trl}[asked["system"]](asked)))
