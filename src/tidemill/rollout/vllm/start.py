"""Start vLLM itself, in this process: the one place that makes `vllm.LLM`. It needs vLLM and nothing of ours that its
interpreter might lack, because that may be another than the run's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from tidemill.errors import ConfigError, ModelError
from tidemill.rollout.vllm.kept import KeptMass, processor

EXTENSION = "tidemill.rollout.vllm.worker.WeightLoader"
OLDEST = (0, 20)  # vLLM whose calls these are


class VLLMHere:
    """vLLM in this interpreter."""

    def __init__(self) -> None:
        self.kept: KeptMass | None = None

    def open(self, truncates: bool) -> None:
        """Import vLLM. `truncates`: it is to write down the mass that top_p, top_k and min_p keep."""
        # In this process, so that weights are handed over and not sent.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if truncates:
            self.kept = KeptMass()
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the other has no logits processors of this kind
        try:
            import vllm
        except ImportError as error:
            raise ModelError(f"rollout.engine=vllm needs vLLM: {error}", "pip install vllm, or use native") from None
        check_version(vllm.__version__)

    def make_llm(self, arguments: Mapping[str, Any]) -> Any:
        import vllm

        if self.kept is not None:
            # In step with the host: a row's mass is written down under the number of tokens that it has.
            arguments = {"logits_processors": [processor(self.kept)], "async_scheduling": False, **arguments}
        try:
            return vllm.LLM(worker_extension_cls=EXTENSION, disable_log_stats=True, **arguments)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise ConfigError(
                f"vLLM {vllm.__version__}: {error}", "correct or remove it in rollout.vllm.args"
            ) from None

    @staticmethod
    def make_params(**how: Any) -> Any:
        """Settings of a request, whose answers bring what is new in each step."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(output_kind=RequestOutputKind.DELTA, **how)

    @staticmethod
    def make_adapter_request(*place: Any, **how: Any) -> Any:
        """What names an adapter: its name, number and folder."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(*place, **how)

    @staticmethod
    def adapter_refusal(architecture: str) -> str | None:
        """Say why this vLLM serves no adapters of a model, if it does not."""
        from vllm.lora.layers import BaseLayerWithLoRA
        from vllm.model_executor.models import ModelRegistry, supports_lora

        if not hasattr(BaseLayerWithLoRA, "load_weights"):
            return "this version of vLLM cannot load the weights beside them in place (0.32 can)"
        known = ModelRegistry.models.get(architecture)
        if known is not None and not supports_lora(known.load_model_cls()):
            return f"its {architecture} takes none"
        return None

    def close(self) -> None:
        """Nothing is left of a start that failed."""


def check_version(version: str) -> None:
    """Versions that are not numbers (built from a source tree) pass."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and ".dev" not in version and tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"rollout.engine=vllm works with vLLM {oldest} or newer; {version} is installed",
            "pip install -U vllm, or set rollout.engine=native",
        )
