"""The packed learner computes what one sample at a time would, however a step is cut."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.learn.grouped import grouped
from tests.learn.plain import written_out
from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch, Column
from tidemill.errors import DataError
from tidemill.flow.feed import given_rows
from tidemill.learn.engine import Learner, score
from tidemill.learn.logprob import chunks
from tidemill.learn.logprob.tokens import reference_logprobs, token_logprobs
from tidemill.learn.optim.make import learning_rate
from tidemill.learn.rows.packing import fill, microbatches
from tidemill.models.load import make_tiny
from tidemill.recipe.config import Config, TinyModel

SHAPE = TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, window=64)
CPU = torch.device("cpu")


def config(**over: Any) -> Config:
    sections: dict[str, Any] = {"algorithm": "grpo", "train": {"tokens_per_microbatch": 4096}, **over}
    return Config.model_validate(sections)


def samples(seed: int = 0, groups: int = 5, each: int = 4) -> Batch:
    rng = np.random.default_rng(seed)
    batch = grouped(rng, groups, each, words=40, logprob=-3.0)
    reference = [-3 + rng.normal(size=n) for n in batch["mask"].lengths]
    return batch.merge({"ref_logprobs": Column.jagged(reference, np.float32)})


def one_at_a_time(model: Any, batch: Batch, temperature: float = 1.0) -> list[torch.Tensor]:
    """The plain reference: transformers' own eager attention, one unpacked sample per forward pass."""
    plain_config = copy.deepcopy(model.config)
    plain = AutoModelForCausalLM.from_config(plain_config, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    found = []
    for row in range(batch.rows):
        tokens = torch.from_numpy(batch["tokens"][row].astype(np.int64))
        start = int(batch.values("prompt_length")[row])
        logits = plain(tokens[None]).logits[0] / temperature
        found.append(logits.log_softmax(-1)[start - 1 : -1].gather(1, tokens[start:, None])[:, 0])
    return found


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_one_sample_at_a_time(share: bool, temperature: float) -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    settings = config(
        learn={"share_prompts": share}, rollout={"temperature": temperature}, train={"tokens_per_microbatch": 60}
    )
    packed = score(model, batch, settings)
    with torch.no_grad():
        plain = one_at_a_time(model, batch, temperature)
    for row in range(batch.rows):
        np.testing.assert_allclose(packed[row], plain[row].numpy(), atol=1e-5)


def gradients(batch: Batch, settings: Config) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    learner = Learner(model, settings, get(settings.algorithm.name), 1)
    learner.accumulate(batch)
    divisor = learner._whole
    grads = {n: p.grad.clone() / divisor for n, p in model.named_parameters()}
    return grads, learner.update()


def assert_same(a: tuple[Any, Any], b: tuple[Any, Any], atol: float = 1e-6) -> None:
    for name in a[0]:
        torch.testing.assert_close(a[0][name], b[0][name], atol=atol, rtol=1e-4)
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        assert a[1][name] == pytest.approx(b[1][name], abs=2e-5, rel=1e-4), name


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "group_mean", "constant"])
def test_a_step_means_the_same_however_it_is_cut(aggregation: str) -> None:
    def cut(tokens: int, share: bool) -> Config:
        return config(
            algorithm={"name": "grpo", "aggregation": aggregation, "kl": {"coef": 0.1}, "entropy_coef": 0.01},
            train={"tokens_per_microbatch": tokens},
            learn={"share_prompts": share},
        )

    whole = gradients(samples(), cut(100_000, False))
    for tokens, share in ((40, False), (40, True), (25, True), (100_000, True)):
        assert_same(whole, gradients(samples(), cut(tokens, share)))


def test_the_order_of_samples_and_groups_changes_nothing() -> None:
    batch = samples()
    shuffled = batch.gather(np.random.default_rng(1).permutation(batch.rows))
    settings = config(train={"tokens_per_microbatch": 50})
    assert_same(gradients(batch, settings), gradients(shuffled, settings))


def test_gradients_added_over_several_batches_equal_those_of_one() -> None:
    batch, settings = samples(), config()
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    learner = Learner(model, settings, get("grpo"), 1)
    for part in (np.arange(8), np.arange(8, 20)):
        learner.accumulate(batch.gather(part))
    grads = {n: p.grad.clone() / learner._whole for n, p in model.named_parameters()}
    assert_same((grads, learner.update()), gradients(batch, settings))


def test_recompute_changes_nothing_but_memory() -> None:
    assert_same(gradients(samples(), config()), gradients(samples(), config(learn={"recompute": "full"})))


def test_the_gradient_equals_that_of_the_plain_model() -> None:
    """Of the GRPO loss written out over unpacked samples, through transformers' own attention."""
    batch, settings = samples(), config(algorithm={"name": "grpo", "aggregation": "sample_mean"})
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    loss, wanted = written_out(model, batch)
    grads, metrics = gradients(batch, settings)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-5, rtol=1e-4)


