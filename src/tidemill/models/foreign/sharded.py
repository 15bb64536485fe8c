"""torch's distributed checkpoints (DCP), tensor by tensor: what FSDP2, accelerate and Megatron-core write.

Their index is a pickle. It is read with a list of the classes that such an index has, and nothing else is loaded."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from tidemill.errors import ModelError

INDEX = ".metadata"
PLACES = tuple(f"torch.distributed.checkpoint.{part}" for part in ("metadata", "planner", "filesystem"))
OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")} | {
    (module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")
}


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if (module in PLACES or (module, name) in OTHERS) else None
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        is_class = isinstance(found, type) and found.__module__ == module
        if found is None or (module in PLACES and not is_class):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")
        return found


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / INDEX
        try:
            with file.open("rb") as stream:
                index = _Index(stream).load()
        except Exception as error:
            raise ModelError(f"{file} is no index of a distributed checkpoint: {error}") from error
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        found: Metadata = index
        return found


class ShardedTensors:
    """The tensors of one checkpoint by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        index = self._reader.read_metadata().state_dict_metadata
        self.known = {name: kind for name, kind in index.items() if isinstance(kind, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        kind = self.known[name]
        made = torch.empty(kind.size, dtype=kind.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process
                dcp.load({name: made}, storage_reader=self._reader, no_dist=True)  # type: ignore[attr-defined]
        except Exception as error:
            raise ModelError(f"{self.folder}: {name} cannot be read: {error}", "copy the whole folder") from error
        return made
