"""Decoding ahead of the host gives what decoding in step gives. Without a device, torch operations stand for the
kernels (which have their own tests) and a replay runs the captured work again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks import _families_tiny as tiny
from tests.device.test_mapped import HostDriver
from tests.rollout.tiny import VOCAB, roll, tiny_model
from torch import Tensor

from tidemill.device.mapped import MappedMemory
from tidemill.models.layers.eight import Rounded, rounded
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.draw import device_draw
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward import graphs
from tidemill.rollout.native.forward.fused import FusedRunner
from tidemill.rollout.native.forward.runner import fused_form
from tidemill.rollout.native.pages.attention import causal_attention
from tidemill.rollout.native.speculate import MOST, ON_ACCELERATOR, Speculator

HAS_DEVICE = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if HAS_DEVICE else torch.device("cpu")


class TorchKernels:
    """Implements `fused.WalkingKernels` and `fused.RoundingKernels`, row by row."""

    draw, draw_truncated = staticmethod(device_draw.draw), staticmethod(device_draw.draw_truncated)
    draw_steered = staticmethod(device_draw.draw_steered)

    def rms(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        return F.rms_norm(x, weight.shape, weight + shift, eps)

    def norm_rotate(
        self, x: Tensor, stride: int, norm: Tensor, shift: float, cos: Tensor, sin: Tensor, position: Tensor, eps: float
    ) -> Tensor:
        dim, turned = len(norm), cos.shape[-1]
        normed = F.rms_norm(x[..., :dim], (dim,), norm + shift, eps)
        part = normed[..., :turned]
        part = part * cos[position][:, None] + part.roll(turned // 2, -1) * sin[position][:, None]
        return torch.cat([part, normed[..., turned:]], -1)

    def turns(self, cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        return cos, sin, position

    def rotate(self, x: Tensor, heads: tuple[int, int], norms: Any, turns: tuple[Tensor, ...], eps: float) -> None:
        cos, sin, position = turns
        dim = cos.shape[-1]
        split = x.view(len(x), -1, dim)
        for i, part in enumerate(split.split((*heads, split.shape[1] - sum(heads)), 1)[:2]):
            normed = part if norms is None else self.rms(part, norms[i], eps)
            part.copy_(normed * cos[position] + normed.roll(dim // 2, -1) * sin[position])

    def gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, 1)
        return F.silu(gate) * up

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded(x, dtype)

    def rms_rounded(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Rounded:
        return rounded(self.rms(x, weight, eps), dtype)

    def gate_rounded(self, x: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded(self.gate(x), dtype)

    def reads_cache(self, k: Tensor, v: Tensor) -> bool:
        return False

    def route(self, logits: Tensor, bias: Tensor | None, k: int, sums_to_one: bool) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        chosen = torch.topk(scores if bias is None else scores + bias, k).indices
        shares = scores.gather(1, chosen)
        return chosen.int(), shares / shares.sum(-1, keepdim=True) if sums_to_one else shares

    def add_experts(self, x: Tensor, h: Tensor, chosen: Tensor, shares: Tensor, stacks: tuple[Tensor, Tensor]) -> None:
        for row, (experts, weights) in enumerate(zip(chosen.tolist(), shares)):
            for expert, weight in zip(experts, weights):
                gate, up = F.linear(h[row], stacks[0][expert]).chunk(2)
                x[row] += weight * F.linear(F.silu(gate) * up, stacks[1][expert])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor,
        form: Any, *, scales: Any = None,
    ) -> Tensor:  # fmt: skip
        assert scales is None
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        page = keys.shape[-1]
        for row, n in reversed(list(enumerate(length.tolist()))):  # no row may count on those before it
            held = table[row, : -(-n // page)].long()
            keys[held[-1], :, :, (n - 1) % page] = k[row]
            values[held[-1], :, (n - 1) % page] = v[row]
            all_k = keys[held].permute(1, 0, 3, 2).flatten(1, 2)[:, :n]
            all_v = values[held].permute(1, 0, 2, 3).flatten(1, 2)[:, :n]
            seen = causal_attention(q[row, None, :, None], all_k[None], all_v[None], n - 1, form)
            out[row] = seen[0, :, 0]
        return out


class AgainEachTime:
    """Stands for a graph where there is no device: the result's tensors are filled anew by every replay."""

    pool = None

    def __init__(self, work: Callable[[], Any], pool: Any = None, has_updates: bool = False) -> None:
        self.work = work
        self.result = work()

    def replay(self) -> None:
        for held, fresh in zip(self.result, self.work()):
            held.copy_(fresh)


