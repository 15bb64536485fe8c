"""The section `algorithm`: settings of the loss and of advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tidemill.errors import ConfigError
from tidemill.imports import is_import_path, load, named
from tidemill.recipe.section import ParallelSettings, Rows, Section

PLUGINS = "tidemill.algorithms"  # `algorithm.name` names a file in it


class KL(Section):
    coef: float = Field(
        0.0, ge=0, description="weight of the divergence from the frozen reference; 0: no reference model"
    )
    estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        "k3", description="k1: log ratio, k2: half its square, k3: unbiased and positive, abs: its absolute value"
    )
    place: Literal["loss", "reward"] = Field("loss", description="in the loss, or subtracted from the reward")
    clamp_log_ratio: float | None = Field(
        None, gt=0, description="bound on the log ratio inside the estimator; none: no bound"
    )
    clamp: float | None = Field(None, gt=0, description="bound on the estimate itself; none: no bound")
    target: float | None = Field(
        None, gt=0, description="divergence that an adaptive coef aims at; none: coef is fixed"
    )
    horizon: int = Field(10000, ge=1, description="samples over which the adaptive coef adjusts")
    reset_every: int = Field(0, ge=0, description="steps after which the reference becomes the policy; 0: never")
    parallel: ParallelSettings | None = Field(
        None, description="how the reference is cut over the learner's ranks; none: like the learner"
    )
    weights: Literal["same", "int8", "fp8"] = Field(
        "same", description="of the reference's layers: the policy's dtype, or 8 bits with a scale per row"
    )


class Critic(Section):
    """PPO's value model, and how its values become advantages."""

    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards")
    lam: float = Field(0.95, ge=0, le=1, description="λ of generalised advantage estimation, for the policy")
    value_lam: float | None = Field(None, ge=0, le=1, description="λ of the critic's targets; none: lam")
    length_alpha: float | None = Field(
        None, gt=0, description="length-adaptive λ = 1 - 1/(this · tokens of the response); none: lam for all"
    )
    value_clip: float | None = Field(0.2, gt=0, description="largest change of a value in one step; none: no bound")
    value_coef: float = Field(0.5, ge=0, description="factor of the critic's squared error")
    whiten: bool = Field(True, description="normalise a step's advantages to mean 0 and standard deviation 1")
    warmup_steps: int = Field(0, ge=0, description="steps in which only the critic learns")
    passes: int | None = Field(
        None, ge=1, description="times the critic learns from each sample; none: train.passes_per_step"
    )
    trunk: Literal["own", "shared"] = Field(
        "own", description="the critic's decoder: a copy that is trained, or the policy's own with only a head trained"
    )
    lr: float | None = Field(None, ge=0, le=10, description="the critic's learning rate; none: learn.lr")
    parallel: ParallelSettings | None = Field(
        None, description="how the critic is cut over the learner's ranks; none: like the learner"
    )


class Preference(Section):
    """Learning from preference pairs or rated responses."""

    beta: float = Field(0.1, gt=0, description="inverse temperature of the implied reward")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of pairs assumed to be mislabelled")
    margin: float = Field(0.0, description="margin by which a chosen response must win (SimPO's γ)")
    sft_coef: float = Field(0.0, ge=0, description="weight of imitating the chosen response")
    good_weight: float = Field(1.0, ge=0, description="weight of good responses (KTO)")
    bad_weight: float = Field(1.0, ge=0, description="weight of bad responses (KTO)")
    centre_coef: float = Field(0.0, ge=0, description="how strongly a reward model's outputs are pulled towards 0")


class Credit(Section):
    """Which turns of a conversation are learned with which of its rewards."""

    by: Literal["trajectory", "turn"] = Field(
        "trajectory", description="all tokens share the sample's advantage, or each turn has one of its own"
    )
    discount: float = Field(
        1.0, ge=0, le=1, description="by turn: factor per turn on later rewards; 0: a turn's own reward alone"
    )
    baseline: Literal["turn", "group"] = Field(
        "turn", description="by turn, what a return is compared with: the same turn of the group's others, or all turns"
    )


class Overlong(Section):
    """How responses near the length limit are treated."""

    buffer: int = Field(0, ge=0, description="last tokens before max_new_tokens over which the penalty grows; 0: none")
    penalty: float = Field(1.0, ge=0, description="penalty at full length, subtracted from the reward")
    drop_truncated: bool = Field(False, description="do not learn from responses that were cut off at the length limit")


class Covariance(Section):
    """Restraining the few tokens that collapse entropy (clip-cov and KL-cov)."""

    mode: Literal["none", "clip", "kl"] = Field(
        "none", description="detach these tokens, or restrain them by a KL penalty"
    )
    share: float = Field(2e-4, gt=0, lt=1, description="share of tokens restrained")
    low: float = Field(1.0, description="clip: smallest covariance of a token that may be restrained")
    high: float = Field(5.0, description="clip: largest such covariance")
    kl_coef: float = Field(1.0, ge=0, description="kl: weight of the penalty")


