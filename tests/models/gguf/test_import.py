"""A GGUF file becomes a folder whose model gives the logits of the model that the file was written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf.written import write
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tidemill.errors import ConfigError, ModelError
from tidemill.models.foreign import write as write_folder
from tidemill.models.gguf.convert import import_file
from tidemill.models.gguf.families import llama3_divisors
from tidemill.models.gguf.file import open_file
from tidemill.models.load import open_folder
from tidemill.recipe.config import ModelSettings

gguf = pytest.importorskip("gguf")

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "long_factor": [1.0 + i for i in range(8)],
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "original_max_position_embeddings": 128,
}


def made(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | settings))
    with torch.no_grad():  # norms and biases that are not all alike
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
    return model.eval()


def rotary_tensors(writer: Any) -> None:
    divisors = llama3_divisors(500_000.0, 16, 8.0)
    writer.add_tensor("rope_freqs.weight", divisors.astype("float32"))


def long_tensors(writer: Any) -> None:
    import numpy as np

    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_tensor("rope_factors_long.weight", np.array(LONG["long_factor"], dtype=np.float32))
    writer.add_tensor("rope_factors_short.weight", np.array(LONG["short_factor"], dtype=np.float32))


def experts(writer: Any) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def gemma2(writer: Any) -> None:
    writer.add_attn_logit_softcapping(20.0)
    writer.add_final_logit_softcapping(10.0)


def yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def linear(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def called_mistral(writer: Any) -> None:
    writer.add_basename("Mistral")


def three_quarters(writer: Any) -> None:
    writer.add_rope_dimension_count(12)


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
PARTLY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
CASES: dict[str, tuple[str, str, dict[str, Any], Callable[[Any], None]]] = {
    "llama": ("llama", "llama", {}, lambda writer: None),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}, lambda writer: None),
    "llama with biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, lambda writer: None),
    "llama 3 rotary": ("llama", "llama", {"rope_parameters": LLAMA3}, rotary_tensors),
    "mistral": ("llama", "mistral", {"sliding_window": 8}, called_mistral),
    "qwen2": ("qwen2", "qwen2", {}, lambda writer: None),
    "qwen2 yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}, yarn),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, lambda writer: None),
    "qwen3 mixture": ("qwen3moe", "qwen3_moe", MIXTURE, experts),
    "gemma": ("gemma", "gemma", {"head_dim": 32, "tie_word_embeddings": True}, lambda writer: None),
    "gemma 2": (
        "gemma2",
        "gemma2",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
            "sliding_window": 8,
        },
        gemma2,
    ),
    "gemma 3": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "rope_parameters": TWO_BASES,
        },
        linear,
    ),
    "phi 3": ("phi3", "phi3", {"sliding_window": 8}, lambda writer: None),
    "phi 3 long": ("phi3", "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}, long_tensors),
    "phi 4 mini": ("phi3", "phi3", {"rope_parameters": PARTLY}, three_quarters),
}


@pytest.mark.parametrize("case", CASES)
def test_the_imported_model_gives_the_logits_of_the_model_it_came_from(tmp_path: Path, case: str) -> None:
    architecture, model_type, settings, more = CASES[case]
    original = made(model_type, **settings)
    done = import_file(write(tmp_path / "m.gguf", architecture, original, more=more), tmp_path / "folder")
    assert done.architecture == type(original).__name__
    assert done.parameters == sum(p.numel() for p in original.parameters())
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(imported(tokens).logits, original(tokens).logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_quantisation_is_undone_as_the_gguf_package_undoes_it(tmp_path: Path, kind: str) -> None:
    """The writer leaves in `original` what gguf's own dequantisation makes of the file's bytes."""
    original = made("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = write(tmp_path / "m.gguf", "llama", original, kind=gguf.GGMLQuantizationType[kind])
    norms = 3 if kind == "F32" else 0
    assert import_file(path, tmp_path / "folder").quantisations[kind] == 9 + norms
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    for (name, a), (_, b) in zip(original.named_parameters(), imported.named_parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0, msg=name)
        assert float(a.detach().std()) > 0
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(imported(tokens).logits, original(tokens).logits, atol=1e-6, rtol=1e-6)


def test_an_imported_folder_can_be_trained_from(tmp_path: Path) -> None:
    import_file(write(tmp_path / "m.gguf", "qwen3", made("qwen3", head_dim=16)), tmp_path / "folder")
    loaded = open_folder(tmp_path / "folder", ModelSettings(path=str(tmp_path / "folder")), torch.device("cpu"))
    assert loaded.eos_ids == (0,) and loaded.window == 256
    assert loaded.tokenizer.pad_token == "<end>" and len(loaded.tokenizer) == 258  # without what only fills it up


def test_a_model_larger_than_a_shard_is_written_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_folder, "SHARD_BYTES", 100_000)
    original = made("llama")
    import_file(write(tmp_path / "m.gguf", "llama", original), tmp_path / "folder", dtype="bfloat16")
    assert len(list((tmp_path / "folder").glob("model-*-of-*.safetensors"))) > 1
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(original.named_parameters(), imported.named_parameters()):
        assert torch.equal(a.to(torch.bfloat16), b), name


def test_a_tokenizer_from_elsewhere_takes_the_place_of_the_files_own(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", made("llama"))
    import_file(path, tmp_path / "first")
    own = AutoTokenizer.from_pretrained(tmp_path / "first")
    own.chat_template = "{{ messages[0]['content'] }}"
    own.save_pretrained(tmp_path / "words")
    import_file(path, tmp_path / "second", tokenizer=tmp_path / "words")
    assert AutoTokenizer.from_pretrained(tmp_path / "second").chat_template == own.chat_template


# Bad input


def refused(path: Path, tmp_path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        import_file(path, tmp_path / "folder")
    assert caught.value.remedy
    assert not (tmp_path / "folder").exists()
    assert not list(tmp_path.glob(".*")), "nothing half-made is left"
    return caught.value.message


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    whole = write(tmp_path / "m.gguf", "llama", made("llama")).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    assert "is cut short or damaged" in refused(tmp_path / "cut.gguf", tmp_path)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 something else")
    assert "is no GGUF file" in refused(tmp_path / "a.gguf", tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"")
    assert "is empty" in refused(tmp_path / "b.gguf", tmp_path)
    assert "there is no file" in refused(tmp_path / "none.gguf", tmp_path)


def test_an_unknown_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "baichuan", made("llama"))
    assert "architecture 'baichuan', which cannot be imported" in refused(path, tmp_path)


def with_kind(path: Path, number: int) -> Path:
    """The file with another quantisation written into its first tensor's entry."""
    from gguf import GGUFReader

    first = GGUFReader(path).tensors[0].field
    at = first.offset + sum(part.nbytes for part in first.parts[:4])  # name's length, name, axes, shape
    raw = bytearray(path.read_bytes())
    raw[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(("number", "said"), [(250, "number 250"), (15, "Q8_K")])
def test_a_quantisation_that_cannot_be_undone_is_refused(tmp_path: Path, number: int, said: str) -> None:
    original = made("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = with_kind(write(tmp_path / "m.gguf", "llama", original), number)
    message = refused(path, tmp_path)
    assert "quantisation that cannot be undone" in message and said in message


def test_a_missing_or_foreign_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    original = made("llama")
    del original.model.layers[1].mlp.up_proj
    assert "layers.1.mlp.up_proj.weight is missing" in refused(write(tmp_path / "n.gguf", "llama", original), tmp_path)

    def foreign(writer: Any) -> None:
        import numpy as np

        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, dtype=np.float32))

    path = write(tmp_path / "o.gguf", "llama", made("llama"), more=foreign)
    assert "has a tensor blk.0.attn_sinks.weight" in refused(path, tmp_path)


def test_rotary_frequencies_of_an_unknown_scaling_are_refused(tmp_path: Path) -> None:
    import numpy as np

    def odd(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))

    assert "not scaled as Llama 3's" in refused(write(tmp_path / "m.gguf", "llama", made("llama"), more=odd), tmp_path)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", made("llama"), more=lambda writer: writer.add_uint16("split.count", 3))
    assert "one of 3 parts" in refused(path, tmp_path)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        import_file(write(tmp_path / "m.gguf", "llama", made("llama")), tmp_path / "full")


def test_settings_come_back_as_they_were_written_and_not_as_float32_keeps_them(tmp_path: Path) -> None:
    opened = open_file(write(tmp_path / "m.gguf", "llama", made("llama", rms_norm_eps=1e-5)))
    assert opened.need("attention.layer_norm_rms_epsilon") == 1e-5
