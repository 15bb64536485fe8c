"""Weights from a plain program's trainer to engines, over a process group that the program made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tidemill.errors import ReshardError
from tidemill.reshard.publish import Publisher, publish

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def make(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3Config(**SMALL))


def test_in_one_process_tensors_are_copied_and_checked() -> None:
    source, target = make(0), make(1)
    moved = publish(source, to=target, verify="all")
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values()))
    assert moved.checked and moved.sent_bytes == 0


def test_wrapped_names_are_those_of_the_module_inside() -> None:
    source, target = make(0), make(1)
    given = {f"module._orig_mod.{name}": tensor for name, tensor in source.state_dict().items()}
    Publisher(given, to=target)()
    assert torch.equal(source.lm_head.weight, target.lm_head.weight)


def test_what_is_no_model_and_what_the_source_lacks_is_refused() -> None:
    with pytest.raises(ReshardError, match="str is no source"):
        publish("model", to=make(0))
    with pytest.raises(ReshardError, match=r"the target wants 'lm_head.weight', which the source does not have"):
        publish({"model.embed_tokens.weight": torch.zeros(64, 32)}, to={"lm_head.weight": torch.zeros(64, 32)})


@pytest.mark.slow
def test_the_script_of_the_page_publishes_exactly_and_moves_no_byte_too_many(tmp_path: Path) -> None:
    """Four ranks learn with FSDP2, two roll out; the script is that of docs/bridges.md."""
    page = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()
    script = page.partition("<!-- torchrun -->\n\n```python\n")[2].partition("```")[0]
    assert 20 < len(script.splitlines()) <= 40
    (tmp_path / "publish.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=6", "publish.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("exact True, received 1.000 of the model") == 2, done.stdout
