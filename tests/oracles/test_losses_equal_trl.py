"""Our losses and gradients against TRL's own code, run on the same numbers. Skipped where TRL is not installed."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).parent))

from cases import LONGEST, batch_of, config_of, prepared, random_samples, tokens_of

from tidemill.algorithms.shared.advantages import group_advantages
from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch


class OneProcess:
    """What TRL asks of accelerate, for one process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def stand_in(**settings: Any) -> SimpleNamespace:
    """The attributes TRL's loss reads of its trainer."""
    common = {
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "current_gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**{**common, **settings})


def padded(samples: list[dict], name: str) -> Tensor:
    """(samples, longest) with zeros behind, carrying gradient."""
    zero = torch.zeros((), dtype=torch.float64)
    rows = [[torch.as_tensor(v, dtype=torch.float64) for v in s[name]] for s in samples]
    return torch.stack([torch.stack(row + [zero] * (LONGEST - len(row))) for row in rows])


def completions(samples: list[dict], batch: Batch) -> dict[str, Tensor]:
    """What TRL's trainers are given of a batch, whatever their loss: one prompt token, then the completion."""
    return {
        "prompt_ids": torch.zeros(len(samples), 1),
        "prompt_mask": torch.ones(len(samples), 1),
        "completion_ids": torch.zeros(len(samples), LONGEST),
        "completion_mask": padded(samples, "mask"),
        "advantages": torch.from_numpy(batch.values("advantages").astype(np.float64)),
    }


def gradients(loss: Tensor, samples: list[dict], name: str = "new") -> list[float]:
    leaves = [v for s in samples for v in s[name]]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [0.0 if g is None else float(g) for g in found]


def assert_same(ours: Tensor, theirs: Tensor, samples: list[dict], name: str = "new", rel: float = 1e-6) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=rel, abs=1e-9)
    assert gradients(ours, samples, name) == pytest.approx(gradients(theirs, samples, name), rel=rel, abs=1e-9)


GRPO_FORMS = {
    "grpo": ("grpo", {}, "token"),
    "grpo, kl": ("grpo", {"kl": {"coef": 0.07}}, "token"),
    "grpo, ratio cap": ("grpo", {"ratio_cap": 1.3}, "token"),
    "dr_grpo": ("dr_grpo", {}, "token"),
    "dapo": ("dapo", {"dynamic_sampling": False}, "token"),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.06}, "sequence"),
    "cispo": ("cispo", {"clip_high": 0.3}, "token"),
}


@pytest.mark.parametrize("form", GRPO_FORMS)
def test_policy_losses_equal_trls(form: str) -> None:
    from trl import GRPOTrainer

    name, settings, level = GRPO_FORMS[form]
    config = config_of(name, old_logprobs="recompute", **settings)
    a = config.algorithm
    samples, batch = prepared(get(name), random_samples(11), config)
    loss, _ = get(name).loss(tokens_of(samples, batch, config), config)
    mask = padded(samples, "mask")
    trainer = stand_in(
        loss_type={"gspo": "grpo"}.get(name, name),
        importance_sampling_level=level,
        beta=a.kl.coef,
        epsilon_low=a.clip_low,
        epsilon_high=1 + a.clip_high if name == "cispo" else a.clip_high,
        args=SimpleNamespace(delta=a.ratio_cap, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
    )
    new, entropy = padded(samples, "new"), padded(samples, "entropy")
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (new, entropy, None)
    inputs = {
        **completions(samples, batch),
        "old_per_token_logps": padded(samples, "old"),
        "ref_per_token_logps": padded(samples, "ref"),
        "num_items_in_batch": mask.sum(),
    }
    assert_same(loss, GRPOTrainer._compute_loss(trainer, None, inputs), samples)


def test_rloo_equals_trls() -> None:
    from trl import RLOOTrainer

    config = config_of("rloo", old_logprobs="recompute")
    samples, batch = prepared(get("rloo"), random_samples(12), config)
    loss, _ = get("rloo").loss(tokens_of(samples, batch, config), config)
    mask, new = padded(samples, "mask"), padded(samples, "new")
    trainer = stand_in(epsilon_low=0.2, epsilon_high=0.2)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (new, torch.zeros_like(new), None)
    inputs = {**completions(samples, batch), "old_logps": (padded(samples, "old") * mask).sum(1)}
    assert_same(loss, RLOOTrainer._compute_loss(trainer, None, inputs), samples)


def outputs_of(samples: list[dict], name: str) -> SimpleNamespace:
    """A model's outputs as TRL's fused head gives them, masked to the completion."""
    logprobs = padded(samples, name) * padded(samples, "mask")
    blank = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=blank, mean_logits=blank, is_top1=blank.bool())


