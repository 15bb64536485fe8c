"""The Triton kernels, in Triton's interpreter where there is no device, against their plain forms."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tidemill.learn.logprob import tokens as logprob
from tidemill.learn.logprob import triton_logprob

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 5.0)])
@pytest.mark.parametrize("vocabulary", [37, 4099])
def test_kernels_equal_their_plain_forms(
    vocabulary: int, temperature: float, softcap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    fused = logprob.Words(temperature, softcap, is_fused=True)
    logits = (torch.randn(3, vocabulary, device=DEVICE) * 4).to(dtype)
    targets = torch.randint(0, vocabulary, (3,), device=DEVICE)
    found = fused.statistics(logits, targets)
    exact = logits.float()  # the kernels read either type and compute in float32
    wanted = logprob.statistics(exact, targets, temperature, softcap)
    for ours, plain in zip(found, wanted):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    g = torch.randn(2, 3, device=DEVICE)
    for given in ((g[0], g[1]), (g[0], None), (None, g[1])):
        rest = (targets, wanted[2], wanted[1], *given, temperature, softcap, torch.float32)
        torch.testing.assert_close(
            triton_logprob.logit_gradient(logits, *rest), logprob.logit_gradient(exact, *rest), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 5.0)])
def test_words_taken_in_bit_by_bit_come_to_the_same_sums(temperature: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5000, device=DEVICE) * 4
    targets = torch.tensor([0, 2100, 4999], device=DEVICE)
    kept = []
    for fold in (triton_logprob.fold, logprob.fold):
        sums = logprob.no_words(logits)
        for start, end in ((0, 2100), (2100, 2101), (2101, 5000)):
            fold(sums, logits[:, start:end].contiguous(), targets - start, temperature, softcap)
        kept.append(sums)
        for ours, wanted in zip(logprob.finished(sums), logprob.statistics(logits, targets, temperature, softcap)):
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*kept, atol=1e-5, rtol=1e-5)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tidemill.learn.logprob import triton_logprob

types = {"logits": "*fp32", "targets": "*i64", "out": "*bf16", "vocabulary": "i32", "rows": "i32", "cap": "fp32"}
types["inverse_temperature"] = "fp32"
kernels = [k for k in vars(triton_logprob).values() if isinstance(k, triton.JITFunction) and "BLOCK" in k.arg_names]
assert len(kernels) == 2, kernels
for kernel in kernels:
    for given in (True, False):
        fixed = {name: given for name in kernel.arg_names if name.startswith("HAS_")} | {"BLOCK": 2048}
        signature = {n: "constexpr" if n in fixed else types.get(n, "*fp32") for n in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
"""


def test_the_kernels_compile_for_a_device_which_the_interpreter_does_not_show() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