def test_with_learning_rate_zero_every_ratio_is_one_and_nothing_is_clipped() -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    settings = config(learn={"lr": 0.0}, train={"tokens_per_microbatch": 50})
    batch = batch.merge({"logprobs": score(model, batch, settings)})
    learner = Learner(model, settings, get("grpo"), 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        learner.accumulate(batch)
        metrics = learner.update()
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["ratio_min"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["clip_share_low"] == metrics["clip_share_high"] == 0
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    learner = Learner(model, config(learn={"lr": 1e-2}), get("grpo"), 1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.accumulate(batch.merge({"advantages": np.full(batch.rows, np.nan, np.float32)}))
    metrics = learner.update()
    assert metrics["skipped_updates"] == metrics["not_finite_loss"] == 1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_skipped_update_tells_in_which_layer_its_gradient_broke() -> None:
    model, batch = make_tiny(SHAPE.model_copy(update={"layers": 3}), torch.float32, 0, CPU).model, samples()
    learner = Learner(model, config(learn={"lr": 1e-2}), get("grpo"), 1)
    broken = model.model.layers[1].self_attn.o_proj.weight
    handle = broken.register_hook(lambda grad: grad * float("inf"))
    learner.accumulate(batch)
    metrics = learner.update()
    handle.remove()
    assert (metrics["not_finite_tensors"], metrics["not_finite_layer"], metrics["not_finite_loss"]) == (1, 1, 0)
    assert metrics["learned_tensors"] == len(list(model.parameters()))
    learner.accumulate(batch)
    assert "not_finite_tensors" not in learner.update()


def test_a_restored_learner_goes_on_as_if_it_had_never_stopped() -> None:
    settings, parts = config(learn={"lr": 1e-2}), [samples(s) for s in range(4)]
    learner = Learner(make_tiny(SHAPE, torch.float32, 0, CPU).model, settings, get("grpo"), 4)
    other = Learner(make_tiny(SHAPE, torch.float32, 9, CPU).model, settings, get("grpo"), 4)
    for i, part in enumerate(parts):
        learner.accumulate(part)
        learner.update()
        if i == 1:
            tensors, state = learner.state()
            other.restore({k: v.clone() for k, v in tensors.items()}, state)
        elif i > 1:
            other.accumulate(part)
            other.update()
    for (name, a), (_, b) in zip(learner.model.named_parameters(), other.model.named_parameters()):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("by_words", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_chunked_logprobs_and_entropy_equal_the_plain_form(
    chunk: int, softcap: float | None, by_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "WORDS", 2)  # so that 13 words are more than one chunk
    torch.manual_seed(0)
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (10,))

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        logits = hidden @ head.T + bias
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logp = (logits / 0.7).float().log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    weights = torch.randn(2, 10)
    results = []
    for form in (
        lambda: token_logprobs(
            hidden, head, targets, temperature=0.7, softcap=softcap, bias=bias, chunk=chunk, by_words=by_words
        ),
        plain,
    ):
        hidden.grad = head.grad = bias.grad = None
        logprobs, entropy = form()
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad.clone(), head.grad.clone(), bias.grad.clone()))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-5, rtol=1e-5)


def test_all_tokens_have_as_many_logits_at_once_as_a_chunk_of_them_has_with_all_words() -> None:
    assert chunks.words_at_once(tokens=500, words=151_936, chunk=1024) == 151_936
    some = chunks.words_at_once(tokens=10_922, words=151_936, chunk=1024)
    assert some % chunks.WORDS == 0 and 0.95 < some * 10_922 / (1024 * 151_936) <= 1
    assert chunks.words_at_once(tokens=10**6, words=1000, chunk=1) == chunks.WORDS


