"""Who makes the tokens in `benchmarks/rollout.py`. Each engine is made for a shape and all the work it will get;
it gives a function that does one piece of work (or a little of it) and says how many steps it took."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

# A piece of work, and whether to do only a little of it; the number of steps.
Roll = Callable[["Work", bool], int]


@dataclass(frozen=True)
class Work:
    """What is asked: prompts, samples of each, and how long every response is."""

    prompts: list[list[int]]
    lengths: np.ndarray  # (prompts, samples)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def window(self) -> int:
        return len(self.prompts[0]) + int(self.lengths.max())

    def limits(self, i: int, brief: bool) -> list[int]:
        return np.minimum(self.lengths[i], 3 if brief else 1 << 30).tolist()


@dataclass(frozen=True)
class Shape:
    """A model's shape with random weights: its transformers config, and the model when someone needs it."""

    config: Any
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        import tidemill.models.attention.registry  # noqa: F401  registers the attention
        from tidemill.models.calling import plug

        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config, attn_implementation="tidemill", dtype=self.dtype)
        plug(model)
        return model.eval()


def captured(model: Any, **settings: Any) -> Any:
    """The native engine, with graphs captured before anything is timed."""
    from tidemill.rollout.native.engine import NativeEngine

    engine = NativeEngine(model, eos_ids=[], **settings)
    if engine.decoder is not None:
        with torch.inference_mode():
            engine.decoder.capture()
    return engine


def native(shape: Shape, works: list[Work], weights: str = "same") -> Roll:
    from tidemill.rollout.engine import Request, Sampling

    seqs, window = max(work.lengths.size for work in works), max(work.window for work in works)
    engine = captured(shape.model, max_seqs=seqs, max_len=window, weights=weights)

    def roll(work: Work, brief: bool) -> int:
        for i, prompt in enumerate(work.prompts):
            limits = work.limits(i, brief)
            engine.submit(Request(i, prompt, Sampling(), n=len(limits), limits=limits))
        steps = made = 0
        while engine.has_work:
            made += sum(len(completion.tokens) for completion in engine.step())
            steps += 1
        assert brief or made == work.tokens
        return steps

    return roll


def hf(shape: Shape, works: list[Work]) -> Roll:
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = shape.model
    model.set_attn_implementation("sdpa")

    def roll(work: Work, brief: bool) -> int:
        ids = torch.tensor(work.prompts, device=shape.device).repeat_interleave(work.lengths.shape[1], 0)
        ends = torch.tensor(work.lengths.ravel() + ids.shape[1], device=shape.device)
        longest = 3 if brief else int(work.lengths.max())

        class AtItsLength(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                return input_ids.shape[1] >= ends

        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=longest,
                stopping_criteria=StoppingCriteriaList([AtItsLength()]), pad_token_id=0,
            )  # fmt: skip
        return longest

    return roll


def hf_batching(shape: Shape, works: list[Work]) -> Roll:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = shape.model
    model.set_attn_implementation("paged|sdpa")
    blocks = max(-(-(work.window + 32) // 32) * work.lengths.size for work in works)
    settings = ContinuousBatchingConfig(num_blocks=blocks, block_size=32, max_batch_tokens=1024)

    def roll(work: Work, brief: bool) -> int:
        generation = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings, block=True
        ) as manager:
            left = 0
            for i, prompt in enumerate(work.prompts):
                for length in work.limits(i, brief):
                    manager.add_request(prompt, max_new_tokens=length)
                    left += 1
            while left:
                result = manager.get_result(timeout=1)
                left -= result is not None and result.is_finished()
        return 3 if brief else int(work.lengths.max())

    return roll


def vllm_job(shape: Shape, works: dict[str, Work], repeats: int, rounding: str = "same") -> dict[str, Any]:
    """What `_vllm_peer.py` is to measure, in a process where only vLLM lives."""
    parameters = sum(p.numel() for p in Shape(shape.config, "meta").model.parameters())
    window = max(work.window for work in works.values()) + 1
    return {
        "folder": _vllm_folder(shape),
        "is_dummy": parameters > MOST_WRITTEN,
        "device": shape.device,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "window": window if shape.device == "cpu" else max(window, 4096),
        "sequences": max(work.lengths.size for work in works.values()),
        "vocab": shape.config.vocab_size,
        "repeats": repeats,
        "quantization": None if rounding == "same" else rounding,
        # Of models with states vLLM decides itself: the copies of states that it keeps may cost more than they save.
        "prefix_caching": None if hasattr(shape.config, "linear_num_value_heads") else True,
        "cases": {name: {"prompts": w.prompts, "lengths": w.lengths.tolist()} for name, w in works.items()},
    }


# Above this, vLLM makes random weights of its own: writing them to disk would take longer than the measurement.
MOST_WRITTEN = 4_000_000_000


def _vllm_folder(shape: Shape) -> str:
    """A config and a tokenizer of one word: vLLM wants to see one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = tempfile.mkdtemp()
    config = type(shape.config)(**{**shape.config.to_dict(), "eos_token_id": 2, "dtype": shape.dtype})
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<end>": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    return folder


ENGINES = {"native": native, "hf": hf, "hf_batching": hf_batching}
# vLLM with everything in one process; with its engine in a process of its own, as it comes; and so with its newer model
# runner, which 0.24 takes by itself for some architectures only. They take a minute to start, so one serves all the
# work on a shape.
VLLM = {
    "vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "vllm_mp": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    "vllm_v2": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
}
