"""Windows, chunks, caps and sinks: every attention over packed rows computes what softmax written out in full does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tidemill.models.attention import varlen
from tidemill.models.attention.contexts import KINDS
from tidemill.models.attention.flex import Sight
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.attention.varlen import Spans, pieces

CPU = torch.device("cpu")
PROMPTS, RESPONSES, GROUP, LENGTHS = [5, 3, 9], [4, 0, 9, 7, 2], [0, 1, 1, 2, 0], [7, 1, 12]
SINKS = torch.tensor([0.7, -1.0, 3.0, 0.0])
FORMS = {
    "plain": AttentionForm(0.4),
    "window": AttentionForm(0.4, window=4),
    "chunk": AttentionForm(0.4, chunk=4),
    "cap": AttentionForm(0.4, softcap=1.5),
    "sinks": AttentionForm(0.4, sinks=SINKS),
    "sinks in a window": AttentionForm(0.4, window=3, sinks=SINKS),
    "sinks in chunks": AttentionForm(0.4, chunk=5, sinks=SINKS),
    "all but chunks": AttentionForm(0.4, window=6, softcap=2.0, sinks=SINKS),
}


def written_out(sight: Sight, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    weight = scores.exp() * torch.from_numpy(sight.dense(form.window, form.chunk))
    total = weight.sum(-1, keepdim=True)
    if form.sinks is not None:
        total = total + form.sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weight / total, v)


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, scale: float, left: int
) -> tuple[Tensor, ...]:
    """What the kernel gives: sequences lined up at their ends."""
    outs, logs = [], []
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for (q0, q1), (k0, k1) in zip(pairwise([0, *queries.host]), pairwise([0, *keys.host]), strict=True):
        at, seen = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)[None, :]
        mask = (seen <= at) & ((seen >= at - left) if left >= 0 else torch.ones_like(seen <= at))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        logs.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[k0:k1]))
    return torch.cat(outs), torch.cat(logs, 1), torch.empty(0), torch.empty(0)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_z: Tensor, queries: Spans, keys: Spans,
    seed: Sequence[Tensor], scale: float, left: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As the kernel works: weights again from the scores and `log_z`, and their sum of slopes from `out`."""
    repeats = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    made = [torch.zeros_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)]
    for (q0, q1), (k0, k1) in zip(pairwise([0, *queries.host]), pairwise([0, *keys.host]), strict=True):
        at, seen = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)[None, :]
        mask = (seen <= at) & ((seen >= at - left) if left >= 0 else torch.ones_like(seen <= at))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], wide_k[k0:k1]) * scale
        p = (scores - log_z[:, q0:q1, None]).exp() * mask
        g = grad[q0:q1]
        slope = p * (torch.einsum("qhd,khd->hqk", g, wide_v[k0:k1]) - (g * out[q0:q1]).sum(-1).t()[..., None])
        made[0][q0:q1] += torch.einsum("hqk,khd->qhd", slope, wide_k[k0:k1]) * scale
        made[1][k0:k1] += torch.einsum("hqk,qhd->khd", slope, q[q0:q1]) * scale
        made[2][k0:k1] += torch.einsum("hqk,qhd->khd", p, g)
    return made[0], *(x.view(x.shape[0], -1, repeats, x.shape[2]).sum(2) for x in made[1:])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["blocks", "short", "flash", "rowwise"])
def test_output_and_gradients_are_those_of_the_full_softmax(
    kind: str, name: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[name]
    if kind == "flash":
        if form.softcap is not None:
            pytest.skip("the kernel knows no caps, and is not chosen for them")
        monkeypatch.setattr(varlen, "_forward", flash_forward)
        monkeypatch.setattr(varlen, "_backward", flash_backward)
        if form.sinks is None:
            monkeypatch.setattr(varlen, "causal", plain_flash)
    sight = Sight.shared(PROMPTS, RESPONSES, GROUP) if shared else Sight.packed(LENGTHS)
    made = KINDS[kind]
    context = made.shared(PROMPTS, RESPONSES, GROUP, CPU) if shared else made.packed(LENGTHS, CPU)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(sight.start), h, 8, requires_grad=True) for h in (4, 2, 2))
    given = [q, k, v]
    if form.sinks is not None:
        sinks = SINKS.clone().requires_grad_()
        form, given = form._replace(sinks=sinks), [*given, sinks]
    wanted = written_out(sight, q, k, v, form)
    found: Any = context.attend(0, q, k, v, form)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    weights = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), given) for x in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


def plain_flash(q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, form: AttentionForm) -> Tensor:
    return flash_forward(q, k, v, queries, keys, form.scale, varlen._left(form))[0]


@pytest.mark.parametrize(
    ("start", "length", "chunk", "wanted"),
    [(0, 7, None, [7]), (0, 7, 4, [4, 3]), (0, 8, 4, [4, 4]), (3, 6, 4, [1, 4, 1]), (4, 2, 4, [2]), (5, 1, 4, [1])],
)
def test_a_sequence_is_cut_where_chunks_end(start: int, length: int, chunk: int | None, wanted: list[int]) -> None:
    assert pieces(start, length, chunk) == wanted
