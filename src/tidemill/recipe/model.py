"""Settings of the model: where it comes from, or how a small one is made on the spot."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tidemill.recipe.section import Section

DType = Literal["float32", "bfloat16"]


class TinyVision(Section):
    """The eyes of a small model that looks."""

    size: int = Field(48, ge=8, description="pixels along each side of an image, as the tower takes it")
    patch: int = Field(6, ge=1, description="pixels along each side of a patch; two of them divide size")
    hidden: int = Field(64, ge=8, description="width of the tower")
    layers: int = Field(2, ge=1, description="of the tower")
    heads: int = Field(4, ge=1, description="of the tower's attention")
    intermediate: int = Field(128, ge=8, description="width inside the tower's MLP")

    @model_validator(mode="after")
    def _divides(self) -> TinyVision:
        if self.size % (2 * self.patch) or self.hidden % (4 * self.heads):
            raise ValueError(
                f"size ({self.size}) must be a multiple of two patches ({2 * self.patch}), and hidden ({self.hidden}) "
                f"of four times heads ({4 * self.heads})"
            )
        return self


class TinyModel(Section):
    """A small decoder made on the spot, with random weights and a character tokenizer."""

    architecture: str = Field("qwen3", description="model_type of transformers: one of the files in models/families/")
    hidden: int = Field(128, ge=8, description="width of the residual stream")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(4, ge=1, description="attention heads")
    kv_heads: int = Field(2, ge=1, description="key/value heads; divides heads")
    intermediate: int = Field(384, ge=8, description="width inside the MLP, or inside each expert")
    experts: int = Field(8, ge=1, description="experts in each layer, of qwen3_moe and mixtral")
    experts_per_token: int = Field(2, ge=1, description="experts that a token is routed to")
    window: int = Field(256, ge=8, description="longest sequence, prompt and response")
    alphabet: str = Field(
        "0123456789+-*/=()<>.,:;?! \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'\"[]{}_#$%&@^|~`\\",
        description="the tokenizer's characters, one token each",
    )
    chat_template: str | None = Field(
        None, description="how messages become text, as a Jinja template; none: the model reads plain text"
    )
    vision: TinyVision | None = Field(
        None, description="of architectures that take images (qwen3_vl, smolvlm, …); none: the usual sizes"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModel:
        if self.heads % self.kv_heads or self.hidden % self.heads or self.experts_per_token > self.experts:
            raise ValueError(
                f"heads ({self.heads}) must divide hidden ({self.hidden}) and be a multiple of kv_heads "
                f"({self.kv_heads}); experts_per_token ({self.experts_per_token}) is at most experts ({self.experts})"
            )
        return self


class PolicySettings(Section):
    """A small network in place of a decoder: an observation goes in, the distribution of an action comes out."""

    kind: Literal["mlp", "cnn", "gru"] = Field("mlp", description="what reads observations")
    hidden: tuple[int, ...] = Field((64, 64), min_length=1, description="widths of the layers")
    activation: Literal["tanh", "relu"] = Field("tanh", description="between the layers")
    head: Literal["auto", "categorical", "gaussian", "squashed_gaussian"] = Field(
        "auto", description="what is drawn from; auto: a category for each choice, a Gaussian for real numbers"
    )
    log_std: float = Field(0.0, description="logarithm of a Gaussian's standard deviation, to begin with")
    orthogonal: bool = Field(True, description="orthogonal weights to begin with; false: torch's own")
    normalise: tuple[Literal["observations", "rewards"], ...] = Field(
        (), description="what is brought to a variance of 1 by running statistics, which checkpoints keep"
    )
    spaces: dict[str, Any] | None = Field(None, description="of observations and actions; none: the environment's")
    judges: Literal["states", "actions", "nothing"] | None = Field(
        None, description="what its critic gives values to; none: what the algorithm needs"
    )


class ModelSettings(Section):
    path: str | None = Field(
        None, description="a Hugging Face folder, a name of `tidemill models list`, or org/name on the hub"
    )
    warm_start: str | None = Field(None, description="recipe that trains the model first, when path is not given")
    tiny: TinyModel | None = Field(
        None, description="a small model made on the spot, when neither path nor warm_start is given"
    )
    policy: PolicySettings | None = Field(None, description="in place of a language model: a small network")
    dtype: DType = Field("float32", description="of the weights")
    trust_remote_code: bool = Field(False, description="run Python code found in the model folder")

    @field_validator("policy", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value
