"""The base of every section of a recipe, and sizes that several sections share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**31  # any number but the seed
LONGEST_S = 10**6  # any time; waiting for longer overflows the system's clocks


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `train.steps=true`, which is a slip, not one step."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)) and _is_number(annotation):
            raise PydanticCustomError("not_a_number", "a number is expected")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _no_number_is_huge(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a number that no setting can mean: it would overflow a clock, a counter or float32 later."""
        name = str(info.field_name)
        most = LONGEST_S if name.endswith("_s") else LARGEST
        if isinstance(value, int | float) and abs(value) > most and name != "seed":
            raise PydanticCustomError("huge_number", "at most {most}", {"most": most})
        return value


def _is_number(annotation: Any) -> bool:
    return any(kind in (int, float) for kind in (annotation, *get_args(annotation)))


def bounded(reason: str, ge: float, le: float) -> Any:
    """Explain a number's bounds in the error message."""
    return Field(ge=ge, le=le, json_schema_extra={"reason": reason})


Rows = Annotated[int, bounded("a step's rows are held in memory: use several steps", ge=1, le=10**6)]
Places = Annotated[int, bounded("places in a sample are 32-bit numbers", ge=1, le=2**31)]
Rate = Annotated[float, bounded("one update at a higher rate destroys any model", ge=0, le=10)]
Temperature = Annotated[float, bounded("above this, sampling is uniform over the vocabulary", ge=0, le=100)]


class ParallelSettings(Section):
    """How the learner is cut over ranks. There are replicate × fsdp × cp × tp × pp ranks; ep uses the ranks of fsdp
    and cp together, and adds none."""

    replicate: int = Field(1, ge=1, description="copies of the sharded model, each with its own samples (hybrid shard)")
    fsdp: int = Field(1, ge=1, description="ranks over which weights, gradients and optimizer are sharded (FSDP2)")
    tp: int = Field(1, ge=1, description="ranks that share each layer's heads and widths (tensor parallel)")
    cp: int = Field(1, ge=1, description="ranks that share each sequence (context parallel)")
    ep: int = Field(1, ge=1, description="ranks that share the experts, out of fsdp × cp (expert parallel)")
    pp: int = Field(1, ge=1, description="ranks that each hold a run of layers (pipeline parallel)")
    cp_form: Literal["auto", "ulysses", "ring"] = Field(
        "auto",
        description="context parallel by exchanging heads, or by passing keys round a ring; auto: heads if they divide",
    )
    pp_schedule: Literal["1f1b", "interleaved"] = Field("1f1b", description="order of a pipeline's micro-batches")
    pp_chunks: int = Field(1, ge=1, description="runs of layers per pipeline rank; more than 1 with interleaved")
    timeout_s: float = Field(
        600.0, gt=0, description="time limit of waiting for another rank before the run says which one is missing"
    )
    device_gb: float | None = Field(None, gt=0, description="memory of one device, for the estimate; none: as here")

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.cp * self.tp * self.pp