def ahead(monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any) -> NativeEngine:
    engine = NativeEngine(model, max_seqs=6, max_len=64, page_size=16, step_tokens=40, **options)
    if not HAS_DEVICE:
        monkeypatch.setattr(graphs, "CapturedGraph", AgainEachTime)
        engine.kernels = None
        extra = () if engine.eight is None else (engine.eight,)
        engine.runner = fused_form(model)(model, 64, TorchKernels(), *extra)
        engine.decoder = engine._graph_decoder_of(engine.runner)
    assert engine.decoder is not None
    return engine


def asked(count: int, **how: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    options = {"max_tokens": 9, **how}
    return [Request(i, rng.integers(3, VOCAB, 2 + 7 * i).tolist(), Sampling(**options), n=2) for i in range(count)]


def tokens(done: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    return {key: completion.tokens for key, completion in done.items()}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2-window"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 5}, {"repetition_penalty": 1.5}], ids=str)
def test_ahead_and_in_step_make_the_same_samples(
    monkeypatch: pytest.MonkeyPatch, name: str, how: dict[str, Any]
) -> None:
    model = tiny_model(name).to(DEVICE)
    wanted = roll(NativeEngine(model, eos_ids=range(2, 12), max_len=64, plain=True), asked(4, **how))
    engine = ahead(monkeypatch, model, eos_ids=range(2, 12))
    made = roll(engine, asked(4, **how))
    assert tokens(made) == tokens(wanted)
    assert {c.finish for c in made.values()} == {"stop", "length"}
    for key, completion in made.items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=5e-3 if HAS_DEVICE else 1e-4)
    assert engine.pool.used == 0 and len(engine.scheduler.free_slots) == 6


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe-mixed", "qwen2-moe", "deepseek-v3"])
def test_eight_bit_weights_decode_ahead_as_they_do_in_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = tiny_model(name).to(DEVICE)
    engine = ahead(monkeypatch, model, eos_ids=[2], weights="fp8")
    with torch.no_grad():  # what was made before is made again from the weights as they now are
        for parameter in model.parameters():
            parameter.mul_(1.2)
    engine.load(None, 1)
    made = roll(engine, asked(4))
    wanted = roll(NativeEngine(model, eos_ids=[2], max_len=64, weights="fp8"), asked(4))
    alike = [key for key in made if made[key].tokens == wanted[key].tokens]
    assert len(alike) >= 0.7 * len(made)  # sums in another order: a number may round the other way
    gaps = [np.abs(np.array(made[key].logprobs) - wanted[key].logprobs).mean() for key in alike]
    assert np.mean(gaps) < 5e-3


@pytest.mark.parametrize("name", ["qwen3-moe-mixed", "qwen2-moe", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 5}], ids=str)
def test_a_mixture_decodes_ahead_as_it_does_in_step(
    monkeypatch: pytest.MonkeyPatch, name: str, how: dict[str, Any]
) -> None:
    model = tiny_model(name).to(DEVICE)
    wanted = roll(NativeEngine(model, eos_ids=[2], max_len=64, plain=True), asked(4, **how))
    made = roll(ahead(monkeypatch, model, eos_ids=[2]), asked(4, **how))
    assert tokens(made) == tokens(wanted)
    for key, completion in made.items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=5e-3 if HAS_DEVICE else 1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}], ids=str)
def test_states_move_on_inside_the_graph(monkeypatch: pytest.MonkeyPatch, family: str, how: dict[str, Any]) -> None:
    """With pauses, after which some states are kept and others made again."""
    model = tiny.models(family)[0].to(DEVICE)
    wanted = roll(NativeEngine(model, eos_ids=range(2, 12), max_len=64, plain=True), asked(4, **how))
    engine = ahead(monkeypatch, model, eos_ids=range(2, 12))
    for request in asked(4, **how):
        engine.submit(request)
    done: dict[tuple[int, int], Completion] = {}
    for keeps in (True, False):
        for completion in [c for _ in range(4) for c in engine.step()]:
            done[completion.request.id, completion.index] = completion
        engine.resume(engine.pause(keep_cache=keeps))
    done |= roll(engine, [])
    assert tokens(done) == tokens(wanted)
    for key, completion in done.items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=5e-3 if HAS_DEVICE else 1e-4)
    assert engine.decoder is not None and engine.decoder.buckets


