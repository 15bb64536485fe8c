"""What a 910B refuses, and when its host waits. Each rule names where it is published; paths without a repository are
of Ascend/pytorch (torch_npu), as of version 2.13.0.

The list of implemented operators, `implemented.txt`, is the section `supported` of the wheel's
`torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml`; a test compares it with wheels that pip fetched.
"""

from __future__ import annotations

from pathlib import Path

import torch

SOURCES = {
    "operators": "the wheel's npu_native_functions_by_codegen.yaml, section `supported`; any other falls back to"
    " the host (torch_npu/csrc/aten/VariableFallbackKernel.cpp), which TORCH_NPU_FALLBACK_CPU_DISABLE=1 turns into an"
    " error (docs/zh/api/environment_variable/op_execution/TORCH_NPU_FALLBACK_CPU_DISABLE.md)",
    "float64": "torch_npu/csrc/aten/common/ToKernelNpu.cpp: double is replaced by float with a warning",
    "float8": "torch_npu/csrc/aten/ops/op_api/CopyKernelOpApi.cpp: aclnnCast of A2 and A3 takes no float8",
    "reductions": "HcclAllReduce of CANN 8.5.0 (hcclapiref/hcclcpp_07_0021): int8, int16, int32, int64, float16,"
    " float32, bfp16 on A2 and A3; so torch_npu/csrc/distributed/ProcessGroupHCCL.cpp, checkSupportedDataType",
    "contiguous": "torch_npu/csrc/distributed/ProcessGroupHCCL.cpp: «Tensors must be contiguous»",
    "copies": "torch_npu/csrc/aten/ops/op_api/CopyKernelOpApi.cpp: a copy that is not non_blocking synchronizes the"
    " stream; torch_npu/csrc/core/npu/CachingHostAllocator.cpp, process_non_blocking_copy: so does one from or to host"
    " memory that is not pinned",
    "graphs": "torch_npu/npu/graphs.py: capture, replay, update of host arguments with auto_dispatch_capture;"
    " torch_npu/npu/_npugraph_handlers/ifa_handler.py: which arguments of which operators",
    "formats": "Ascend/op-plugin, npu_format_cast: no view, slice or pad of a tensor in FRACTAL_NZ",
}

REFUSED = (
    torch.float64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
REDUCIBLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16)

# Their result has a shape, or is a value, that the host must know before it can go on.
WAITING = {
    "nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "repeat_interleave.Tensor", "bincount",
}  # fmt: skip

# (operator): dtypes its first tensor may have, from Ascend/op-plugin, docs/zh/custom_APIs/torch_npu.
_SIXTEEN = (torch.float16, torch.bfloat16)
_FLOATS = (*_SIXTEEN, torch.float32)
NARROW = {
    "npu::npu_fused_infer_attention_score": _SIXTEEN,
    "npu::npu_fusion_attention": _FLOATS,
    "npu::npu_rms_norm": _FLOATS,
    "npu::npu_swiglu": _FLOATS,
    "npu::npu_rotary_mul": _FLOATS,
    "npu::npu_grouped_matmul": _FLOATS,
    "npu::npu_moe_gating_top_k_softmax": _FLOATS,
    "npu::npu_moe_init_routing_v2": _FLOATS,
    "npu::npu_moe_token_unpermute": _FLOATS,
}

# Operators whose host arguments a captured graph can be given anew.
UPDATABLE = {"npu::npu_fused_infer_attention_score"}


def implemented() -> list[str]:
    """Names of aten operators that run on the device."""
    return Path(__file__).with_name("implemented.txt").read_text().split()