def model_inputs(samples: list[dict]) -> dict[str, Tensor]:
    """One prompt token, then the completion."""
    mask = torch.cat([torch.zeros(len(samples), 1), padded(samples, "mask")], 1)
    return {
        "input_ids": torch.zeros_like(mask).long(),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }


def chosen_first(samples: list[dict]) -> list[dict]:
    return sorted(samples, key=lambda s: (-s["chosen"], s["group"]))


@pytest.mark.parametrize(("name", "kind"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_and_ipo_equal_trls(name: str, kind: str) -> None:
    from trl import DPOTrainer

    config = config_of(name, preference={"beta": 0.3})
    samples = chosen_first(random_samples(13, pairs=True))
    loss, _ = get(name).loss(tokens_of(samples, batch_of(samples), config), config)
    inputs = model_inputs(samples)
    reference = outputs_of(samples, "ref").log_probs.sum(1)
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference.chunk(2)
    trainer = stand_in(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=0.3,
        use_weighting=False,
    )
    theirs = DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs_of(samples, "new"), inputs, False)
    assert_same(loss, theirs, samples)


def test_kto_equals_trls() -> None:
    from trl import KTOTrainer

    config = config_of("kto", preference={"beta": 0.3, "good_weight": 1.2, "bad_weight": 0.8})
    everything = random_samples(14)
    for s in everything:
        if s["mismatched"]:
            s["ref"] = [v - 0.25 for v in s["ref"]]  # a divergence above 0, so that it counts
    samples, batch = prepared(get("kto"), everything, config)
    loss, _ = get("kto").loss(tokens_of(samples, batch, config), config)
    apart = [s for s in everything if s["mismatched"]]
    inputs = model_inputs(samples)
    inputs["label"] = torch.tensor([bool(s["chosen"]) for s in samples])
    inputs["ref_logps"] = outputs_of(samples, "ref").log_probs.sum(1)
    inputs["ref_KL_logps"] = outputs_of(apart, "ref").log_probs.sum(1)
    trainer = stand_in(
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.8,
        _compute_kl_logps=lambda model, inputs: outputs_of(apart, "old").log_probs.sum(1),
    )
    theirs = KTOTrainer._compute_loss(trainer, lambda **kwargs: outputs_of(samples, "new"), inputs, False)
    assert trainer._metrics["train"]["kl"][0] > 0
    assert_same(loss, theirs, samples)


def mean_logprobs(samples: list[dict]) -> tuple[Tensor, Tensor]:
    mask = padded(samples, "mask")
    chosen, rejected = ((padded(samples, "new") * mask).sum(1) / mask.sum(1)).chunk(2)
    return chosen, rejected


def test_simpo_equals_trls() -> None:
    from trl.experimental.cpo import CPOTrainer

    config = config_of("simpo", preference={"label_smoothing": 0.1})
    samples = chosen_first(random_samples(15, pairs=True))
    loss, _ = get("simpo").loss(tokens_of(samples, batch_of(samples), config), config)
    trainer = stand_in(alpha=0.0, loss_type="simpo", simpo_gamma=1.0, beta=2.0, label_smoothing=0.1)
    assert_same(loss, CPOTrainer.cpo_loss(trainer, *mean_logprobs(samples))[0].mean(), samples)


def test_orpo_equals_trls() -> None:
    from trl.experimental.orpo import ORPOTrainer

    config = config_of("orpo")
    samples = chosen_first(random_samples(16, pairs=True))
    loss, _ = get("orpo").loss(tokens_of(samples, batch_of(samples), config), config)
    chosen, rejected = mean_logprobs(samples)
    odds = ORPOTrainer.odds_ratio_loss(stand_in(beta=0.1), chosen, rejected)[0]
    assert_same(loss, (-chosen).mean() - odds.mean(), samples, rel=1e-5)  # TRL computes the odds in float32


def test_reward_model_loss_equals_trls() -> None:
    from trl import RewardTrainer

    config = config_of("reward_model", preference={"centre_coef": 0.02})
    samples = chosen_first(random_samples(17, pairs=True))
    loss, _ = get("reward_model").loss(tokens_of(samples, batch_of(samples), config), config)
    logits = torch.stack([s["new_values"][-1] for s in samples])[:, None]
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=0.02))
    inputs = {"attention_mask": torch.ones(len(samples), 1)}
    theirs = RewardTrainer.compute_loss(trainer, lambda **kwargs: SimpleNamespace(logits=logits), inputs)
    assert_same(loss, theirs, samples, "new_values")


def test_grpo_advantages_equal_trls_formula() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3], [2.0, -1.0, 0.5, 0.5]], dtype=torch.float64)
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    ours = group_advantages(rewards.flatten().numpy(), np.repeat([0, 1, 2], 4), std_eps=1e-4)
    assert ours == pytest.approx(theirs.flatten().numpy(), abs=1e-6)
