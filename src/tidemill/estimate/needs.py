"""What a model needs to be rolled out, to learn with adapters, and to learn whole: before any recipe names it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tidemill.errors import ModelError
from tidemill.estimate.memory import MemoryEstimate, memory
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe.config import Config, ModelSettings

DType = Literal["float32", "bfloat16"]
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on the device."""

    roll_out: int  # weights and cache
    learn_lora: int
    learn_whole: int


@dataclass(frozen=True, slots=True)
class Description:
    shape: ModelShape
    needs: dict[DType, Needs]


def describe(folder: Path, *, tokens: int, samples: int) -> Description:
    """Read config.json and the weights' headers; nothing is loaded. `samples` of `tokens` are rolled out at once, one
    is learned from at a time."""
    shape = shape_of(ModelSettings(path=str(folder)))
    if shape is None or shape.parameters is None:
        raise ModelError(
            f"{folder} does not tell what model it holds", "give a folder with config.json and *.safetensors"
        )
    return Description(shape, {dtype: _needs(folder, dtype, shape, tokens, samples) for dtype in get_args(DType)})


def _needs(folder: Path, dtype: DType, shape: ModelShape, tokens: int, samples: int) -> Needs:
    prompt = tokens // 4
    batches: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"max_prompt_tokens": prompt},
        "rollout": {"max_new_tokens": tokens - prompt, "concurrent": samples},
        "train": {"tokens_per_microbatch": tokens},
    }
    lora, whole = (
        memory(Config.model_validate(batches | {"learn": {"lora_rank": rank}}), shape) for rank in (LORA_RANK, 0)
    )
    assert lora is not None and whole is not None  # the parameters are known
    return Needs(whole.weights + whole.cache, _learning(lora), _learning(whole))


def _learning(needed: MemoryEstimate) -> int:
    return needed.total - needed.cache
