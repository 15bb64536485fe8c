"""Write small GGUF files as llama.cpp's converter does: names and keys by the gguf package, layouts as there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

Array = np.ndarray[Any, Any]
ARCH = {gguf.MODEL_ARCH_NAMES[arch]: arch for arch in gguf.MODEL_ARCH_NAMES}
K_QUANTS = {  # bytes of a block, and where its float16 scales are
    Type.Q4_K: (144, (0, 2)),
    Type.Q5_K: (176, (0, 2)),
    Type.Q6_K: (210, (208,)),
}


def bytes_tokenizer(writer: Any, vocabulary: int) -> None:
    """A byte-level tokenizer without merges: end, begin, then bytes; unused tokens fill it up."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())[: vocabulary - 2]
    tokens = ["<end>", "<begin>", *letters]
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([3, 3] + [1] * len(letters) + [5] * len(unused))
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)


def write(
    path: Path,
    architecture: str,
    model: Any = None,
    *,
    kind: Type = Type.F32,
    tokenizer: Callable[[Any, int], None] = bytes_tokenizer,
    more: Callable[[Any], None] = lambda writer: None,
    seed: int = 0,
) -> Path:
    """`model`'s weights become what the file's quantisation leaves of them, so that both can be compared."""
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    _settings(writer, config)
    tokenizer(writer, config.vocab_size)
    more(writer)
    generator = np.random.default_rng(seed)
    for name, parameter, rows in _stored(model, architecture):
        values = parameter.detach().numpy()[rows] if rows is not None else parameter.detach().numpy()
        if values.ndim == 1:
            shift = 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0
            writer.add_tensor(name, np.ascontiguousarray(values + np.float32(shift)))
            continue
        raw = _encoded(values, kind, generator)
        left = gguf.dequantize(raw, kind).reshape(values.shape)
        back = torch.from_numpy(np.array(left, dtype=np.float32))
        with torch.no_grad():
            parameter[torch.as_tensor(rows) if rows is not None else slice(None)] = back
        if kind in (Type.F32, Type.F16):
            writer.add_tensor(name, raw)
        else:
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encoded(values: Array, kind: Type, generator: np.random.Generator) -> Array:
    if kind is Type.F32:
        return np.ascontiguousarray(values)
    if kind is Type.F16:
        return values.astype(np.float16)
    if kind not in K_QUANTS:
        return gguf.quantize(np.ascontiguousarray(values), kind)
    size, scales = K_QUANTS[kind]  # the package cannot quantise these: any bytes are some weights
    blocks = generator.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    for at in scales:
        small = generator.uniform(1e-5, 2e-5, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = small[:, None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _settings(writer: Any, config: Any) -> None:
    writer.add_name("a small model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _stored(model: Any, architecture: str) -> list[tuple[str, torch.Tensor, Array | None]]:
    """(name in the file, the parameter or a view of it, its rows' order in the file)."""
    names = gguf.get_tensor_name_map(ARCH[architecture], model.config.num_hidden_layers)
    found: list[tuple[str, torch.Tensor, Array | None]] = []
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            found += _experts(name, parameter)
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found.append((stored, parameter, _rows(name, parameter, model.config, architecture)))
    return found


def _experts(name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor, None]]:
    layer = name.split(".")[2]
    if name.endswith("down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", parameter, None)]
    half = parameter.shape[1] // 2
    return [
        (f"blk.{layer}.ffn_gate_exps.weight", parameter[:, :half], None),
        (f"blk.{layer}.ffn_up_exps.weight", parameter[:, half:], None),
    ]


def _rows(name: str, parameter: torch.Tensor, config: Any, architecture: str) -> Array | None:
    """llama.cpp turns pairs of neighbours, so its converter interleaves the halves of each head."""
    if architecture != "llama" or not any(part in name for part in ("q_proj", "k_proj")):
        return None
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    order = np.arange(parameter.shape[0])
    return order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
