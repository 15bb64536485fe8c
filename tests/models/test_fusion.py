"""What Ascend's fused operator is asked, held against a stand-in that computes what its documentation says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.test_packed_contexts import attended

from tidemill.models.attention import ascend as fusion
from tidemill.models.attention.contexts import KINDS
from tidemill.models.attention.registry import AttentionForm

CPU = torch.device("cpu")
PROMPTS, RESPONSES, GROUP, LENGTHS = [5, 3], [4, 0, 9, 7], [0, 1, 1, 0], [7, 1, 12]


def stand_in(q: Any, k: Any, v: Any, head_num: int, input_layout: str, **asked: Any) -> tuple[torch.Tensor, ...]:
    """Sequence by sequence: queries and keys lined up at their ends, `pre_tockens` before and `next_tockens` after."""
    assert input_layout == "TND" and head_num == q.shape[1] and asked["keep_prob"] == 1.0
    mask = asked["atten_mask"]
    assert mask.dtype == torch.bool and mask.shape == (2048, 2048) and torch.equal(mask, torch.ones_like(mask).triu(1))
    assert asked["sparse_mode"] in (3, 4)
    parts, q_start, k_start = [], 0, 0
    for q_end, k_end in zip(asked["actual_seq_qlen"], asked["actual_seq_kvlen"], strict=True):
        at = torch.arange(q_end - q_start)[:, None] + (k_end - k_start) - (q_end - q_start)
        key = torch.arange(k_end - k_start)[None, :]
        seen = key <= at + asked["next_tockens"]
        if asked["sparse_mode"] == 4:
            seen &= key >= at - asked["pre_tockens"]
        parts.append(attended(seen, q[q_start:q_end], k[k_start:k_end], v[k_start:k_end]))
        q_start, k_start = q_end, k_end
    assert q_start == len(q) and k_start == len(k)
    return torch.cat(parts), torch.empty(0), torch.empty(0)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_the_operator_is_asked_for_what_the_plain_attention_computes(shared, window, monkeypatch):
    monkeypatch.setattr(fusion.vendor, "operators", lambda _: SimpleNamespace(npu_fusion_attention=stand_in))

    def made(kind: str) -> Any:
        a = KINDS[kind]
        return a.shared(PROMPTS, RESPONSES, GROUP, CPU) if shared else a.packed(LENGTHS, CPU)

    torch.manual_seed(0)
    tokens = sum(PROMPTS) + sum(RESPONSES) if shared else sum(LENGTHS)
    inputs = [torch.randn(tokens, h, 8, requires_grad=True) for h in (4, 2, 2)]
    found = []
    for kind in ("fusion", "blocks"):
        out = made(kind).attend(0, *inputs, AttentionForm(8**-0.5, window))
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, plain in zip(*found):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_the_operator_is_not_looked_for_where_it_is_not():
    assert not fusion.works_on(CPU, torch.bfloat16)
    assert not fusion.works_on(CPU, torch.float32)