def test_graphs_with_states_can_be_captured_before_the_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.models("qwen3_5_text")[0].to(DEVICE)
    wanted = tokens(roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), asked(3)))
    engine = ahead(monkeypatch, model, eos_ids=[])
    assert engine.decoder is not None and engine.states is not None
    with torch.inference_mode() if HAS_DEVICE else torch.no_grad():
        engine.decoder.capture()
    before = {place: held.data_ptr() for place, held in engine.states.held.items()}
    assert tokens(roll(engine, asked(3))) == wanted
    assert before == {place: held.data_ptr() for place, held in engine.states.held.items()}  # graphs hold the addresses


def test_states_outlive_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.models("qwen3_5_text")[0].to(DEVICE)
    wanted = tokens(roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), asked(3)))
    engine = ahead(monkeypatch, model, eos_ids=[])
    assert engine.states is not None
    if not HAS_DEVICE:
        engine.states.memory = engine.store.memory = MappedMemory(HostDriver())
    for request in asked(3):
        engine.submit(request)
    done = [completion for _ in range(5) for completion in engine.step()]
    assert engine.states.nbytes
    engine.sleep()
    assert engine.states.nbytes == engine.store.nbytes == 0
    engine.wake()
    after = roll(engine, []) | {(c.request.id, c.index): c for c in done}
    assert tokens(after) == wanted


def test_routes_are_recorded_inside_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3-moe-mixed").to(DEVICE)
    ends = range(2, 12)  # a sequence that stops has been decoded one token too far
    wanted = roll(NativeEngine(model, eos_ids=ends, max_len=64, plain=True, record_routes=True), asked(4))
    made = roll(ahead(monkeypatch, model, eos_ids=ends, record_routes=True), asked(4))
    for key, completion in made.items():
        np.testing.assert_array_equal(completion.routes, wanted[key].routes)


def test_truncated_rows_are_drawn_inside_the_graph_beside_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    hows = [{"top_k": 5}, {"top_p": 0.7, "temperature": 0.8}, {}, {"min_p": 0.1}, {"temperature": 0.0, "top_k": 3}]
    hows.append({"top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 4})
    prompts = [request.prompt for request in asked(len(hows))]
    requests = [Request(i, prompts[i], Sampling(max_tokens=9, **how), n=2) for i, how in enumerate(hows)]
    wanted = roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), requests)
    engine = ahead(monkeypatch, model, eos_ids=[])
    monkeypatch.setattr(engine, "_draw", lambda *_: pytest.fail("drawn outside the graph"))
    made = roll(engine, requests)
    assert tokens(made) == tokens(wanted)
    for key, completion in made.items():
        kept = wanted[key].kept
        assert (completion.kept is None) == (kept is None)
        if kept is not None:
            np.testing.assert_allclose(completion.kept, kept, atol=5e-3 if HAS_DEVICE else 1e-4)
    assert engine.decoder is not None and any(kind.is_truncated for kind in engine.decoder.buckets)


STEERED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "temperature": 0.7}, {"presence_penalty": 2.0}, {"logit_bias": {5: 4.0, 9: -1e3}},
    {"logit_bias": {i: 0.1 * i for i in range(3, 43)}}, {"allowed_tokens": (7, 8, 30, 90)}, {}, {"top_k": 4},
    {"repetition_penalty": 1.3, "temperature": 0.0}, {"allowed_tokens": tuple(range(9, 60)), "top_p": 0.8, "seed": 2},
    {"presence_penalty": -1.0, "top_k": 9, "logit_bias": {4: 2.0}},
]  # fmt: skip


