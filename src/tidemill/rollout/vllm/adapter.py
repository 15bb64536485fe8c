"""LoRA adapters that vLLM serves as adapters: its base weights stay, and an update brings the adapter's tensors alone.

vLLM takes an adapter from a folder in peft's form. Ours is private and lies in memory. Every request names the same
adapter, and an update replaces it in place, so requests under way continue with the new version, as they do with whole
weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tidemill.models import lora
from tidemill.models.mixture.experts import is_known
from tidemill.owned import OwnedFolder

log = logging.getLogger(__name__)

NAME, NUMBER = "tidemill", 1  # of the only adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


class ServedAdapter:
    """The adapter of `model`, the learner's or a copy of it. `make_request` is vLLM's `LoRARequest`."""

    def __init__(self, model: Any, make_request: Callable[..., Any]) -> None:
        self.model = model
        self.has_base = False  # vLLM has the weights that the adapter is beside
        self._folder = OwnedFolder(in_memory=2 * sum(t.nbytes for t in lora.adapters(model).values()))
        path = str(self._folder.path)
        self.request = make_request(NAME, NUMBER, path)
        self._anew = make_request(NAME, NUMBER, path, load_inplace=True)

    def base(self) -> dict[str, Tensor]:
        """The frozen weights."""
        own = lora.adapters(self.model)
        return {name: p.detach() for name, p in self.model.named_parameters() if name not in own}

    def bring(self, engine: Any, is_on: bool = True) -> int:
        """Let vLLM serve the adapter as it is now, or one that changes nothing; return its bytes."""
        own = lora.adapters(self.model)
        if not is_on:
            own = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        tensors, about = lora.peft_files(own, *scale_of(self.model), base="")
        path = self._folder.path
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(about))
        engine.add_lora(self._anew)
        return sum(tensor.nbytes for tensor in tensors.values())

    def close(self) -> None:
        self._folder.close()


def make_adapter(model: Any, options: Mapping[str, Any], vllm: Any) -> ServedAdapter | None:
    """The model's adapters as vLLM can serve them; None where it has none or vLLM cannot. `options`: of `vllm.LLM`."""
    if not lora.is_attached(model):
        return None
    reason = refusal(model, options) or vllm.adapter_refusal(type(model).__name__)
    if reason is not None:
        say_merged(reason)
        return None
    return ServedAdapter(model, vllm.make_adapter_request)


def if_all_adapted(adapter: ServedAdapter | None, engine: Any) -> ServedAdapter | None:
    """The adapter, if vLLM applies every part of it; what it does not know it would leave out without an error."""
    if adapter is None:
        return None
    wrapped = {name for names in engine.collective_rpc("tidemill_adapted") for name in names}
    if missing := left_out(adapter.model, wrapped):
        say_merged(f"it has no place for that of {missing[0]} (of {len(missing)} modules)")
        adapter.close()
        return None
    return adapter


def refusal(model: Any, options: Mapping[str, Any]) -> str | None:
    """Say why vLLM cannot take the model's adapters, as far as that is known before it starts."""
    if not options.get("enable_lora", True):
        return "rollout.vllm.args has enable_lora: false"
    if any(True for _ in lora.adapted_stacks(model)):
        return "they are on stacked experts too (learn.lora_experts=false leaves these out)"
    if next(model.parameters()).device.type == "cpu" and any(is_known(m) for m in model.modules()):
        return "on a CPU its kernels of experts know no adapters, even beside them"
    if any(name.endswith(".lora_m") for name in lora.adapters(model)):
        return "they have magnitudes (learn.dora)"
    if scale_of(model)[0] > RANKS[-1]:
        return f"their rank is above {RANKS[-1]}"
    return None


def adapter_options(model: Any) -> dict[str, Any]:
    """What `vllm.LLM` is told of the adapters."""
    rank = scale_of(model)[0]
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in RANKS if size >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_modules(model)}),
    }


def scale_of(model: Any) -> tuple[int, float]:
    """Rank and alpha, the same for all modules."""
    first = next(m for m in model.modules() if isinstance(m, lora.LoraLinear))
    rank = int(first.lora_a.shape[0])
    return rank, first.factor * rank


def adapted_modules(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, lora.LoraLinear)]


def left_out(model: Any, wrapped: Iterable[str]) -> list[str]:
    """Adapted modules that are not among those that vLLM adapts. Around a decoder's layers its names are its own."""
    known = {_in_layers(name) for name in wrapped}
    return [name for name in adapted_modules(model) if _in_layers(name) not in known]


def _in_layers(name: str) -> str:
    return name.rpartition("layers.")[2]


def say_merged(reason: str) -> None:
    log.warning("vLLM gets whole merged weights at every update instead of the LoRA adapters alone: %s", reason)
