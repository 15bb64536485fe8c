"""Open a GGUF file: its metadata as plain Python values, its tensors dequantised one at a time.

Everything that makes a file unusable is found when it is opened, before a tensor is read: a file that is cut short,
parts of a split file, quantisations that cannot be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import MissingExtra, ModelError

MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class Opened:
    path: Path
    metadata: Mapping[str, Any]  # without the file's own counts
    stored: Mapping[str, Any]  # tensors by name, as the gguf package reads them; mapped, not in memory

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """Read a value under the architecture's own prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", otherwise)

    def need(self, key: str) -> Any:
        value = self.setting(key)
        if value is None:
            raise ModelError(f"{self.path} does not tell {self.architecture}.{key}", "get the file anew")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Give the shape in torch's order, rows first. The file has the fastest axis first."""
        return tuple(int(n) for n in reversed(self.stored[name].shape))

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Read one tensor in float32, by the gguf package's own dequantisation."""
        from gguf import dequantize

        found = self.stored[name]
        return np.asarray(dequantize(found.data, found.tensor_type), dtype=np.float32).reshape(self.shape(name))


def open_file(path: Path) -> Opened:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtra("reading GGUF files", "gguf", "gguf") from error
    _check_magic(path)
    try:
        reader = GGUFReader(path)
    except ValueError as error:
        if "GGMLQuantizationType" in str(error):
            number = "".join(filter(str.isdigit, str(error).split()[0].rpartition("(")[2]))
            raise _unknown_quantisation(path, [f"number {number}"]) from error
        raise _cut_short(path) from error
    except (IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise _cut_short(path) from error
    opened = Opened(path, _metadata(path, reader), {tensor.name: tensor for tensor in reader.tensors})
    _check(opened)
    return opened


def _check_magic(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"there is no file {path}", "give the path of a .gguf file")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if not start:
        raise ModelError(f"{path} is empty", "get it again from its source")
    if start != MAGIC:
        raise ModelError(f"{path} is no GGUF file: it begins with {start!r}", "give the path of a .gguf file")


def _metadata(path: Path, reader: Any) -> dict[str, Any]:
    try:
        return {
            key: _shortest(field.contents())
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")  # version and counts
        }
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise _cut_short(path) from error


def _shortest(value: Any) -> Any:
    """Round to what was written: numbers are stored in float32, so 1e-5 comes back as 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check(opened: Opened) -> None:
    if "general.architecture" not in opened.metadata:
        raise ModelError(f"{opened.path} does not tell its architecture", "get it again from its source")
    parts = int(opened.metadata.get("split.count", 0))
    if parts > 1:
        raise ModelError(
            f"{opened.path} is one of {parts} parts of a split file",
            "join them first: llama-gguf-split --merge FIRST_PART.gguf WHOLE.gguf",
        )
    unknown = sorted({t.tensor_type.name for t in opened.stored.values()} - known_quantisations())
    if unknown:
        raise _unknown_quantisation(opened.path, unknown)


def known_quantisations() -> set[str]:
    """List those that the gguf package can undo."""
    from gguf import quants

    return {"F32", "F16"} | {kind.name for kind in quants._type_traits}


def _unknown_quantisation(path: Path, found: list[str]) -> ModelError:
    return ModelError(
        f"{path} has tensors in a quantisation that cannot be undone here: {', '.join(found)}",
        "take the model in F16, BF16, Q8_0 or Q4_K; or `pip install -U gguf`, if the quantisation is new",
    )


def _cut_short(path: Path) -> ModelError:
    size = path.stat().st_size
    return ModelError(f"{path} is cut short or damaged ({size:,} bytes are there)", "get it again from its source")
