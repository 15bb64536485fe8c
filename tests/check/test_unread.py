"""Settings that nothing reads in the chosen mode are said, and numbers have bounds with a reason."""

from __future__ import annotations

import pytest

from tidemill.check import rules
from tidemill.errors import ConfigError
from tidemill.recipe import load as recipe


def told(*overrides: str) -> str:
    return "\n".join(rules.unread(recipe.load({}, overrides).config))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.rollouts=3", "nothing reads cluster.rollouts=3: cluster.executor is local"),
        ("cluster.executor=processes & cluster.cpus=2", "cluster.cpus=2.0: only cluster.executor=ray reads it"),
        ("flow.max_staleness=3", "flow.schedule is sync"),
        ("learn.lora_alpha=8", "learn.lora_rank is 0"),
        ("rollout.vllm.sleep_level=2", "rollout.vllm.sleep_level=2: rollout.engine is native"),
        ("learn.mindspore.processes=2", "learn.backend is torch"),
        ("learn.backend=mindspore & learn.compile=on", "learn.compile=on: learn.backend is mindspore"),
        ("algorithm.critic.lam=0.5", "algorithm.critic.lam=0.5: grpo has no critic"),
        ("algorithm.kl.estimator=k1", "there is no reference"),
        ("algorithm.constant_length=8", "algorithm.aggregation is not constant"),
    ],
)
def test_a_setting_that_nothing_reads_is_told_with_the_reason(override: str, words: str) -> None:
    assert words in told(*override.split(" & "))


@pytest.mark.parametrize(
    "override",
    [
        "algorithm=dapo",  # its paper's defaults are no changes
        "algorithm.name=ppo & algorithm.critic.lam=0.5",
        "algorithm.name=dpo & algorithm.kl.weights=int8 & algorithm.preference.beta=0.2",
        "cluster.executor=ray & cluster.rollouts=3",
        "flow.schedule=async & flow.max_staleness=3",
        "rollout.engine=vllm & rollout.vllm.sleep_level=2",
    ],
)
def test_settings_that_are_read_are_not_told(override: str) -> None:
    assert told(*override.split(" & ")) == ""


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learn.lr=inf", "a finite number from 0 to 10 (one update at a higher rate destroys"),
        ("learn.lr=11", "destroys any model"),
        ("train.prompts_per_step=100000000", "a whole number from 1 to 1,000,000 (a step's rows are held in memory"),
        ("train.samples_per_prompt=100000000", "held in memory"),
        ("rollout.max_new_tokens=10000000000", "32-bit numbers"),
        ("rollout.temperature=1000", "uniform over the vocabulary"),
        ("algorithm.entropy_coef=nan", "wants a finite number"),
        ("algorithm.clip_high=.inf", "wants a finite number"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_the_reason(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe.load({}, [override])
    assert words in str(caught.value)
