"""What every section of a recipe is, and sizes that several sections have."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """train.steps=true is a slip, not one step."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)) and _is_number(annotation):
            raise PydanticCustomError("not_a_number", "a number is wanted")
        return value


def _is_number(annotation: Any) -> bool:
    return any(kind in (int, float) for kind in (annotation, *get_args(annotation)))


def bounded(reason: str, ge: float, le: float) -> Any:
    """Say why a number has the bounds that it has."""
    return Field(ge=ge, le=le, json_schema_extra={"reason": reason})


Rows = Annotated[int, bounded("a step's rows are held in memory: more than a million are several", ge=1, le=10**6)]
Places = Annotated[int, bounded("places in a sample are 32-bit numbers", ge=1, le=2**31)]
Rate = Annotated[float, bounded("one update of a larger rate destroys any model", ge=0, le=10)]
Temperature = Annotated[float, bounded("above it sampling is uniform over the vocabulary", ge=0, le=100)]


class ParallelSettings(Section):
    """Over how many ranks the learner is cut, and how. The ranks are replicate × fsdp × cp × tp × pp; ep lies over the
    ranks of fsdp and cp together and multiplies nothing."""

    replicate: int = Field(1, ge=1, description="copies of the sharded model, each with its own samples (hybrid shard)")
    fsdp: int = Field(1, ge=1, description="ranks over which weights, gradients and optimizer are sharded (FSDP2)")
    tp: int = Field(1, ge=1, description="ranks that share each layer's heads and widths (tensor parallel)")
    cp: int = Field(1, ge=1, description="ranks that share each sequence (context parallel)")
    ep: int = Field(1, ge=1, description="ranks that share the experts, out of fsdp × cp (expert parallel)")
    pp: int = Field(1, ge=1, description="ranks that each hold a run of layers (pipeline parallel)")
    cp_form: Literal["auto", "ulysses", "ring"] = Field(
        "auto",
        description="context parallel by exchanging heads or by passing keys round; auto: heads where they divide",
    )
    pp_schedule: Literal["1f1b", "interleaved"] = Field("1f1b", description="order of a pipeline's micro-batches")
    pp_chunks: int = Field(1, ge=1, description="runs of layers per pipeline rank; more than 1 with interleaved")
    timeout_s: float = Field(
        600.0, gt=0, description="longest wait for another rank before the run says who is missing"
    )
    device_gb: float | None = Field(None, gt=0, description="memory of one device, for the estimate; none: as here")

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.cp * self.tp * self.pp
