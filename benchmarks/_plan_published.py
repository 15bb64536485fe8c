"""Published end-to-end figures of other systems with their settings, as rows that the model of time predicts.

Figures and settings are the systems' own. What a source leaves out is assumed here, and `assumed` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Any

from tidemill.plan import features, hardware, links, step_estimate
from tidemill.plan.lengths import Lengths
from tidemill.plan.time_model import TimeModel
from tidemill.recipe.config import Config

NEMO = "NeMo-RL's performance summary (docs/about/performance-summary.md), layouts by the recipes"
VERL_ASYNC = "verl, docs/advance/fully_async.md"
VERL_OFF = "verl, docs/advance/one_step_off.md"
AREAL = "AReaL 0.2, README and blog/AReaL_v0_2.md"
VERL_671 = "verl with MindSpeed, public recipe for 671B"
MINDSPEED = "MindSpeed RL, docs/zh/algorithms/grpo.md and configs/grpo_*.yaml"


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
    steps_ahead: int = 1  # under async
    sigma: float = 0.6
    scores: tuple[str, ...] = ("old",)  # passes beside learning: old log-probabilities, reference
    recompute: str = "full"
    per_node: int = 8
    between: str = "ib400"  # the link that joins nodes
    micro: int = 0  # tokens of a micro-batch; 0: the longest sequence, at least 8,192
    at_once: int = 256  # sequences that an engine has at most
    shards: int = 0  # ranks over which weights are cut by FSDP; 0: all that are left
    folds: bool = False  # as Megatron does: tensor parallel ranks are expert parallel ranks too
    longest_prompt: int = 0
    is_padded: bool = False  # every sample is learned at the longest length
    rollout_dp: int = 1  # replicas of an engine that share its experts
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


def nemo(version: str, model: str, devices: int, step: float, mean: float, longest: int, tp: int,
         learn: dict[str, int], **more: Any) -> Row:  # fmt: skip
    """A micro-batch is one packed window. Activations are recomputed where the recipe of that version says so."""
    samples = more.pop("samples", (64, 32))
    recompute = "full" if model.startswith(("Llama", "Qwen3-235B", "DeepSeek")) else "none"
    return Row(
        f"NeMo-RL {version}", f"{NEMO} of v{version}", model, "H100", devices, samples, (150, mean - 150), longest,
        step, rollout_tp=tp, learn=learn, scores=("old", "reference"), updates=max(1, samples[0] * samples[1] // 512),
        recompute=recompute, micro=longest, folds=True, at_once=1024,
        assumed="prompts of 150 tokens; engines of 1,024 sequences; one step off: half of the devices roll out", **more,
    )  # fmt: skip


def ahead(learners: int) -> dict[str, Any]:
    return {"learners": learners, "schedule": "async"}


def verl(devices: int, step: float, learners: int = 0) -> Row:
    """Tensor parallel 4, Ulysses 4, FSDP 2, 61,440 tokens a device in a micro-batch: its recipe."""
    schedule = "async" if learners else "sync"
    return Row(
        "verl on H20", VERL_ASYNC, "Qwen2.5-7B", "H20", devices, (512, 16), (150, 900), 28_672, step,
        learners=learners, schedule=schedule, sigma=1.1, updates=16, scores=() if learners else ("old",),
        rollout_tp=4, learn={"cp": 4}, shards=2, micro=61_440, at_once=1024,
        assumed="responses of 900 tokens with a long tail: what its six update times hold at half of an H20's peak, in "
        "the median; its runs differ in length",
    )  # fmt: skip


def verl_one_off(step: float, **more: Any) -> Row:
    """Its script of 4 + 12: 12 samples a prompt, tensor parallel 2, Ulysses 4."""
    return Row(
        "verl on H20", VERL_OFF, "Qwen2.5-7B", "H20", 16, (512, 12), (150, 900), 20_480, step, sigma=1.1, updates=16,
        rollout_tp=2, learn={"cp": 4}, micro=61_440, at_once=1024,
        assumed="lengths of the fully asynchronous runs", **more,
    )  # fmt: skip


def areal(model: str, devices: int, hours: float, steps: int) -> Row:
    return Row(
        "AReaL", AREAL, model, "H800", devices, (512, 16), (200, 8000), 27_648, hours * 3600 / steps,
        learners=devices // 2, updates=4, micro=30_720, at_once=1024,
        assumed="H800; half of the devices roll out, half learn, in turns; prompts of 200, responses of 8,000 tokens",
    )  # fmt: skip


def mindspeed(model: str, device: str, devices: int, samples: tuple[int, int], prompt: int, longest: int,
              tokens: float, tp: int, learn: dict[str, int], at_once: int, **more: Any) -> Row:  # fmt: skip
    """Layouts and limits are those of its recipes. Published for a card: of an A3, two dies."""
    each = tokens / 2 if device == "910C" else tokens
    return Row(
        "MindSpeed RL", MINDSPEED, model, device, devices, samples, (0.2 * prompt, 0.5 * longest), longest,
        tokens_per_s_device=each, rollout_tp=tp, learn=learn, scores=("old", "reference"), at_once=at_once,
        longest_prompt=prompt, per_node=8 if device == "910B" else 16,
        between="roce200" if device == "910B" else "hccs", folds=True,
        assumed="prompts of a fifth, responses of half of the longest", **more,
    )  # fmt: skip


V3, R1 = {"ep": 16, "pp": 16}, {"tp": 4, "pp": 6, "ep": 16}
Q235, Q235_AHEAD = {"tp": 2, "cp": 2, "ep": 16, "pp": 8}, {"tp": 4, "ep": 16, "pp": 8}
V3_STEP, Q235_STEP = {"samples": (32, 16)}, {"samples": (16, 32), "sigma": 0.3}
EVEN = {"sigma": 0.25}  # responses that end near their limit
ROWS: tuple[Row, ...] = (
    nemo("0.4", "Llama-3.1-8B", 16, 97.7, 1060, 4096, 1, {"pp": 2}),
    nemo("0.4", "Llama-3.1-8B", 16, 74.6, 1129, 4096, 1, {"pp": 2}, **ahead(8)),
    nemo("0.4", "Qwen3-32B", 32, 393, 3206, 4096, 4, {"tp": 4, "pp": 4}, **EVEN),
    nemo("0.4", "Qwen3-32B", 64, 215, 3207, 4096, 4, {"tp": 4, "pp": 4}, **EVEN, **ahead(32)),
    nemo("0.4", "Qwen3-30B-A3B", 32, 225, 3154, 4096, 4, {"tp": 2, "ep": 8}, **EVEN),
    nemo("0.4", "Qwen3-30B-A3B", 32, 244, 3158, 4096, 4, {"tp": 2, "ep": 8}, **EVEN, **ahead(16)),
    nemo("0.4", "Qwen3-235B-A22B", 128, 506, 5671, 8192, 16, Q235, **Q235_STEP),
    nemo("0.4", "Qwen3-235B-A22B", 256, 241, 5691, 8192, 8, Q235_AHEAD, **Q235_STEP, **ahead(128)),
    nemo("0.4", "DeepSeek-V3", 256, 154, 745, 1536, 32, V3, **V3_STEP),
    nemo("0.4", "DeepSeek-V3", 512, 77.9, 744, 1536, 32, V3, **V3_STEP, **ahead(256)),
    nemo("0.5", "Llama-3.1-8B", 16, 92.8, 1019, 4096, 1, {"pp": 2}),
    nemo("0.5", "Llama-3.1-8B", 16, 64.8, 1123, 4096, 1, {}, **ahead(8)),
    nemo("0.5", "Qwen3-32B", 32, 376, 3251, 4096, 4, {"tp": 4, "pp": 4}, **EVEN),
    nemo("0.5", "Qwen3-32B", 64, 200, 3252, 4096, 4, {"tp": 4, "pp": 4}, **EVEN, **ahead(32)),
    nemo("0.5", "Qwen3-30B-A3B", 32, 198, 3196, 4096, 2, {"ep": 8}, **EVEN),
    nemo("0.5", "Qwen3-30B-A3B", 32, 154, 3201, 4096, 2, {"ep": 8, "pp": 2}, **EVEN, **ahead(16)),
    nemo("0.5", "Qwen3-235B-A22B", 128, 431, 5700, 8192, 16, Q235, **Q235_STEP),
    nemo("0.5", "Qwen3-235B-A22B", 256, 203, 5707, 8192, 8, Q235_AHEAD, **Q235_STEP, **ahead(128)),
    nemo("0.5", "DeepSeek-V3", 256, 134, 744, 1536, 32, V3, **V3_STEP),
    nemo("0.5", "DeepSeek-V3", 512, 64.9, 738, 1536, 32, V3, **V3_STEP, **ahead(256)),
    nemo("0.6", "Qwen3-30B-A3B", 32, 192, 3203, 4096, 2, {"ep": 8}, **EVEN),
    nemo("0.6", "Qwen3-30B-A3B", 32, 152, 3201, 4096, 2, {"ep": 8, "pp": 2}, **EVEN, **ahead(16)),
    nemo("0.6", "Qwen3-30B-A3B", 192, 34.5, 3206, 4096, 2, {"ep": 8}, **EVEN, **ahead(128), steps_ahead=8),
    nemo("0.6", "Qwen3-235B-A22B", 128, 395, 5698, 8192, 16, Q235, **Q235_STEP),
    nemo("0.6", "Qwen3-235B-A22B", 256, 312, 5713, 8192, 16, Q235, **Q235_STEP),
    nemo("0.6", "Qwen3-235B-A22B", 256, 231, 5721, 8192, 8, Q235_AHEAD, **Q235_STEP, **ahead(128)),
    nemo("0.6", "DeepSeek-V3", 256, 134, 701, 1536, 32, V3, **V3_STEP),
    nemo("0.6", "DeepSeek-V3", 512, 111, 697, 1536, 32, {"ep": 32, "pp": 16}, **V3_STEP),
    nemo("0.6", "DeepSeek-V3", 512, 64.1, 710, 1536, 32, V3, **V3_STEP, **ahead(256)),
    verl(32, 790.1),
    verl(64, 365.3),
    verl(128, 356.3),
    verl(32, 294.8, 16),
    verl(64, 189.3, 32),
    verl(128, 150.6, 64),
    verl_one_off(749),
    verl_one_off(520, **ahead(12)),
    areal("Qwen2.5-1.5B", 8, 240, 250),
    areal("Qwen2.5-1.5B", 32, 69, 250),
    areal("Qwen2.5-1.5B", 128, 27, 250),
    areal("Qwen2.5-7B", 32, 252, 400),
    areal("Qwen2.5-7B", 128, 90, 400),
    Row(
        "verl and MindSpeed, 671B", VERL_671, "DeepSeek-V3-671B", "910C", 256, (512, 16), (77.8, 1576.6), 2048, 859.7,
        rollout_tp=16, learn={"tp": 8, "pp": 8, "ep": 32}, scores=("reference",), per_node=16, sigma=0.3, folds=True,
        between="hccs", assumed="512 prompts of 16 (from its tokens/s), tp 8, pp 8, ep 32",
    ),
    mindspeed("Qwen2.5-7B", "910C", 16, (32, 8), 2048, 2048, 220, 4, {"tp": 4}, 1024, micro=4096, is_padded=True),
    mindspeed("Qwen3-8B", "910C", 16, (32, 8), 2048, 8192, 252, 1, {"tp": 2, "pp": 2}, 1024, micro=10_240,
              is_padded=True),
    mindspeed("Qwen2.5-32B", "910C", 16, (64, 16), 1024, 2048, 220, 4, {"tp": 4, "pp": 4}, 64, micro=2458),
    mindspeed("Qwen2.5-32B", "910B", 16, (64, 16), 1024, 1024, 100, 2, {"tp": 4, "pp": 4}, 64, micro=1434),
    mindspeed("DeepSeek-R1", "910C", 384, (384, 32), 1024, 2048, 210, 2, R1, 2048, micro=4096, rollout_dp=32),
)  # fmt: skip


class Published(TimeModel):
    """The model of time for another system's layout: what it does otherwise than ours, and nothing else."""

    def __init__(self, row: Row, config: Config, machines: hardware.Machines) -> None:
        super().__init__(config, machines)
        self.row = row

    def cache_capacity(self) -> float:
        """As much as 85 % of the engine's memory leaves beside its weights."""
        grid, have = self.engine_grid, 0.85 * self.machines.sheet.memory_bytes
        weights = self.shape.total * self.width / (grid.tp * grid.dp)
        token = features.cache_bytes(self.shape, self.width, grid.tp)
        return grid.dp * max(0.1 * have, have - weights) / token

    def ranks_of(self, name: str) -> list[int]:
        if name == "ep" and self.row.folds:
            return list(range(min(self.config.learn.parallel.ep, self.machines.devices)))
        return super().ranks_of(name)

    def passes(
        self, prompts: Sequence[float], responses: Sequence[Sequence[float]], trains: bool = True
    ) -> list[features.Pass]:
        if self.row.is_padded:
            prompts = [self.config.data.max_prompt_tokens] * len(prompts)
            responses = [[self.row.longest] * len(group) for group in responses]
        return super().passes(prompts, responses, trains)

    def _gather_s(self, trains: bool) -> float:
        """Megatron keeps a rank's weights whole, and only its optimizer in shares."""
        return 0.0 if self.row.folds else super()._gather_s(trains)

    @cached_property
    def update_s(self) -> float:
        spent = super().update_s
        if self.row.folds:
            held = self.shape.total / (self.config.learn.parallel.tp * self.config.learn.parallel.pp)
            held /= self.config.learn.parallel.ep if self.shape.experts else 1
            spent += 3 * links.all_gather_s(self.machines.topology, self.ranks_of("fsdp"), held * self.width)
        return spent


