"""verl's FSDP checkpoints: one file a rank (`model_world_size_W_rank_R.pt`), in which a tensor is that rank's piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tidemill.errors import ModelError

FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def files(folder: Path) -> list[Path]:
    """Return the files of all ranks, in their order; none where the folder holds no such checkpoint."""
    found = {int(m[2]): (int(m[1]), p) for p in folder.glob("model_world_size_*.pt") if (m := FILE.fullmatch(p.name))}
    if not found:
        return []
    sizes = sorted({size for size, _ in found.values()})
    missing = sorted(set(range(sizes[-1])) - found.keys())
    if len(sizes) > 1 or missing:
        what = f"files of {len(sizes)} world sizes {sizes}" if len(sizes) > 1 else f"no file of rank {missing[0]}"
        raise ModelError(f"{folder} has {what}", "bring the files of all ranks of one save into one folder")
    return [found[rank][1] for rank in range(sizes[0])]


def tensors(ranks: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors. The files are mapped, so memory holds one of them."""
    states = [_opened(path) for path in ranks]
    for name, first in states[0].items():
        if "lora_" in name:
            raise ModelError(
                f"{ranks[0]} holds adapters ({name})", "merge them in verl first (lora merge of its merger)"
            )
        yield name, whole(name, [state[name] for state in states]) if isinstance(first, DTensor) else first


def whole(name: str, pieces: list[Any]) -> Tensor:
    """Join the pieces of all ranks: from the innermost axis of the mesh outwards."""
    spec = pieces[0]._spec
    bad = [p for p in spec.placements if type(p) not in (Shard, Replicate)]
    if bad:
        raise ModelError(f"{name} is placed as {bad[0]}", "join the checkpoint with verl's own model_merger first")

    def join(ranks: Any, placements: tuple[Any, ...]) -> Tensor:
        if not placements:
            found: Tensor = pieces[int(ranks)]._local_tensor
            return found
        if isinstance(placements[0], Replicate):
            return join(ranks[0], placements[1:])
        return torch.cat([join(part, placements[1:]) for part in ranks], placements[0].dim)

    made = join(spec.mesh.mesh, tuple(spec.placements))
    if made.shape != pieces[0].shape:
        raise ModelError(f"{name} is {tuple(pieces[0].shape)}, and its pieces make {tuple(made.shape)}")
    return made


def _opened(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"{path} cannot be opened as tensors alone: {first}", "save it again with FSDP2") from error
    return found
