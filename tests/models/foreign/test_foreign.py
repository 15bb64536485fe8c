"""Checkpoints of other frameworks as a model to start from. Megatron-core's were written by Megatron-core
(`make_megatron.py`), with its answers; the others are written here as those frameworks write them."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tidemill.cli import app
from tidemill.errors import ConfigError, ModelError
from tidemill.models import tiny
from tidemill.models.foreign.convert import import_checkpoint
from tidemill.recipe.config import TinyModel

HERE = Path(__file__).parent
SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def definition(folder: Path, kind: str = "qwen3", **more: Any) -> Any:
    """A folder with config.json and tokenizer; the config."""
    config = AutoConfig.for_model(kind, **{**SMALL, "tie_word_embeddings": False, **more})
    config.save_pretrained(folder)
    tiny.make_tokenizer(TinyModel()).save_pretrained(folder)
    return config


def made(config: Any) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).eval()


def same(model: Any, folder: Path) -> bool:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_checkpoint_of_megatron_core_answers_as_megatron_did(kind: str, tmp_path: Path) -> None:
    definition(tmp_path / "definition", kind, vocab_size=61)
    done = import_checkpoint(HERE / f"megatron-{kind}", tmp_path / "model", definition=tmp_path / "definition")
    assert done.kind == "Megatron-core"
    answers = load_file(HERE / f"megatron-{kind}" / "answers.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(answers["ids"]).logits[0]
    assert logits.shape[1] == 61  # of 64: the vocabulary was padded
    assert (logits - answers["logits"][:, :61]).abs().max() < 1e-5 * answers["logits"].abs().max()


def write_verl(model: Any, folder: Path, mesh_shape: tuple[int, ...]) -> None:
    """One file a rank, as FSDP2 cuts: the last axis of the mesh shards rows, those before it hold copies."""
    world = torch.Size(mesh_shape).numel()
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", mesh_shape)
        placements = [*[Replicate()] * (len(mesh_shape) - 1), Shard(0)]
        state = {}
        for name, tensor in model.state_dict().items():
            parts = tensor.chunk(mesh_shape[-1])
            place = rank % mesh_shape[-1]
            local = parts[place].clone() if place < len(parts) else tensor[:0].clone()
            cut = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
            state[name] = DTensor.from_local(local, mesh, placements, **cut)
        torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_the_ranks_of_verl_become_one_model(mesh: tuple[int, ...], tmp_path: Path) -> None:
    actor = tmp_path / "global_step_5" / "actor"
    model = made(definition(actor / "huggingface"))
    write_verl(model, actor, mesh)
    done = import_checkpoint(tmp_path / "global_step_5", tmp_path / "model")
    assert same(model, tmp_path / "model") and done.parameters == sum(p.numel() for p in model.parameters())
    assert isinstance(PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"), PreTrainedTokenizerFast)


def test_a_missing_rank_of_verl_is_named(tmp_path: Path) -> None:
    write_verl(made(definition(tmp_path / "actor" / "huggingface")), tmp_path / "actor", (3,))
    (tmp_path / "actor" / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(ModelError, match="no file of rank 1"):
        import_checkpoint(tmp_path / "actor", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("wraps", [True, False])
def test_accelerates_sharded_checkpoint_opens_with_a_tied_head(wraps: bool, tmp_path: Path) -> None:
    model = made(definition(tmp_path / "definition", tie_word_embeddings=True))
    state = model.state_dict()
    folder = tmp_path / "checkpoint-4" / "pytorch_model_fsdp_0"
    dcp.save({"model": state} if wraps else state, checkpoint_id=folder, no_dist=True)
    import_checkpoint(tmp_path / "checkpoint-4", tmp_path / "model", definition=tmp_path / "definition")
    assert same(model, tmp_path / "model")


def test_the_folder_of_trls_trainer_is_used_as_it_is(tmp_path: Path) -> None:
    made(definition(tmp_path / "checkpoint-500")).save_pretrained(tmp_path / "checkpoint-500")
    with pytest.raises(ModelError, match="is a Hugging Face folder already"):
        import_checkpoint(tmp_path / "checkpoint-500", tmp_path / "model")


@pytest.mark.parametrize("more", [{}, {"use_rslora": True, "modules_to_save": ["lm_head"]}])
def test_adapters_of_trl_are_merged_as_peft_merges_them(more: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = made(definition(tmp_path / "base"))
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **more),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "checkpoint-9")
    done = import_checkpoint(tmp_path / "checkpoint-9", tmp_path / "model")
    assert done.kind == f"adapters of {tmp_path / 'base'}"
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_adapters_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true, "r": 4, "lora_alpha": 8}')
    with pytest.raises(ModelError, match="use_dora=True cannot be merged"):
        import_checkpoint(tmp_path, tmp_path / "model")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_what_a_checkpoint_would_run_is_not_run(tmp_path: Path, capsys: Any) -> None:
    definition(tmp_path / "definition")
    for where, file in (("index", ".metadata"), ("ranks", "model_world_size_1_rank_0.pt")):
        (tmp_path / where).mkdir()
        if where == "index":
            (tmp_path / where / file).write_bytes(pickle.dumps(Evil()))
        else:
            torch.save({"x": Evil()}, tmp_path / where / file)
        with pytest.raises(ModelError, match=r"is no index|cannot be opened as tensors alone"):
            import_checkpoint(tmp_path / where, tmp_path / "model", definition=tmp_path / "definition")
    assert "this ran" not in capsys.readouterr().out


def test_what_does_not_fit_is_refused_before_anything_is_left_behind(tmp_path: Path) -> None:
    checkpoint = HERE / "megatron-qwen2"
    for kind, more, message in (
        ("qwen2", {"num_hidden_layers": 3}, "layers.2"),
        ("qwen2", {"num_key_value_heads": 4, "head_dim": 4}, "linear_qkv has 32 rows"),
        ("gemma2", {}, "Megatron-core's form of gemma2 is not known"),
    ):
        shutil.rmtree(tmp_path / "definition", ignore_errors=True)
        definition(tmp_path / "definition", kind, **more)
        with pytest.raises(ModelError, match=message):
            import_checkpoint(checkpoint, tmp_path / "model", definition=tmp_path / "definition")
    with pytest.raises(ModelError, match="--definition FOLDER"):
        import_checkpoint(checkpoint, tmp_path / "model")
    with pytest.raises(ModelError, match="holds no checkpoint that is known"):
        import_checkpoint(tmp_path, tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        import_checkpoint(checkpoint, tmp_path / "full", definition=tmp_path / "definition")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["definition", "full"]


def test_the_command_imports_and_says_what(tmp_path: Path) -> None:
    definition(tmp_path / "definition", "qwen2")
    words = ["models", "import", str(HERE / "megatron-qwen2"), "--to", str(tmp_path / "m"), "--definition"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "definition")], env={"COLUMNS": "300"})
    assert done.exit_code == 0 and "(Megatron-core) is now" in done.output.replace("\n", " ")
