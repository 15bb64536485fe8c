"""Published end-to-end figures of other systems with their settings, as rows that the model of time predicts.

Figures and settings are the systems' own. What a source leaves out is assumed here, and `assumed` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median
from typing import Any

NEMO = "NeMo-RL 0.4, performance summary (github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md)"
NEMO_06 = "NeMo-RL 0.6, performance summary (docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html)"
VERL_ASYNC = "verl, docs/advance/fully_async.md"
VERL_OFF = "verl, docs/advance/one_step_off.md"
AREAL = "AReaL 0.2, README and blog/AReaL_v0_2.md"
VERL_671 = "verl with MindSpeed, public recipe for 671B"
MINDSPEED = "MindSpeed RL, table of GRPO"


@dataclass(frozen=True)
class Row:
    system: str  # shares one factor of efficiency
    source: str
    model: str
    device: str
    devices: int
    samples: tuple[int, int]  # prompts and responses of each, of a step
    lengths: tuple[float, float]  # mean tokens of prompt and response
    longest: int
    step_s: float = 0.0
    tokens_per_s_device: float = 0.0
    learners: int = 0  # 0: rollout shares all devices
    rollout_tp: int = 1
    learn: dict[str, int] = field(default_factory=dict)  # tp, pp, cp, ep
    updates: int = 1
    schedule: str = "sync"
    sigma: float = 0.6
    scores: tuple[str, ...] = ("old",)  # passes beside learning: old log-probabilities, reference
    recompute: str = "full"
    per_node: int = 8
    optimizer_off: bool = True  # leaves the device while rollout works
    assumed: str = ""

    @property
    def name(self) -> str:
        how = f"{self.learners}+{self.devices - self.learners}" if self.learners else "colocated"
        return f"{self.model}, {self.devices} {self.device}, {how}, {self.schedule}"

    @property
    def published_s(self) -> float:
        """Seconds of a step."""
        if self.step_s:
            return self.step_s
        tokens = self.samples[0] * self.samples[1] * sum(self.lengths)
        return tokens / self.tokens_per_s_device / self.devices


def nemo(
    model: str, devices: int, step: float, mean: float, longest: int, tp: int, learn: dict[str, int], **more: Any
) -> Row:
    samples = more.pop("samples", (64, 32))
    return Row(
        "NeMo-RL 0.4", NEMO, model, "H100", devices, samples, (150, mean - 150), longest, step, rollout_tp=tp,
        learn=learn, scores=("old", "reference"), updates=max(1, samples[0] * samples[1] // 512),
        assumed="prompts of 150 tokens; one step off: half of the devices roll out", **more,
    )  # fmt: skip


def later(model: str, *given: Any, **more: Any) -> Row:
    row = nemo(model, *given, **more)
    return replace(row, system="NeMo-RL 0.6", source=NEMO_06, assumed=f"layout and lengths of 0.4; {row.assumed}")


def off(devices: int) -> dict[str, Any]:
    return {"learners": devices // 2, "schedule": "async"}


def verl(devices: int, step: float, learners: int = 0, **more: Any) -> Row:
    schedule = "async" if learners else "sync"
    return Row(
        "verl on H20", VERL_ASYNC, "Qwen2.5-7B", "H20", devices, (512, 16), (150, 1800), 28_672, step,
        learners=learners, schedule=schedule, sigma=1.1, updates=16, scores=() if learners else ("old",),
        assumed="responses of 1,800 tokens with a long tail, from its time of old log-probabilities", **more,
    )  # fmt: skip


def areal(model: str, devices: int, hours: float, steps: int) -> Row:
    return Row(
        "AReaL", AREAL, model, "H800", devices, (512, 16), (200, 8000), 27_648, hours * 3600 / steps,
        updates=4, assumed="H800, prompts of 200 and responses of 8,000 tokens",
    )  # fmt: skip


def mindspeed(model: str, device: str, devices: int, samples: tuple[int, int], prompt: int, longest: int,
              tokens: float, tp: int, learn: dict[str, int]) -> Row:  # fmt: skip
    """Published for a card: of an A3, two dies."""
    each = tokens / 2 if device == "910C" else tokens
    return Row(
        "MindSpeed RL", MINDSPEED, model, device, devices, samples, (0.2 * prompt, 0.5 * longest), longest,
        tokens_per_s_device=each, rollout_tp=tp, learn=learn, scores=("old", "reference"),
        per_node=8 if device == "910B" else 16,
        assumed="devices and layout; prompts of a fifth, responses of half of the longest",
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    nemo("Llama-3.1-8B", 16, 97.7, 1060, 4096, 1, {"pp": 2}),
    nemo("Llama-3.1-8B", 16, 74.6, 1129, 4096, 1, {"pp": 2}, **off(16)),
    nemo("Qwen3-32B", 32, 393, 3206, 4096, 4, {"tp": 4, "pp": 4}, sigma=0.25),
    nemo("Qwen3-32B", 64, 215, 3207, 4096, 4, {"tp": 4, "pp": 4}, sigma=0.25, **off(64)),
    nemo("Qwen3-30B-A3B", 32, 225, 3154, 4096, 4, {"tp": 2, "ep": 8}, sigma=0.25),
    nemo("Qwen3-30B-A3B", 32, 244, 3158, 4096, 2, {"ep": 8, "pp": 2}, sigma=0.25, **off(32)),
    nemo("Qwen3-235B-A22B", 128, 506, 5671, 8192, 16, {"tp": 2, "cp": 2, "ep": 16, "pp": 8}, samples=(16, 32)),
    nemo("Qwen3-235B-A22B", 256, 241, 5691, 8192, 8, {"tp": 4, "ep": 16, "pp": 8}, samples=(16, 32), **off(256)),
    nemo("DeepSeek-V3", 256, 154, 745, 1536, 32, {"ep": 16, "pp": 16}, samples=(16, 32)),
    nemo("DeepSeek-V3", 512, 77.9, 744, 1536, 32, {"ep": 16, "pp": 16}, samples=(16, 32), **off(512)),
    later("Qwen3-30B-A3B", 32, 192, 3154, 4096, 4, {"tp": 2, "ep": 8}, sigma=0.25),
    later("Qwen3-30B-A3B", 32, 152, 3158, 4096, 2, {"ep": 8, "pp": 2}, sigma=0.25, **off(32)),
    later("Qwen3-235B-A22B", 128, 395, 5671, 8192, 16, {"tp": 2, "cp": 2, "ep": 16, "pp": 8}, samples=(16, 32)),
    later("DeepSeek-V3", 512, 64, 744, 1536, 32, {"ep": 16, "pp": 16}, samples=(16, 32), **off(512)),
    verl(32, 790.1),
    verl(64, 365.3),
    verl(128, 356.3),
    verl(32, 294.8, 16),
    verl(64, 189.3, 32),
    verl(128, 150.6, 64),
    areal("Qwen2.5-1.5B", 8, 240, 250),
    areal("Qwen2.5-1.5B", 32, 69, 250),
    areal("Qwen2.5-1.5B", 128, 27, 250),
    areal("Qwen2.5-7B", 32, 252, 400),
    areal("Qwen2.5-7B", 128, 90, 400),
    Row(
        "verl and MindSpeed, 671B", VERL_671, "DeepSeek-V3-671B", "910C", 256, (512, 16), (77.8, 1576.6), 2048, 859.7,
        rollout_tp=16, learn={"tp": 8, "pp": 8, "ep": 32}, scores=("reference",), per_node=16, sigma=0.3,
        assumed="512 prompts of 16 (from its tokens/s), tp 8, pp 8, ep 32",
    ),
    mindspeed("Qwen2.5-7B", "910C", 16, (32, 8), 2048, 2048, 220, 2, {"tp": 4}),
    mindspeed("Qwen3-8B", "910C", 16, (32, 8), 2048, 8192, 252, 2, {"tp": 4}),
    mindspeed("Qwen2.5-32B", "910C", 32, (64, 16), 1024, 2048, 220, 4, {"tp": 8, "pp": 2}),
    mindspeed("Qwen2.5-32B", "910B", 32, (64, 16), 1024, 1024, 100, 4, {"tp": 8, "pp": 2}),
    mindspeed("DeepSeek-R1", "910C", 384, (384, 32), 1024, 2048, 210, 32, {"tp": 4, "pp": 8, "ep": 32}),
)  # fmt: skip


def predicted(row: Row) -> dict[str, Any]:
    from tidemill.plan import hardware, step_estimate
    from tidemill.plan.lengths import Lengths
    from tidemill.plan.time_model import TimeModel
    from tidemill.recipe.config import Config

    learners = row.learners or row.devices
    sizes = {name: row.learn.get(name, 1) for name in ("tp", "pp", "cp", "ep")}
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    prompt, response = row.lengths
    plain: dict[str, Any] = {
        "model": {"path": row.model, "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": max(1, round(prompt * 2))},
        "rollout": {"max_new_tokens": row.longest, "tp": row.rollout_tp, "concurrent": 256},
        "train": {
            "prompts_per_step": row.samples[0],
            "samples_per_prompt": row.samples[1],
            "updates_per_step": row.updates,
            "tokens_per_microbatch": max(8192, row.longest),
        },
        "algorithm": {
            "name": "grpo",
            "old_logprobs": "recompute" if "old" in row.scores else "rollout",
            "kl": {"coef": 0.01 if "reference" in row.scores else 0.0},
        },
        "learn": {"recompute": row.recompute, "share_prompts": False, "parallel": {**sizes, "fsdp": learners // inner}},
        "flow": {"schedule": row.schedule},
        "cluster": {
            "executor": "ray",
            "rollouts": max(1, (row.devices - row.learners) // row.rollout_tp),
            "placement": {"rollout": "separated" if row.learners else "colocated"},
        },
    }
    config = Config.model_validate(plain)
    machines = hardware.cluster_of(row.device, -(-row.devices // row.per_node), min(row.per_node, row.devices))
    model = TimeModel(config, machines)
    lengths = Lengths(prompt, response, row.longest, row.sigma)
    step = step_estimate.estimate(model, lengths)
    return {"seconds": step.seconds, "parts": step.parts, "limit": step.limit, "mfu": step.mfu(machines.sheet.flops)}


def table(rows: Sequence[Row] = ROWS) -> list[dict[str, Any]]:
    """Predicted and published, with one factor a system: how much of our efficiency it reaches."""
    found = [(row, predicted(row)) for row in rows]
    factors = {
        system: median(p["seconds"] / row.published_s for row, p in found if row.system == system)
        for system in dict.fromkeys(row.system for row in rows)
    }
    return [
        {
            "system": row.system,
            "row": row.name,
            "published_s": row.published_s,
            "ours_s": p["seconds"],
            "factor": factors[row.system],
            "predicted_s": p["seconds"] / factors[row.system],
            "error": p["seconds"] / factors[row.system] / row.published_s - 1,
            "limit": p["limit"],
            "parts_s": {name: seconds for name, seconds in p["parts"].items() if seconds},
            "source": row.source,
            "assumed": row.assumed,
        }
        for row, p in found
    ]


def orders(found: Sequence[dict[str, Any]], rows: Sequence[Row] = ROWS) -> list[dict[str, Any]]:
    """Of two layouts that one system published for one model: is the faster one the one that is predicted so?"""
    pairs = []
    for (one, a), (other, b) in combinations(zip(rows, found, strict=True), 2):
        if (one.system, one.model, one.device, one.samples) != (other.system, other.model, other.device, other.samples):
            continue
        pairs.append(
            {
                "one": one.name,
                "other": other.name,
                "published": a["published_s"] / b["published_s"],
                "predicted": a["predicted_s"] / b["predicted_s"],
                "is_right": (a["published_s"] < b["published_s"]) == (a["predicted_s"] < b["predicted_s"]),
            }
        )
    return pairs
