"""A trained reward model as a reward: the same number as where it was trained, batched, in the samples' order."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tidemill
from tidemill.check import precheck
from tidemill.errors import ConfigError
from tidemill.flow.feed import given_rows
from tidemill.learn import checkpoint
from tidemill.learn.rows.packing import pack
from tidemill.learn.values.model import ValueModel, values_at
from tidemill.models.attention.contexts import KINDS
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Rewards
from tidemill.reward.api import Sample, batched
from tidemill.reward.score import Scorer
from tidemill.reward.verifiers.model import LoadedRewardModel
from tidemill.run import trained

SHAPE = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64, "window": 32}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward-model")
    tidemill.train(
        {
            "folder": str(folder),
            "name": "run",
            "threads": 1,
            "model": {"tiny": {**SHAPE, "alphabet": "01234567="}},
            "data": {"source": "reversal", "args": {"pairs": True}, "max_prompt_tokens": 8},
            "rollout": {"max_new_tokens": 8},
            "algorithm": "reward_model",
            "train": {"steps": 3, "prompts_per_step": 8, "samples_per_prompt": 1},
            "learn": {"lr": 1e-2},
            "eval": {"before": False, "after": False},
            "observe": {"tensorboard": False},
        }
    )
    trained.export(folder / "run", folder / "exported")
    return folder


ROWS = [([3, 4, 5, 11], [5, 4, 3, 1]), ([3, 3, 11], [3, 1]), ([6, 7, 8, 9, 11], [9, 8, 7, 6, 1]), ([4, 11], [4, 4, 1])]


def test_it_gives_the_number_that_training_saw(run: Path) -> None:
    tensors, _ = checkpoint.load(checkpoint.latest(run / "run" / "checkpoints").path)
    policy = trained.open_trained(run / "run", "cpu").loaded.model
    value = ValueModel(policy)
    value.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    ids = np.arange(len(ROWS))
    batch = given_rows(ids, ids, 1, ROWS)
    with torch.no_grad():
        seen = values_at(value, pack(batch, torch.device("cpu"), False, KINDS["blocks"]))
    ends = np.cumsum([len(r) for _, r in ROWS]) - 1
    exported = LoadedRewardModel(str(run / "exported"))
    for budget in (1, 12, 1000):  # however it is cut, and whatever is padded
        found = exported.rewards([[*p, *r] for p, r in ROWS], budget)
        assert found == pytest.approx(seen[ends].tolist(), abs=1e-5)


def test_the_scorer_asks_once_for_all_samples_and_adds_it_with_its_weight(run: Path) -> None:
    samples = [Sample("", "", id=i, tokens=[*p, *r]) for i, (p, r) in enumerate(ROWS)]
    plain = LoadedRewardModel(str(run / "exported")).rewards([s.tokens for s in samples], 100)
    spec = {"function": "model", "weight": 2.0, "args": {"path": str(run / "exported"), "centre": 0.5}}
    with Scorer(Rewards(functions=[spec])) as scorer:
        assert [s.value for s in scorer.score(samples)] == pytest.approx([2 * (v - 0.5) for v in plain], abs=1e-5)


def test_a_missing_or_wrong_model_is_refused_before_the_run(run: Path, tmp_path) -> None:
    for path, why in ((tmp_path / "none", "does not exist"), (run / "run" / "model", "is not a reward model")):
        rewards = f"rewards.functions=[{{function: model, args: {{path: {path}}}}}]"
        with pytest.raises(ConfigError, match=why):
            precheck.check(recipe.load("cpu/grpo", [rewards]).config)


@batched
def too_few(samples):
    return [1.0]


@batched
def broken(samples):
    raise ValueError("no weights")


def test_a_batched_reward_that_fails_is_named_for_every_sample() -> None:
    for name, why in (("too_few", "1 rewards for 2 samples"), ("broken", "no weights")):
        with Scorer(Rewards(functions=[f"{__file__}:{name}"])) as scorer:
            scored = scorer.score([Sample("", "", id=1), Sample("", "", id=2)])
            assert all(why in s.error and s.value == 0.0 for s in scored)