def predicted(row: Row) -> dict[str, Any]:
    learners = row.learners or row.devices
    sizes = {name: row.learn.get(name, 1) for name in ("tp", "pp", "cp", "ep")}
    teams = learners // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    shards = row.shards or teams
    prompt, response = row.lengths
    plain: dict[str, Any] = {
        "model": {"path": row.model, "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": row.longest_prompt or max(1, round(prompt * 2))},
        "rollout": {
            "max_new_tokens": row.longest,
            "tp": row.rollout_tp,
            "dp": row.rollout_dp,
            "concurrent": row.at_once,
        },
        "train": {
            "prompts_per_step": row.samples[0],
            "samples_per_prompt": row.samples[1],
            "updates_per_step": row.updates,
            "tokens_per_microbatch": row.micro or max(8192, row.longest),
        },
        "algorithm": {
            "name": "grpo",
            "old_logprobs": "recompute" if "old" in row.scores else "rollout",
            "kl": {"coef": 0.01 if "reference" in row.scores else 0.0},
        },
        "learn": {
            "recompute": row.recompute,
            "share_prompts": False,
            "parallel": {**sizes, "fsdp": shards, "replicate": teams // shards},
        },
        "flow": {"schedule": row.schedule, **({"max_staleness": row.steps_ahead} if row.schedule == "async" else {})},
        "cluster": {
            "executor": "ray",
            "rollouts": max(1, (row.devices - row.learners) // row.rollout_tp // row.rollout_dp),
            "placement": {"rollout": "separated" if row.learners else "colocated"},
        },
    }
    nodes = -(-row.devices // row.per_node)
    machines = hardware.cluster_of(row.device, nodes, min(row.per_node, row.devices), row.between)
    model = Published(row, Config.model_validate(plain), machines)
    step = step_estimate.estimate(model, Lengths(prompt, response, row.longest, row.sigma))
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


ALIKE = ("system", "model", "device", "samples", "longest")  # of two layouts that are compared


def orders(found: Sequence[dict[str, Any]], rows: Sequence[Row] = ROWS) -> list[dict[str, Any]]:
    """Of two layouts that one system published for one model: is the faster one the one that is predicted so?"""
    pairs = []
    for (one, a), (other, b) in combinations(zip(rows, found, strict=True), 2):
        if any(getattr(one, key) != getattr(other, key) for key in ALIKE):
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
