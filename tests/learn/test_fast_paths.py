"""Recomputed, offloaded, compiled, 8-bit, host-side and low-rank learning against the plain learner."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F

from tests.learn.parallel.models import model as mixture
from tests.learn.plain import by_the_chain_rule
from tests.learn.test_engine import CPU, SHAPE, assert_same, config, gradients, samples
from tidemill.algorithms.shared.registry import get
from tidemill.errors import ModelError
from tidemill.learn import layers
from tidemill.learn.engine import Learner, freeze, score
from tidemill.learn.layers import compile_layers
from tidemill.learn.optim.adam import Adam, _encode, decode, stochastic_bfloat16
from tidemill.learn.optim.muon import Muon, orthogonal
from tidemill.learn.optim.pinned import Pinned
from tidemill.models import lora, parts
from tidemill.models.attention.packed import Packed
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.attention.varlen import FlashPacked, FlashShared, Spans
from tidemill.models.load import make_tiny
from tidemill.recipe.config import TinyModel
from tidemill.rollout import hf
from tidemill.rollout.native.forward.runner import PlainRunner

GROUPS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.mark.parametrize(
    "learn",
    [
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
        {"recompute": "mlp"},
        {"recompute": "selective"},
        {"offload": "activations"},
        {"master": "float32"},
    ],
)
def test_memory_saved_changes_no_gradient(learn: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "OFFLOAD_BYTES", 0)
    learner = Learner(make_tiny(SHAPE, torch.float32, 0, CPU).model, config(learn=learn), get("grpo"), 1)
    learner.accumulate(samples())
    found = {n: learner.gradients.of(p) / learner._whole for n, p in learner.model.named_parameters()}
    assert_same((found, learner.update()), gradients(samples(), config()))


def kept_bytes(learn: dict[str, Any], tokens: int = 512) -> int:
    """What one forward pass leaves for the backward pass, weights not counted."""
    shape = TinyModel(hidden=64, layers=4, heads=4, kv_heads=2, intermediate=192, window=tokens)
    model = make_tiny(shape, torch.float32, 0, CPU).model
    layers.prepare(model, config(learn=learn).learn, fused=False)  # fused gates keep less by themselves
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.get_decoder()(
            input_ids=torch.ones(1, tokens, dtype=torch.int64), use_cache=False, tide=Packed([tokens], CPU)
        )
    assert out.last_hidden_state.requires_grad
    return sum(size for at, size in kept.items() if at not in weights)


def served_in_training(made: Any) -> bool:
    """Whether a layer is in training mode while the model serves rollout."""
    seen: list[bool] = []
    hook = parts.layers_of(made)[1].register_forward_pre_hook(lambda m, _: seen.append(m.training))
    at = torch.arange(3)
    with torch.no_grad():
        PlainRunner(made).forward(at, at, Packed([3], CPU), None)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("engine", ["none", "hf", "native"])
def test_recomputed_layers_neither_drop_nor_shake_anything(engine: str) -> None:
    """transformers recomputes in training mode, in which some models draw dropout or a router's noise."""
    found = []
    for recompute in ("none", "full"):
        made = mixture("mixtral", router_jitter_noise=0.5, attention_dropout=0.5)
        learner = Learner(made, config(learn={"recompute": recompute}), get("grpo"), 1)
        if engine == "hf":  # whose own mode is another; afterwards all is as before
            with hf._plain(made):
                assert not any(m.training for m in made.modules())
        if engine == "native":
            assert not served_in_training(made)
        assert any(m.training for m in parts.layers_of(made)) == (recompute == "full")
        learner.accumulate(samples())
        found.append(({n: p.grad / learner._whole for n, p in made.named_parameters()}, learner.update()))
    assert_same(*found)


def test_each_kind_of_recompute_keeps_less_than_the_one_before() -> None:
    everything, selective, mlp, full = (
        kept_bytes({"recompute": kind}) for kind in ("none", "selective", "mlp", "full")
    )
    width, each = 192 * 512 * 4, 4  # bytes of one tensor of the MLP's width, layers
    assert everything - selective >= 0.9 * each * width  # what gate and up come to
    assert selective - mlp >= 1.9 * each * width  # gate and up
    assert full < mlp / 3


