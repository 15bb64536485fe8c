"""What a model needs to be rolled out, to learn with adapters, and to learn whole: before any recipe names it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tidemill.errors import ModelError
from tidemill.estimate.memory import MemoryEstimate, memory
from tidemill.estimate.run import Shape, longest, shape_of
from tidemill.recipe.config import Config

DType = Literal["float32", "bfloat16"]
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on the device, with the default recipe's batches."""

    roll_out: int  # weights and cache
    learn_lora: int
    learn_whole: int


@dataclass(frozen=True, slots=True)
class Description:
    architecture: str
    shape: Shape
    needs: dict[DType, Needs]
    tokens: int  # a sample has at most, in this estimate
    tokens_per_microbatch: int


def describe(folder: Path) -> Description:
    """From config.json and the weights' headers; nothing is loaded."""
    config = Config.model_validate({"model": {"path": str(folder)}})
    shape = shape_of(config.model)
    if shape is None or shape.parameters is None:
        raise ModelError(
            f"{folder} does not tell what model it holds", "give a folder with config.json and *.safetensors"
        )
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = raw.get("architectures") or [raw.get("model_type", "unknown")]
    return Description(
        str(named[0]),
        shape,
        {dtype: _needs(folder, dtype, shape) for dtype in get_args(DType)},
        longest(config),
        config.train.tokens_per_microbatch,
    )


def _needs(folder: Path, dtype: DType, shape: Shape) -> Needs:
    lora, whole = (
        memory(
            Config.model_validate({"model": {"path": str(folder), "dtype": dtype}, "learn": {"lora_rank": rank}}), shape
        )
        for rank in (LORA_RANK, 0)
    )
    assert lora is not None and whole is not None  # the parameters are known
    return Needs(whole.weights + whole.cache, _learning(lora), _learning(whole))


def _learning(needed: MemoryEstimate) -> int:
    return needed.total - needed.cache
