"""Start vLLM itself, in this process: the one place that makes `vllm.LLM`. It needs vLLM and nothing of ours that its
interpreter might lack, because that may be another than the run's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from tidemill.errors import ConfigError, ModelError
from tidemill.rollout.vllm_kept import KeptMass, processor

EXTENSION = "tidemill.rollout.vllm_worker.WeightLoader"
OLDEST = (0, 20)  # vLLM whose calls these are


def make_llm(arguments: Mapping[str, Any], kept: KeptMass | None) -> Any:
    """Make vLLM with `arguments`, which truncates with `kept` where that is given."""
    # In this process, so that weights are handed over and not sent.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if kept is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the other has no logits processors of this kind
    try:
        import vllm
        from vllm import LLM
    except ImportError as error:
        raise ModelError(f"rollout.engine=vllm needs vLLM: {error}", "pip install vllm, or use native") from None
    check_version(vllm.__version__)
    if kept is not None:
        # In step with the host: a row's mass is written down under the number of tokens that it has.
        arguments = {"logits_processors": [processor(kept)], "async_scheduling": False, **arguments}
    try:
        return LLM(worker_extension_cls=EXTENSION, disable_log_stats=True, **arguments)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ConfigError(f"vLLM {vllm.__version__}: {error}", "correct or remove it in rollout.vllm.args") from None


def make_params(**how: Any) -> Any:
    """Settings of a request, whose answers bring what is new in each step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(output_kind=RequestOutputKind.DELTA, **how)


def check_version(version: str) -> None:
    """Versions that are not numbers (built from a source tree) pass."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and ".dev" not in version and tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"rollout.engine=vllm works with vLLM {oldest} or newer; {version} is installed",
            "pip install -U vllm, or set rollout.engine=native",
        )
