"""What a decoder is made of, read once from its config.json or from a small model's settings. Needs no torch.

Memory estimate, parallel sizes, the weight flow, published models and doctor all use this record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.models import families
from tidemill.models.box import find
from tidemill.models.vision import small
from tidemill.models.vision.small import TowerShape

if TYPE_CHECKING:  # models are opened and tried where the settings' library is missing too
    from tidemill.recipe.config import ModelSettings, TinyModel

SPECIAL_TOKENS = 3  # of a small model's tokenizer: padding, end, unknown
DEFAULT_VOCABULARY = 32_000  # when config.json does not say
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    architecture: str  # config.json's model_type
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of a dense layer's MLP
    vocabulary: int
    window: int | None = None
    is_tied: bool = False  # the output layer is the embedding
    has_bias: bool = False  # of queries, keys and values
    has_head_norms: bool = False  # queries and keys are normed, and kept before and after
    experts: int = 0  # of one layer; 0: no mixture
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0  # of experts that every token visits
    first_dense: int = 0  # of a mixture: its first layers without experts
    q_rank: int = 0  # multi-head latent attention: of its low-rank projections, and what is rotated of a head
    kv_rank: int = 0
    rotary: int = 0
    class_name: str = ""  # of transformers
    tower: TowerShape | None = None  # with which it looks at images; None: it reads text alone
    parameters: int | None = None  # exact, from the headers of the weight files or for a small model

    @property
    def is_latent(self) -> bool:
        """Multi-head latent attention, which tensor parallelism leaves whole."""
        return bool(self.kv_rank)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.first_dense if self.experts else 0

    @property
    def visited(self) -> int:
        """The width of the MLP, or of all experts, that one token goes through in the widest layer."""
        dense = self.intermediate if self.moe_layers < self.layers else 0
        return max(dense, self.experts_per_token * self.expert_width + self.shared_width)

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention. Norms inside latent attention are not counted."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if not self.is_latent:
            return 2 * h * (q + kv) + self.has_bias * (q + 2 * kv) + self.has_head_norms * 2 * self.head_dim
        queries = q + self.heads * self.rotary
        into = h * self.q_rank + self.q_rank * queries if self.q_rank else h * queries
        return into + h * (self.kv_rank + self.rotary) + self.kv_rank * 2 * q + q * h

    @property
    def layer(self) -> int:
        """Parameters of a layer, experts aside: the mean where layers differ."""
        return -(-self._beside_experts // self.layers)

    @property
    def _beside_experts(self) -> int:
        h, moe = self.hidden, self.moe_layers
        routed = 3 * h * self.shared_width + self.experts * h  # and the router
        return self.layers * (self.attention + 2 * h) + moe * routed + (self.layers - moe) * 3 * h * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Of one layer's experts."""
        return 3 * self.hidden * self.expert_width * self.experts

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """Parameters by these sizes."""
        ends = self.embedding * (1 if self.is_tied else 2) + self.hidden
        tower = self.tower.parameters if self.tower is not None else 0
        return self._beside_experts + self.moe_layers * self.expert_parameters + ends + tower


def shape_of(model: ModelSettings) -> ModelShape | None:
    """None when the model's folder does not tell, when a warm start not yet looked up makes it, or of no decoder."""
    if model.policy is not None or (model.path is None and model.warm_start is not None):
        return None
    if model.path is None:
        from tidemill.recipe.config import TinyModel

        return small_shape(model.tiny or TinyModel())
    folder = find.look(model.path)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = parse(raw) if isinstance(raw, dict) else None
    return None if found is None else replace(found, parameters=_counted(folder))


def parse(raw: Mapping[str, Any]) -> ModelShape | None:
    """Of a transformers config as JSON; None when it lacks what every decoder has."""
    text = {k: v for k, v in raw.items() if k in ("model_type", "tie_word_embeddings")} | dict(
        raw.get("text_config", raw)
    )
    family = families.find(str(text.get("model_type", "")))

    def size(*words: str) -> int:
        return next((n for word in words if (n := _most(text, family.words.get(word, word)))), 0)

    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    if not (hidden and layers and heads):
        return None
    wide = size("intermediate_size") or 4 * hidden
    experts = size(family.experts, *EXPERTS)
    expert_width = (size(family.expert_width) or wide) if experts else 0
    tied = text.get("tie_word_embeddings")
    return ModelShape(
        architecture=family.name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=(size("v_head_dim") if size("kv_lora_rank") else size("head_dim")) or hidden // heads,
        intermediate=wide,
        vocabulary=size("vocab_size") or DEFAULT_VOCABULARY,
        window=size("max_position_embeddings") or None,
        is_tied=family.is_tied if tied is None else bool(tied),
        has_bias=family.has_bias,
        has_head_norms=family.has_head_norms,
        experts=experts,
        experts_per_token=(size("num_experts_per_tok") or 1) if experts else 0,
        expert_width=expert_width,
        shared_width=size(family.shared_width) or size("n_shared_experts") * expert_width,
        first_dense=size("first_k_dense_replace") if experts else 0,
        q_rank=size("q_lora_rank"),
        kv_rank=size("kv_lora_rank"),
        rotary=size("qk_rope_head_dim"),
        class_name=str((raw.get("architectures") or [family.name or "unknown"])[0]),
        tower=small.tower_shape(raw, hidden),
    )


def small_shape(tiny: TinyModel) -> ModelShape:
    """Of a small model made on the spot."""
    found = parse(small_settings(tiny, small_vocabulary(tiny)))
    assert found is not None
    return replace(found, parameters=found.total)


def small_vocabulary(tiny: TinyModel) -> int:
    """Tokens of a small model's tokenizer."""
    return SPECIAL_TOKENS + len(dict.fromkeys(tiny.alphabet)) + len(small.tokens_of(tiny.architecture))


def small_settings(tiny: TinyModel, vocabulary: int, **own: Any) -> dict[str, Any]:
    """A small model in config.json's words; `own` goes to its decoder."""
    text = _small_decoder(tiny, vocabulary) | own
    for_images = small.tokens_of(tiny.architecture)
    return small.small_config(tiny, text, vocabulary - len(for_images)) if for_images else text


def _small_decoder(tiny: TinyModel, vocabulary: int) -> dict[str, Any]:
    family = families.find(tiny.architecture)
    experts = {family.experts: tiny.experts, family.expert_width: tiny.intermediate} if family.experts else {}
    kind = {"model_type": family.decoder or tiny.architecture}
    return {
        **({} if small.tokens_of(tiny.architecture) and not family.decoder else kind),
        "vocab_size": vocabulary,
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.intermediate,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads if family.latent_form else tiny.kv_heads,
        "head_dim": tiny.hidden // tiny.heads,
        "max_position_embeddings": tiny.window,
        "tie_word_embeddings": True,
        **({**experts, "num_experts_per_tok": tiny.experts_per_token} if experts else {}),
        **family.small,
    }


def header_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape from the headers of the safetensors files: 8 bytes of length, then JSON."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: tuple(t["shape"]) for name, t in header.items() if name != "__metadata__"}
    return found


def _counted(folder: Path) -> int | None:
    try:
        return sum(map(math.prod, header_shapes(folder).values())) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return None  # a broken file is reported when it is opened


def _most(raw: Mapping[str, Any], name: str) -> int:
    """A size, or the largest where each layer has its own; 0 when the file does not say it in numbers."""
    value = raw.get(name)
    values = value if isinstance(value, list) and value else [value]
    return max(int(x) if isinstance(x, int | float) else 0 for x in values)