def test_steered_rows_are_drawn_inside_the_graph_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pauses, after which penalties must know what was made before."""
    model = tiny_model("qwen3").to(DEVICE)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, 2 + 3 * i).tolist() for i in range(len(STEERED))]
    requests = [Request(i, prompts[i], Sampling(max_tokens=14, **how), n=2) for i, how in enumerate(STEERED)]
    wanted = roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), requests)
    engine = ahead(monkeypatch, model, eos_ids=[])
    monkeypatch.setattr(engine, "_draw", lambda *_: pytest.fail("drawn outside the graph"))
    for request in requests:
        engine.submit(request)
    done: dict[tuple[int, int], Completion] = {}
    for _ in range(4):
        for completion in [c for _ in range(7) for c in engine.step()]:
            done[completion.request.id, completion.index] = completion
        engine.resume(engine.pause())
    done |= roll(engine, [])
    assert tokens(done) == tokens(wanted)
    for key, completion in done.items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=5e-3 if HAS_DEVICE else 1e-4)
        assert (completion.kept is None) == (wanted[key].kept is None)
        if completion.kept is not None:
            np.testing.assert_allclose(completion.kept, wanted[key].kept, atol=5e-3 if HAS_DEVICE else 1e-4)


@pytest.mark.parametrize("allowed", [{5, 6, 7}, np.arange(5, 8, dtype=np.uint8)], ids=["set", "array"])
def test_allowed_tokens_may_be_a_set_or_an_array(monkeypatch: pytest.MonkeyPatch, allowed: Any) -> None:
    engine = ahead(monkeypatch, tiny_model("qwen3").to(DEVICE), eos_ids=[2])
    made = tokens(roll(engine, asked(2, allowed_tokens=allowed)))
    assert made == tokens(roll(engine, asked(2, allowed_tokens=(5, 6, 7)))) and len(made) == 4


def test_a_slot_that_was_steered_draws_plainly_for_its_next_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    engine = ahead(monkeypatch, model, eos_ids=[])
    roll(engine, asked(3, allowed_tokens=(5, 6), repetition_penalty=3.0, presence_penalty=1.0, logit_bias={5: 3.0}))
    others = [Request(8, [7, 8], Sampling(max_tokens=9, logit_bias={9: 1.0})), *asked(3)]
    wanted = roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), others)
    assert tokens(roll(engine, others)) == tokens(wanted)


def test_a_slot_that_was_truncated_draws_plainly_for_its_next_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    engine = ahead(monkeypatch, model, eos_ids=[])
    roll(engine, asked(3, top_k=1))
    others = [*asked(2, top_p=0.9), Request(9, [5, 6], Sampling(max_tokens=9), n=4)]
    wanted = roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), others)
    assert tokens(roll(engine, others)) == tokens(wanted)


def test_graphs_outlive_a_sleep_where_the_caches_addresses_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    wanted = tokens(roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), asked(3, top_p=0.9)))
    engine = ahead(monkeypatch, model, eos_ids=[])
    if not HAS_DEVICE:
        engine.store.memory = MappedMemory(HostDriver())
    for request in asked(3, top_p=0.9):
        engine.submit(request)
    done = [completion for _ in range(5) for completion in engine.step()]
    assert engine.decoder is not None and engine.store.nbytes > 0
    captured = dict(engine.decoder.buckets)
    engine.sleep()
    assert engine.store.nbytes == 0 and captured
    engine.wake()
    after = roll(engine, []) | {(c.request.id, c.index): c for c in done}
    assert tokens(after) == wanted
    assert all(engine.decoder.buckets[kind] is bucket for kind, bucket in captured.items())


def test_a_sleeping_engine_that_is_given_work_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    engine = ahead(monkeypatch, model, eos_ids=[])
    if not HAS_DEVICE:
        engine.store.memory = MappedMemory(HostDriver())
    first = tokens(roll(engine, asked(2)))
    engine.sleep()
    assert tokens(roll(engine, asked(2))) == first


def test_joined_projections_follow_the_learner_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    engine = ahead(monkeypatch, model, eos_ids=[])
    before = tokens(roll(engine, asked(2)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.load(None, 1)
    after = tokens(roll(engine, asked(2)))
    assert after != before
    assert after == tokens(roll(NativeEngine(model, eos_ids=[], max_len=64, plain=True), asked(2)))
    again = FusedRunner(model, 64, TorchKernels())  # a second engine joins nothing anew
    assert again.layers[0].qkv[0].data_ptr() == engine.runner.layers[0].qkv[0].data_ptr()  # type: ignore[attr-defined]


def test_pausing_loses_no_token_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    wanted = tokens(roll(NativeEngine(model, eos_ids=[2], max_len=64, plain=True), asked(4)))
    engine = ahead(monkeypatch, model, eos_ids=[2])
    for request in asked(4):
        engine.submit(request)
    done: dict[tuple[int, int], Completion] = {}
    for version in range(1, 5):
        for completion in engine.step() + engine.step():
            done[completion.request.id, completion.index] = completion
        partials = engine.pause()
        engine.load(None, version)
        engine.resume(partials)
    done |= roll(engine, [])
    assert tokens(done) == wanted


def test_preempted_sequences_make_the_same_tokens_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    requests = asked(4, max_tokens=30)
    wanted = tokens(roll(NativeEngine(model, eos_ids=[2], max_len=64, plain=True), requests))
    tight = ahead(monkeypatch, model, eos_ids=[2], cache_tokens=144)
    assert tokens(roll(tight, requests)) == wanted
    assert tight.scheduler.preemptions > 0


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_sequences_paged_to_the_host_go_on_ahead(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = (tiny_model("qwen3") if kind == "dense" else tiny.models("qwen3_5_text")[0]).to(DEVICE)
    requests = asked(4, max_tokens=30)
    wanted = tokens(roll(NativeEngine(model, eos_ids=[2], max_len=64, plain=True), requests))
    tight = ahead(monkeypatch, model, eos_ids=[2], cache_tokens=144, host_bytes=1 << 24)
    made: dict[tuple[int, int], Completion] = {}
    for request in requests:
        tight.submit(request)
    while tight.has_work:
        made |= {(c.request.id, c.index): c for c in tight.step()}
        if len(made) == 3 and tight.store.nbytes:  # and once all of it
            tight.sleep()
            assert tight.store.nbytes == 0 and tight.scheduler.host.used > 0
    assert tokens(made) == wanted
    assert tight.scheduler.preemptions > 0 and tight.scheduler.recomputed == tight.scheduler.host.used == 0


def loops(count: int, **how: Any) -> list[Request]:
    """Prompts that repeat themselves, so that there is something to look up."""
    rng = np.random.default_rng(4)
    sampling = Sampling(**{"max_tokens": 30, "ignore_eos": True, **how})
    return [Request(i, np.tile(rng.integers(3, VOCAB, 3 + i), 4).tolist(), sampling, n=2) for i in range(count)]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 0.05},
        {"temperature": 0.05, "ignore_eos": False},
        {"temperature": 0.1, "top_p": 0.5},
        {"temperature": 0.3, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("cache_tokens", [None, 160])
def test_drafts_judged_in_graphs_change_no_token(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], cache_tokens: int | None
) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    wanted = roll(NativeEngine(model, eos_ids=range(2, 12), max_len=64, plain=True), loops(4, **how))
    engine = ahead(monkeypatch, model, eos_ids=range(2, 12), cache_tokens=cache_tokens)
    engine.speculator = Speculator("on", engine.scheduler, ON_ACCELERATOR)
    made = roll(engine, loops(4, **how))
    assert tokens(made) == tokens(wanted)
    for key, completion in made.items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=5e-3 if HAS_DEVICE else 1e-4)
    drawn_on_device = "repetition_penalty" not in how
    assert (engine.speculator.kept > 20) == drawn_on_device
    assert engine.pool.used == 0 and len(engine.scheduler.free_slots) == 6 and not engine.speculator._texts


def test_on_an_accelerator_few_rows_draft_and_many_do_not() -> None:
    engine = NativeEngine(tiny_model("qwen3"), eos_ids=[2], max_len=64)
    speculator = Speculator("auto", engine.scheduler, ON_ACCELERATOR)
    speculator._good = 0.9 * speculator._tried  # nine drafts of ten were right
    assert speculator._most(4) == MOST and speculator._most(600) == 0
    speculator._good = 0.1 * speculator._tried
    assert speculator._most(4) == 0
    passes = 3 * ON_ACCELERATOR.probe_every
    asked_for = 0
    for _ in range(passes):
        if speculator.is_due(4):
            asked_for += 1
            speculator.propose(np.zeros(0, np.int64))
    assert asked_for == 3  # and tries now and then
    assert not any(speculator.is_due(512) for _ in range(passes))