def test_the_plain_twin_of_the_chunked_logprobs_is_the_same_function() -> None:
    hidden, head, targets = torch.randn(5, 4), torch.randn(7, 4), torch.randint(0, 7, (5,))
    for ours, theirs in zip(token_logprobs(hidden, head, targets), reference_logprobs(hidden, head, targets)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("share", [False, True])
def test_microbatches_hold_every_sample_once_within_the_budget(share: bool) -> None:
    batch = samples(groups=20)
    parts = microbatches(batch, 50, share)
    assert sorted(np.concatenate(parts).tolist()) == list(range(batch.rows))
    for rows in parts:
        part = batch.gather(rows)
        total = part["tokens"].lengths.sum()
        if share:
            _, first = np.unique(part.values("group"), return_index=True)
            prompts = part.values("prompt_length")
            total += prompts[first].sum() - prompts.sum()
        assert total <= 50 or len(np.unique(part.values("group"))) == 1


@pytest.mark.parametrize("attention", ["blocks", "auto"])
def test_a_sample_without_a_response_changes_no_other(attention: str) -> None:
    pairs = [([3, 4, 5], [6, 7]), ([3, 4, 5], []), ([8], []), ([8], [5, 4, 4]), ([8], [9])]
    batch = given_rows(np.arange(5), np.array([0, 0, 1, 1, 1]), 0, pairs)
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    shared, alone = (
        score(model, batch, config(learn={"share_prompts": share, "attention": attention})) for share in (True, False)
    )
    np.testing.assert_allclose(shared.values, alone.values, atol=1e-5)
    assert [len(row) for row in shared] == [2, 0, 0, 3, 1]


def test_a_unit_over_the_budget_parts_none_of_the_others() -> None:
    """A pair may be twice as long as the longest sample, which alone is sure to fit."""
    bins = fill([(60, [0]), *((10, [row]) for row in range(1, 41))], 50)
    assert sorted(row for _, rows in bins for row in rows) == list(range(41))
    assert all(tokens <= 50 for tokens, rows in bins if rows != [0])
    assert len(bins) <= 10  # 9 would be the fewest


class TeachesAll:
    """Any algorithm, with the backward pass of every row."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def teaches(self, batch: Batch, config: Config) -> Any:
        return np.ones(batch.rows, np.bool_)


def backward_rows(learner: Learner, batch: Batch) -> list[int]:
    """How many rows each backward pass of one accumulation went through."""
    rows: list[int] = []
    plain = learner._loss_of

    def counted(part: Batch, *given: Any) -> Any:
        loss, stats = plain(part, *given)
        if loss.requires_grad:
            rows.append(part.rows)
        return loss, stats

    learner._loss_of = counted  # type: ignore[method-assign]
    learner.accumulate(batch)
    return rows


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_groups_without_advantage_are_spared_the_backward_pass_and_change_nothing(name: str) -> None:
    batch = Batch({n: c for n, c in samples().items() if n != "ref_logprobs"})
    advantages = batch.values("advantages").copy()
    advantages[np.isin(batch.values("group"), [1, 3])] = 0.0
    advantages[0] = 0.0  # its group teaches all the same
    batch = batch.merge({"advantages": Column(advantages)})
    settings = config(algorithm=name)
    measured, weights = [], []
    for algorithm in (get(name), TeachesAll(get(name))):
        model = make_tiny(SHAPE, torch.float32, 0, CPU).model
        learner = Learner(model, settings, algorithm, 10)  # type: ignore[arg-type]
        rows = backward_rows(learner, batch)
        measured.append(learner.update())
        weights.append([p.detach().clone() for p in model.parameters()])
        assert sum(rows) == (20 if isinstance(algorithm, TeachesAll) else 12)
    assert measured[0] == pytest.approx(measured[1], abs=1e-5)
    for fast, plain in zip(*weights):
        torch.testing.assert_close(fast, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "extra", [{"entropy_coef": 0.01}, {"kl": {"coef": 0.1}}, {"covariance": {"mode": "kl"}}], ids=str
)
def test_another_term_in_the_loss_teaches_every_row(extra: dict[str, Any]) -> None:
    batch = samples().merge({"advantages": Column(np.zeros(20, np.float32))})
    settings = config(algorithm={"name": "grpo", **extra})
    assert get("grpo").teaches(batch, settings).all()


def test_an_update_in_which_nothing_teaches_lets_the_moments_decay() -> None:
    batch = samples().merge({"advantages": Column(np.zeros(20, np.float32))})
    batch = Batch({n: c for n, c in batch.items() if n != "ref_logprobs"})
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    learner = Learner(model, config(), get("grpo"), 10)
    assert backward_rows(learner, batch) == []
    learner.update()
    assert all(p in learner.optimizer.state for p in model.parameters())


@pytest.mark.parametrize("place", [0, -1])
def test_a_group_whose_prompts_differ_is_refused_where_prompts_are_shared(place: int) -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples(groups=2, each=3)
    tokens = [batch["tokens"][row].copy() for row in range(batch.rows)]
    tokens[1][0 if place == 0 else int(batch.values("prompt_length")[1]) - 1] += 1
    batch = batch.merge({"tokens": Column.jagged(tokens, np.int32)})
    with pytest.raises(DataError, match="different prompts"):
        score(model, batch, config(learn={"share_prompts": True}))
    assert len(score(model, batch, config(learn={"share_prompts": False})).values)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 5, 10])
def test_a_learning_rate_is_never_below_zero_nor_above_its_most(schedule: str, warmup: int) -> None:
    learn = config(learn={"lr": 0.5, "schedule": schedule, "warmup_steps": warmup}).learn
    rates = [learning_rate(learn, update, 5) for update in range(9)]  # a warm-up may be longer than the run
    assert min(rates) >= 0 and max(rates) <= 0.5
    assert rates[: min(warmup, 5)] == sorted(rates[: min(warmup, 5)])
