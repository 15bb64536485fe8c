"""What is written piece by piece is what safetensors reads."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file

from tidemill.learn.checkpoint.tensor_file import form, head, raw


def test_tensors_of_every_kind_are_read_back_as_they_were(tmp_path: Path) -> None:
    tensors = {
        "empty": torch.zeros(0, dtype=torch.int64),
        "no_row": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "thin": torch.randn(3, 5).bfloat16(),
        "every_other": torch.arange(10)[::2],
        "flags": torch.tensor([True, False]),
    }
    file = tmp_path / "all.safetensors"
    forms = {name: form(tensor) for name, tensor in tensors.items()}
    file.write_bytes(b"".join(chain([head(forms)], (raw(t) for t in tensors.values()))))
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