def test_an_undone_model_keeps_everything_again() -> None:
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    forward = model.get_decoder().layers[0].mlp.forward
    for kind in ("selective", "mlp", "full"):
        layers.prepare(model, config(learn={"recompute": kind, "compile": "on"}).learn)
        layers.undo(model)
    assert model.get_decoder().layers[0].mlp.forward == forward
    assert not model.is_gradient_checkpointing and not model.training


@pytest.mark.parametrize("learn", [{"recompute": "selective"}, {"recompute": "mlp"}, {"fp8": "rowwise"}])
def test_a_frozen_copy_does_not_follow_the_model_it_was_made_of(learn: dict[str, Any]) -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    learner = Learner(model, config(learn={"lr": 1e-2, **learn}), get("grpo"), 1)
    reference = freeze(model)
    before = score(reference, batch, config()).values
    learner.accumulate(batch)
    learner.update()
    assert (score(reference, batch, config()).values == before).all()
    assert (score(model, batch, config()).values != before).any()


def test_an_mlp_that_is_not_gated_is_refused_by_name() -> None:
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    del model.get_decoder().layers[0].mlp.gate_proj
    with pytest.raises(ModelError, match=r"selective.*Qwen3DecoderLayer"):
        layers.recompute(model, "selective")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "selective", "mlp", "full"])
def test_compiled_layers_give_the_same_gradients(kind: str) -> None:
    """Through the compiler's tracing and partitioning; the code it makes is checked on the device."""
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    try:
        compile_layers(model, backend="aot_eager_decomp_partition")
        learner = Learner(model, config(learn={"recompute": kind}), get("grpo"), 1)
        learner.accumulate(samples())
        found = {n: p.grad.clone() / learner._whole for n, p in model.named_parameters()}
        assert_same((found, learner.update()), gradients(samples(), config()))
    finally:
        layers.undo(model)


def by_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Spans, keys: Spans, form: AttentionForm
) -> torch.Tensor:
    """What the flash kernel does, for a device without it: sequences end together, a query sees what is not behind."""
    ends_q, ends_k = queries.ends[1:].long(), keys.ends[1:].long()
    at_q, at_k = torch.arange(q.shape[0]), torch.arange(k.shape[0])
    of_q, of_k = (torch.searchsorted(ends, at, right=True) for ends, at in ((ends_q, at_q), (ends_k, at_k)))
    left_q, left_k = ends_q[of_q] - at_q, ends_k[of_k] - at_k
    mask = (of_q[:, None] == of_k) & (left_k >= left_q[:, None])
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=form.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class Compiled:
    """A tiny model whose layers were traced and partitioned; counts graphs, and bytes a forward pass keeps."""

    def __init__(self, learn: dict[str, Any], is_traced: bool = True) -> None:
        self.model, self.graphs, self.learn = make_tiny(SHAPE, torch.float32, 0, CPU).model, 0, learn
        self.how = {"kernel": by_mask, "is_traced": is_traced}
        torch._dynamo.reset()

    def __enter__(self) -> Self:
        partitioned = torch._dynamo.lookup_backend("aot_eager_decomp_partition")

        def counted(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return partitioned(graph, inputs)

        layers.prepare(self.model, config(learn={**self.learn, "compile": "off"}).learn, fused=False)
        compile_layers(self.model, counted, is_thrifty=self.learn.get("recompute", "none") != "none")
        return self

    def __exit__(self, *_: Any) -> None:
        layers.undo(self.model)

    def gradients(self, lengths: list[int], share: bool) -> tuple[list[torch.Tensor], int]:
        tokens, weights, kept = sum(lengths), {p.untyped_storage().data_ptr() for p in self.model.parameters()}, {}
        first, *rest = lengths

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        if share:
            context: Any = FlashShared([first], rest, [0] * len(rest), CPU, **self.how)
        else:
            context = FlashPacked(lengths, CPU, **self.how)
        torch.manual_seed(1)
        ids, weight = torch.randint(0, 60, (1, tokens)), torch.randn(tokens, SHAPE.hidden)
        self.model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = self.model.get_decoder()(input_ids=ids, use_cache=False, tide=context).last_hidden_state
        (out[0] * weight).sum().backward()
        found = [p.grad.clone() for p in self.model.get_decoder().parameters()]
        return found, sum(size for at, size in kept.items() if at not in weights)


CUTS = [([9, 21, 3], False), ([14, 5], False), ([9, 21, 3], True), ([6, 5, 8, 2], True), ([30, 41], False)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "selective", "mlp", "full"])
def test_layers_with_attention_inside_are_one_graph_for_all_lengths_and_give_the_same_gradients(kind: str) -> None:
    with Compiled({"recompute": kind}, is_traced=False) as cut:
        wanted = [cut.gradients(lengths, share)[0] for lengths, share in CUTS]
    with Compiled({"recompute": kind}) as whole:
        for (lengths, share), plain in zip(CUTS, wanted):
            for ours, theirs in zip(whole.gradients(lengths, share)[0], plain):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert whole.graphs <= 4 < cut.graphs  # packed and shared, each with and without what the first layer need not do


