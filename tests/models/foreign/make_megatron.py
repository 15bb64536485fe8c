"""Write the checkpoints of this folder with Megatron-core itself (0.16.1), cut over two ranks, on the processor:

    python -m torch.distributed.run --nproc-per-node 2 make_megatron.py qwen2|qwen3 FOLDER

Needs megatron-core. Beside the checkpoint it writes what the model answers (`answers.safetensors`).
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def on_the_processor() -> None:
    """Megatron-core asks for a GPU in four places that have nothing to compute there."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()
    random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()


def model_of(kind: str) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    has_norms = kind == "qwen3"
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=4, ffn_hidden_size=24,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        layernorm_epsilon=1e-6, add_bias_linear=False, add_qkv_bias=not has_norms, qk_layernorm=has_norms,
        tensor_model_parallel_size=2, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=has_norms), vocab_size=64,
        max_sequence_length=64, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=10000,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        # A tensor that both ranks hold whole must be the same on both.
        torch.manual_seed(dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else len(name))
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def main(kind: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    on_the_processor()
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(2)
    model = model_of(kind)
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict() | {"iteration": 7}, str(folder))
    ids = torch.arange(1, 17)[None]
    with torch.no_grad():
        part = model(ids, torch.arange(16)[None], None)[0]
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.contiguous())
    if dist.get_rank() == 0:
        save_file({"ids": ids, "logits": torch.cat(parts, 1)}, folder / "answers.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