class Replay(Section):
    """Learning from samples many times, of algorithms with a network that judges actions (sac, dqn)."""

    capacity: int = Field(100_000, ge=1, description="decisions kept in the dock, the newest")
    begin: int = Field(1_000, ge=0, description="decisions made before learning begins, drawn evenly")
    updates: Rows = Field(16, description="gradient steps in each step of the run, of learn.minibatch decisions each")
    follow: float = Field(
        0.005,
        gt=0,
        le=1,
        description="how far target networks move after each of them (τ)",
    )
    explore: tuple[float, float, int] = Field(
        (1.0, 0.05, 10_000), description="dqn: share of random moves at first, in the end, and decisions in between"
    )
    entropy: float | None = Field(None, description="sac: entropy aimed at; none: minus the number of dimensions")


class AlgorithmSettings(Section):
    """Settings that several algorithms share. Where a paper differs, its algorithm's file says so (`paper`)."""

    name: str = Field("grpo", description="one of the files in algorithms/, or package.module:name")
    clip_low: float = Field(0.2, ge=0, description="ratio may fall to 1 - this before it is clipped")
    clip_high: float = Field(0.2, ge=0, description="ratio may rise to 1 + this before it is clipped")
    dual_clip: float | None = Field(None, gt=1, description="bound on the loss of negative advantages; none: no bound")
    ratio_cap: float | None = Field(None, gt=1, description="bound on the unclipped ratio itself; none: no bound")
    baseline: Literal["mean", "leave_one_out", "none"] = Field(
        "mean", description="subtracted from each reward: its group's mean, the mean of the others, or nothing"
    )
    advantage_scale: Literal["std", "batch_std", "none"] = Field(
        "std", description="divide advantages by the standard deviation of their group, or of the whole step"
    )
    std_bias: Literal["sample", "population"] = Field("sample", description="n-1 or n in the standard deviation")
    std_eps: float = Field(1e-4, ge=0, description="added to the standard deviation")
    group_of_one: Literal["zero", "reward"] = Field(
        "zero", description="advantage of a sample that is alone in its group"
    )
    aggregation: Literal["token_mean", "sample_mean", "group_mean", "constant"] = Field(
        "token_mean", description="what the loss is averaged over"
    )
    constant_length: int | None = Field(
        None, ge=1, description="divisor of aggregation constant; none: rollout.max_new_tokens"
    )
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout",
        description="the old policy's log-probabilities: the rollout engine's own, or computed again by the learner",
    )
    rollout_correction: Literal["none", "token", "sequence"] = Field(
        "none", description="importance weight for the gap between rollout and recomputed old log-probabilities"
    )
    rollout_correction_cap: float = Field(2.0, gt=0, description="largest weight of rollout_correction")
    rollout_correction_floor: float = Field(
        0.0, ge=0, description="smallest weight of rollout_correction that is not masked"
    )
    rollout_correction_outside: Literal["truncate", "mask"] = Field(
        "truncate",
        description="weights above the cap: set to the cap, or masked (as are those below the floor)",
    )
    dynamic_sampling: bool = Field(
        False, description="drop groups whose rewards are all equal, and replace them by new prompts"
    )
    dynamic_sampling_rounds: int = Field(
        8, ge=0, description="most prompts tried in place of dropped groups, as a multiple of prompts_per_step"
    )
    keep_best: int | None = Field(
        None, ge=1, description="rejection sampling: best responses kept of each group; none: all correct ones"
    )
    teacher: str | None = Field(None, description="model folder whose log-probabilities distillation learns from")
    kl: KL = KL()
    critic: Critic = Critic()
    preference: Preference = Preference()
    credit: Credit = Credit()
    replay: Replay = Replay()
    overlong: Overlong = Overlong()
    covariance: Covariance = Covariance()

    @model_validator(mode="before")
    @classmethod
    def _paper_defaults(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        paper = paper_defaults(str(value.get("name", cls.model_fields["name"].default)))
        merged = {**paper, **value}
        for key, own in paper.items():
            if isinstance(own, dict) and isinstance(value.get(key), dict):
                merged[key] = {**own, **value[key]}
        return merged


def paper_defaults(name: str) -> Mapping[str, Any]:
    """Apply the algorithm's `paper` settings under the recipe's own keys. An unknown name is refused later, by the
    checks."""
    try:
        found = load(name, ConfigError, "algorithm.name") if is_import_path(name) else named(PLUGINS, name)
    except ConfigError:
        return {}
    own: Mapping[str, Any] = getattr(found, "paper", {})
    return own