@pytest.mark.slow
def test_thrifty_layers_make_the_output_of_their_norms_again() -> None:
    lengths, kept = [40, 41], {}
    for is_traced in (False, True):
        with Compiled({"recompute": "mlp"}, is_traced) as made:
            kept[is_traced] = made.gradients(lengths, share=False)[1]
    assert kept[False] - kept[True] >= 0.9 * SHAPE.layers * SHAPE.hidden * 4 * sum(lengths)


def stepped(make: Any, steps: int = 5) -> torch.Tensor:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(300))
    optimizer = make(p)
    for _ in range(steps):
        p.grad = torch.randn(300)
        optimizer.step()
    return p.detach()


def test_our_adam_is_torchs_where_both_can_do_it() -> None:
    plain = stepped(lambda p: torch.optim.AdamW([{"params": [p], "weight_decay": 0.1}], **GROUPS))
    for extra in ({}, {"master": "float32"}, {"on_host": True}):
        ours = stepped(
            lambda p, extra=extra: Adam(
                [{"params": [p], "weight_decay": 0.1}], gradient=lambda p: p.grad, **GROUPS, **extra
            )
        )
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


def test_host_tensors_lie_apart_in_few_pieces() -> None:
    arena = Pinned(least=256, most=1024, pin=False)
    wanted = [torch.randn(n) for n in (3, 50, 60, 300, 17)] + [torch.arange(5, dtype=torch.uint8)]
    made = [arena.like(x).copy_(x) for x in wanted]
    for x, y in zip(wanted, made):
        assert y.dtype == x.dtype and y.data_ptr() % 64 == 0 and torch.equal(x, y)
    assert arena.allocated == 256 + 256 + 512 + 2048  # the largest alone needs more than the largest piece


def test_eight_bit_moments_stay_near_and_never_divide_by_nothing() -> None:
    x = torch.logspace(-8, 0, 1000)
    for name, most in (("exp_avg", 0.02), ("exp_avg_sq", 0.04)):
        back = decode(_encode(name, x.clone(), "int8"), name, x.shape)
        assert ((back - x).abs() / x.max()).max() < most
    assert (decode(_encode("exp_avg_sq", x.clone(), "int8"), "exp_avg_sq", x.shape) > 0).all()


def test_moments_that_were_codes_become_the_same_codes_again() -> None:
    x = torch.logspace(-12, 0, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    for name in ("exp_avg", "exp_avg_sq"):
        codes = _encode(name, x.clone(), "int8")
        again = _encode(name, decode(codes, name, x.shape).clone(), "int8")
        assert all(torch.equal(again[key], codes[key]) for key in codes), name


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = torch.full((20_000,), 1.0 + 2**-10)  # an eighth of the way to bfloat16's next number
    rounded = stochastic_bfloat16(x, seed=1).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1.0 + 2**-10, abs=2e-4)


