"""Who sees whom in a packed row, in the forms the fast kernels want it, against the plain form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidemill.models.attention import varlen
from tidemill.models.attention.contexts import KINDS, choose
from tidemill.models.attention.flex import BLOCK, Sight, block_table
from tidemill.models.attention.registry import AttentionForm

CPU = torch.device("cpu")
PROMPTS, RESPONSES, GROUP = [5, 3, 300], [4, 0, 130, 7, 400], [0, 1, 2, 1, 2]


def attended(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shared", [False, True])
def test_two_intervals_per_token_say_what_the_plain_attention_does(shared: bool, window: int | None) -> None:
    prompts, responses, group, lengths = [5, 3], [4, 0, 9, 7], [0, 1, 1, 0], [7, 1, 12]
    sight = Sight.shared(prompts, responses, group) if shared else Sight.packed(lengths)
    plain = KINDS["blocks"]
    context = plain.shared(prompts, responses, group, CPU) if shared else plain.packed(lengths, CPU)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(sight.start), h, 8) for h in (4, 2, 2))
    wanted = context.attend(0, q, k, v, AttentionForm(8**-0.5, window))
    torch.testing.assert_close(attended(torch.from_numpy(sight.dense(window)), q, k, v), wanted)


@pytest.mark.parametrize("sight", [Sight.packed([700, 1, 90, 256]), Sight.shared(PROMPTS, RESPONSES, GROUP)])
def test_block_tables_miss_nothing_and_call_full_what_is(sight: Sight) -> None:
    some, full = block_table(sight, is_local=False)
    dense, count = sight.dense(), len(some)
    padded = np.zeros((count * BLOCK, count * BLOCK), bool)
    padded[: len(dense), : len(dense)] = dense
    blocks = padded.reshape(count, BLOCK, count, BLOCK).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(some, blocks.any((2, 3)))
    assert full.any()
    assert blocks.all((2, 3))[full].all()


def test_a_response_lined_up_at_its_end_sees_its_prompt_and_itself() -> None:
    """What the flash kernel is given, worked out sequence by sequence, against the plain attention."""
    prompts, responses, group = [5, 3], [4, 0, 9, 7], [0, 1, 1, 0]
    shared = varlen.FlashShared(prompts, responses, group, CPU)
    spans = shared.spans[None]
    assert spans.responses is not None and spans.keys is not None and spans.seen is not None
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(prompts) + sum(responses), h, 8) for h in (4, 2, 2))
    made = []
    for (q0, q1), (k0, k1) in zip(spans.responses.ends.unfold(0, 2, 1), spans.keys.ends.unfold(0, 2, 1)):
        seen, queries = spans.seen[k0:k1], q[shared.split + q0 : shared.split + q1]
        ends_meet = torch.ones(len(queries), len(seen), dtype=torch.bool).tril(len(seen) - len(queries))
        made.append(attended(ends_meet, queries, k[seen], v[seen]))
    wanted = KINDS["blocks"].shared(prompts, responses, group, CPU).attend(0, q, k, v, AttentionForm(8**-0.5))
    torch.testing.assert_close(torch.cat(made), wanted[shared.split :])


def test_rows_taken_many_times_get_all_their_gradients() -> None:
    x, index = torch.randn(6, 2, 3, requires_grad=True), torch.tensor([0, 3, 3, 5, 3])
    weights = torch.randn(5, 2, 3)
    (ours,) = torch.autograd.grad((varlen._Gather.apply(x, index) * weights).sum(), x)
    (plain,) = torch.autograd.grad((x[index] * weights).sum(), x)
    torch.testing.assert_close(ours, plain)


def test_the_cpu_gets_the_one_for_short_sequences_and_the_plain_one_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tidemill.models.attention import short
    from tidemill.models.load import make_tiny
    from tidemill.recipe.config import TinyModel

    model = make_tiny(TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16), torch.float32, 0, CPU).model
    monkeypatch.setattr(short, "_library", object)
    assert choose(model) is KINDS["short"]
    monkeypatch.setattr(short, "_library", lambda: None)
    assert choose(model) is KINDS["blocks"]
    assert not varlen.works_on(CPU, torch.bfloat16)
