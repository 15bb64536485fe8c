"""Networks learn as written out by hand: in C as in torch, on one rank as on several, however a step is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch, Column
from tidemill.learn.network import NetworkLearner
from tidemill.models.network import fused
from tidemill.models.network.make import make
from tidemill.models.network.running import Running, moments
from tidemill.models.spaces import Spaces
from tidemill.recipe.config import Config

CPU = torch.device("cpu")
SPACES = {
    "gaussian": Spaces(observation=(5,), dimensions=3),
    "bounded": Spaces(observation=(5,), dimensions=3, low=(-1.0, -2.0, -1.0), high=(1.0, 2.0, 3.0)),
    "choice": Spaces(observation=(17,), choices=(4,)),
    "choices": Spaces(observation=(6,), choices=(3, 2)),
    "masked": Spaces(observation=(9,), choices=(4,), masked=True),
}


def config(spaces: Spaces, name: str = "ppo", **over: Any) -> Config:
    policy = {"kind": "mlp", "hidden": [32, 16], "spaces": spaces.plain(), "judges": get(name).judges}
    plain: dict[str, Any] = {
        "model": {"policy": {**policy, **over.pop("policy", {})}},
        "algorithm": {"name": name, "entropy_coef": 0.01, **over.pop("algorithm", {})},
        "learn": {"lr": 3e-3, "epochs": 3, "minibatch": 20, "clip_norm": 0.5, **over.pop("learn", {})},
        **over,
    }
    return Config.model_validate(plain)


def samples(cfg: Config, rows: int = 6, seed: int = 0, memory: int = 0) -> Batch:
    """Fragments of unequal lengths, made by a policy that differs a little from the one that learns."""
    rng = np.random.default_rng(seed)
    spaces = Spaces.of(cfg.model.policy.spaces)
    lengths = rng.integers(5, 15, rows)
    count = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    seen = rng.normal(size=(count, *spaces.observation)).astype(np.float32)
    if spaces.masked:
        seen[:, -spaces.choices[0] :] = rng.random((count, spaces.choices[0])) < 0.6
        seen[:, -1] = 1.0
    if spaces.choices:
        actions = np.stack([rng.integers(0, n, count) for n in spaces.choices], 1).astype(np.int32)
        if spaces.masked:
            actions[:] = spaces.choices[0] - 1
    else:
        actions = rng.normal(size=(count, spaces.dimensions)).astype(np.float32)
    columns: dict[str, Any] = {"observations": seen, "actions": actions, "mask": np.ones(count, np.uint8)}
    policy = make(cfg.model.policy, 7, CPU)
    columns["ends"] = (rng.random(count) < 0.1).astype(np.uint8)
    columns["values"], columns["advantages"] = rng.normal(size=(2, count)).astype(np.float32)
    columns["returns"] = (columns["values"] + rng.normal(size=count)).astype(np.float32)
    columns["logprobs"] = np.zeros(count, np.float32)
    jagged: dict[str, Any] = {name: Column(values, offsets) for name, values in columns.items()}
    jagged |= {"id": np.arange(rows), "group": np.arange(rows), "length": lengths.astype(np.int32)}
    if memory:
        jagged["state"] = rng.normal(size=(rows, memory)).astype(np.float32)
    batch = Batch(jagged)
    old = policy.logprobs(batch).values + rng.normal(scale=0.2, size=count)
    return batch.merge({"logprobs": Column(old.astype(np.float32), offsets)})


def learner(cfg: Config, seed: int = 1) -> NetworkLearner:
    return NetworkLearner(make(cfg.model.policy, seed, CPU), cfg, get(cfg.algorithm.name), 100)


def learned(cfg: Config, batches: list[Batch], updates: int = 2) -> tuple[NetworkLearner, dict[str, float]]:
    made = learner(cfg)
    for _ in range(updates):
        for batch in batches:
            made.accumulate(batch)
        metrics = made.update()
    return made, metrics


def weights(made: NetworkLearner) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in made.model.parameters()])


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "reinforce"])
@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_update_in_c_is_torchs(
    algorithm: str, spaces: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused._code() is None:
        pytest.skip("no C compiler")
    normalise = ["observations"] if spaces in ("gaussian", "masked") else []
    clip = {"critic": {"value_clip": 0.2 if activation == "tanh" else None}} if algorithm != "reinforce" else {}
    cfg = config(SPACES[spaces], algorithm, policy={"activation": activation, "normalise": normalise}, algorithm=clip)
    batch = samples(cfg)
    in_c, told = learned(cfg, [batch])
    monkeypatch.setattr(fused, "fits", lambda network: False)
    in_torch, plainly = learned(cfg, [batch])
    assert torch.allclose(weights(in_c), weights(in_torch), rtol=2e-4, atol=2e-5)
    assert told.keys() == plainly.keys()
    for name, value in plainly.items():
        assert told[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name
    state, other = in_c.tensors(), in_torch.tensors()
    assert state.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.allclose(state[name].double(), tensor.double(), rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("spaces", SPACES)
def test_deciding_in_c_is_torchs(spaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(SPACES[spaces], policy={"normalise": ["observations"]})
    policy, rng = make(cfg.model.policy, 3, CPU), np.random.default_rng(0)
    policy.absorb(policy.told([samples(cfg)]))
    seen = rng.normal(size=(13, *SPACES[spaces].observation)).astype(np.float32)
    if SPACES[spaces].masked:
        seen[:, -SPACES[spaces].choices[0] :] = 1.0
    noise = rng.random((13, policy.head.draws), np.float32)
    policy.serve()
    here = policy.act(seen, noise)
    monkeypatch.setattr(fused, "fits", lambda network: False)
    policy.serve()
    plain = policy.act(seen, noise)
    assert np.allclose(here.actions, plain.actions, atol=1e-5)
    assert np.allclose(here.logprobs, plain.logprobs, atol=1e-4)
    assert np.allclose(here.values, plain.values, atol=1e-5)


@pytest.mark.parametrize("head", ["gaussian", "squashed_gaussian", "auto"])
def test_what_is_drawn_has_the_logprob_that_is_learned(head: str) -> None:
    spaces = SPACES["masked"] if head == "auto" else SPACES["bounded"]
    cfg = config(spaces, policy={"head": head})
    policy, rng = make(cfg.model.policy, 3, CPU), np.random.default_rng(0)
    seen = rng.normal(size=(400, *spaces.observation)).astype(np.float32)
    if spaces.masked:
        seen[:, -4:] = rng.random((400, 4)) < 0.7
        seen[:, -2] = 1.0
    noise = (rng.random if policy.head.is_uniform else rng.standard_normal)((400, policy.head.draws), np.float32)
    acted = policy.act(seen, noise)
    steps = Batch(
        {
            "id": np.zeros(1, np.int64),
            "observations": Column(seen, np.array([0, 400])),
            "actions": Column(acted.actions, np.array([0, 400])),
        }
    )
    assert np.allclose(policy.logprobs(steps).values, acted.logprobs, atol=1e-4)
    if spaces.masked:
        assert (seen[:, -4:][np.arange(400), acted.actions[:, 0]] == 1.0).all()
    else:
        moves = policy.moves(acted.actions)
        assert (moves >= np.array(spaces.low)).all() and (moves <= np.array(spaces.high)).all()


def test_samples_in_any_order_and_any_parts_give_the_same_update() -> None:
    cfg = config(SPACES["gaussian"])
    batch = samples(cfg)
    whole, told = learned(cfg, [batch])
    parts, plain = learned(cfg, [batch.gather([4, 1]), batch.gather([0, 5, 3, 2])])
    assert torch.allclose(weights(whole), weights(parts), rtol=1e-5, atol=1e-7)
    assert told["loss"] == pytest.approx(plain["loss"], rel=1e-5)


@pytest.mark.parametrize("spaces", ["gaussian", "choices"])
def test_a_minibatch_in_pieces_is_the_same_minibatch(spaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "fits", lambda network: False)
    cfg = config(SPACES[spaces])
    batch = samples(cfg)
    whole, _ = learned(cfg, [batch])
    pieces, _ = learned(config(SPACES[spaces], train={"tokens_per_microbatch": 7}), [batch])
    assert torch.allclose(weights(whole), weights(pieces), rtol=1e-4, atol=1e-6)


def test_a_memory_learns_what_it_did_step_by_step() -> None:
    """The log-probabilities of a fragment, all at once, are those of deciding one by one from the same memory."""
    cfg = config(SPACES["choice"], policy={"kind": "gru", "hidden": [16]})
    policy = make(cfg.model.policy, 2, CPU)
    batch = samples(cfg, rows=4, memory=16)
    found = policy.logprobs(batch)
    for row in range(batch.rows):
        state = batch.values("state")[row : row + 1]
        for t, (seen, action) in enumerate(zip(batch["observations"][row], batch["actions"][row])):
            x = policy.prepared(torch.from_numpy(seen[None]))
            own = policy.trunk(x, torch.from_numpy(state))
            logprob, _ = policy.head.score(policy.out(own), torch.from_numpy(action[None]), x)
            assert logprob.item() == pytest.approx(float(found[row][t]), abs=1e-5)
            state = own.detach().numpy() * (batch["ends"][row][t] == 0)
    made, _ = learned(cfg, [batch])
    again, _ = learned(cfg, [batch.gather([2, 0]), batch.gather([3, 1])])
    assert torch.allclose(weights(made), weights(again), rtol=1e-4, atol=1e-6)


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    cfg = config(SPACES["gaussian"], learn={"epochs": 1, "minibatch": None})
    batch = samples(cfg)
    bad = batch.values("advantages").copy()
    bad[3] = np.nan
    made = learner(cfg)
    before = weights(made).clone()
    made.accumulate(batch.merge({"advantages": Column(bad, batch["advantages"].offsets)}))
    assert made.update()["skipped_updates"] == 1.0
    assert torch.equal(weights(made), before)


def test_running_statistics_are_those_of_everything_seen() -> None:
    rng = np.random.default_rng(0)
    own, seen = Running(3), [rng.normal(2.0, 5.0, (n, 3)) for n in (1, 40, 7)]
    for part in seen:
        own.absorb(moments(part))
    whole = np.concatenate(seen)
    assert np.allclose(own.mean.numpy(), whole.mean(0)) and np.allclose(own.variance.numpy(), whole.var(0))
    own.absorb(np.zeros(7))  # nothing
    assert np.allclose(own.mean.numpy(), whole.mean(0))


def test_a_checkpoint_has_statistics_and_moments(tmp_path: Any) -> None:
    cfg = config(SPACES["gaussian"], policy={"normalise": ["observations"]})
    batch = samples(cfg)
    made, _ = learned(cfg, [batch])
    made.save(tmp_path, 1, {}, keep=1)
    other = learner(cfg, seed=5)
    other.load(next(tmp_path.glob("step-*")))
    for one in (made, other):
        one.accumulate(batch)
        one.update()
    assert torch.equal(weights(made), weights(other))
    assert float(other.model.seen.count) == 3 * float(batch["actions"].lengths.sum())