def test_the_runs_seed_decides_how_weights_are_rounded_by_chance() -> None:
    def learned(seed: int) -> list[torch.Tensor]:
        settings = config(seed=seed, learn={"lr": 1e-4, "master": "stochastic"})
        learner = Learner(make_tiny(SHAPE, torch.bfloat16, 0, CPU).model, settings, get("grpo"), 1)
        learner.accumulate(samples())
        learner.update()
        return list(learner.model.parameters())

    first, again, other = learned(1), learned(1), learned(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.ndim > 1)


def test_a_restored_learner_with_eight_bit_moments_goes_on_as_if_it_had_never_stopped() -> None:
    settings = config(learn={"lr": 1e-2, "moments": "int8", "optimizer_on_host": True, "lora_rank": 2})
    learner, other = (
        Learner(make_tiny(SHAPE, torch.float32, 0, CPU).model, settings, get("grpo"), 2) for _ in range(2)
    )
    learner.accumulate(samples(1))
    learner.update()
    tensors, state = learner.state()
    other.restore({k: v.clone() for k, v in tensors.items()}, state)
    for one in (learner, other):
        one.accumulate(samples(2))
        one.update()
    for (name, a), (_, b) in zip(learner.model.named_parameters(), other.model.named_parameters()):
        assert torch.equal(a, b), name


def test_low_rank_learning_moves_the_policy_and_not_its_reference() -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    before = score(model, batch, config()).values
    settings = config(learn={"lr": 1e-2, "lora_rank": 4})
    learner, reference = Learner(model, settings, get("grpo"), 1), freeze(model)
    torch.testing.assert_close(torch.from_numpy(score(model, batch, settings).values), torch.from_numpy(before))
    for _ in range(2):  # the first update moves B alone, for A's gradient is 0 where B is
        learner.accumulate(batch)
        learner.update()
    after = score(model, batch, settings).values
    assert abs(after - before).max() > 1e-3
    assert abs(score(reference, batch, settings).values - before).max() < 1e-6
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(lora.adapters(model))


@pytest.mark.parametrize("dora", [False, True])
def test_merged_adapters_are_the_adapted_model(dora: bool) -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    settings = config(learn={"lr": 1e-2, "lora_rank": 4, "dora": dora})
    learner = Learner(model, settings, get("grpo"), 1)
    learner.accumulate(batch)
    learner.update()
    plain = make_tiny(SHAPE, torch.float32, 5, CPU).model
    plain.load_state_dict(lora.merged(model), strict=False)
    ours, theirs = (torch.from_numpy(score(m, batch, settings).values) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("learn", [{}, {"recompute": "full"}, {"recompute": "selective"}, {"share_prompts": False}])
@pytest.mark.parametrize("dora", [False, True])
def test_adapter_gradients_are_the_plain_paths_by_the_chain_rule(dora: bool, learn: dict[str, Any]) -> None:
    model, batch = make_tiny(SHAPE, torch.float32, 0, CPU).model, samples()
    learner = Learner(model, config(learn={"lora_rank": 4, "dora": dora, **learn}), get("grpo"), 1)
    draw = torch.Generator().manual_seed(1)
    for p in learner.gradients.parameters:  # away from the start, where B is 0
        p.data += 0.05 * torch.randn(p.shape, generator=draw)
    plain = make_tiny(SHAPE, torch.float32, 5, CPU).model
    plain.load_state_dict(lora.merged(model), strict=False)
    wanted = gradients_of(plain, batch)
    learner.accumulate(batch)
    for name, m in model.named_modules():
        if not isinstance(m, lora.LoraLinear):
            continue
        for p, whole in by_the_chain_rule(m, wanted[f"{name}.weight"]):
            close(p.grad, whole)


def gradients_of(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    learner = Learner(model, config(), get("grpo"), 1)
    learner.accumulate(batch)
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("shape", [(8, 30), (30, 8)])
def test_muon_steps_along_the_nearest_orthogonal_matrix(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    made = orthogonal(x)
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(made.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_muon_moves_matrices_against_their_gradient_and_leaves_the_rest_to_adam() -> None:
    model = make_tiny(SHAPE, torch.float32, 0, CPU).model
    learner = Learner(model, config(learn={"lr": 1e-3, "optimizer": "muon"}), get("grpo"), 1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.accumulate(samples())
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    learner.update()
    for name, p in model.named_parameters():
        assert ((p - before[name]) * grads[name]).sum() < 0, name
    kinds = {n: set(learner.optimizer.state[p]) for n, p in model.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == {"momentum", "step"}
    assert "exp_avg" in kinds["model.embed_tokens.weight"]


def muon(p: torch.nn.Parameter, **settings: Any) -> Muon:
    return Muon(
        [{"params": [p], "weight_decay": 0.1, "is_matrix": True}], gradient=lambda p: p.grad, **GROUPS, **settings
    )


def moved_by_muon(dtype: torch.dtype, lr: float = 1e-2, steps: int = 3, **settings: Any) -> tuple[torch.Tensor, Muon]:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(12, 20).to(dtype))
    optimizer = muon(p, **settings)
    optimizer.param_groups[0]["lr"] = lr
    for _ in range(steps):
        p.grad = torch.randn(12, 20).to(dtype)
        optimizer.step()
    return p.detach().float(), optimizer


def test_muon_with_a_float32_copy_or_state_on_the_host_is_muon() -> None:
    plain, _ = moved_by_muon(torch.float32)
    for settings in ({"master": "float32"}, {"on_host": True}, {"master": "float32", "on_host": True}):
        torch.testing.assert_close(moved_by_muon(torch.float32, **settings)[0], plain, atol=1e-6, rtol=1e-5)


def test_small_steps_of_muon_are_not_lost_on_16_bit_weights_that_have_a_copy_or_are_rounded_by_chance() -> None:
    start, _ = moved_by_muon(torch.bfloat16, steps=0)
    tiny = 1e-5  # a step of 1e-5, where neighbours are 2⁻⁸ apart
    lost, _ = moved_by_muon(torch.bfloat16, lr=tiny)
    assert (lost == start).float().mean() > 0.95
    _, optimizer = moved_by_muon(torch.bfloat16, lr=tiny, master="float32")
    (state,) = optimizer.state.values()
    assert (state["master"] - start).abs().mean() > 1e-6
    rounded, _ = moved_by_muon(torch.bfloat16, lr=1e-3, master="stochastic")
    assert 0 < (rounded != start).float().mean() < 1


def test_matrices_made_orthogonal_together_are_those_made_one_by_one() -> None:
    torch.manual_seed(0)
    for shape in ((4, 6, 15), (4, 15, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(orthogonal(x), torch.stack([orthogonal(one) for one in x]), atol=1e-5, rtol=1e-5)
        near = orthogonal(x.bfloat16()).float()
        assert torch.nn.functional.cosine_similarity(near.flatten(), orthogonal(x).flatten(), dim=0) > 0.999


def test_a_recipe_with_muon_keeps_what_it_asks_for() -> None:
    settings = config(learn={"optimizer": "muon", "master": "float32", "moments": "int8", "optimizer_on_host": True})
    learner = Learner(make_tiny(SHAPE, torch.bfloat16, 0, CPU).model, settings, get("grpo"), 1)
    learner.accumulate(samples())
    learner.update()
    kept = {n: set(learner.optimizer.state[p]) for n, p in learner.model.named_parameters()}
    assert kept["model.layers.0.mlp.up_proj.weight"] == {"momentum", "step", "master"}
    assert {"exp_avg_scale", "exp_avg_sq_scale", "master"} < kept["model.embed_tokens.weight"]
    assert learner.optimizer.on_host
