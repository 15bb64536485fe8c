"""As much of vLLM as an interpreter of its own is asked for, over the stand-in of `test_vllm` and a model of any shape
that transformers knows."""

from types import SimpleNamespace

import torch
from tests.rollout.test_vllm import FakeVLLM
from transformers import AutoConfig, AutoModelForCausalLM

__version__ = "0.24.0"


class Kept:
    """A logits processor, as the stand-in calls it."""

    def __init__(self, cls):
        self.processor = cls(None, None, False)

    def update(self, removed, added, moved):
        self.processor.update_state(SimpleNamespace(removed=removed, added=added, moved=moved))

    def truncate(self, logits):
        return self.processor.apply(logits)


KNOWN = {"load_format", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization"}
KNOWN |= {"generation_config", "logprobs_mode", "enable_sleep_mode", "worker_extension_cls", "disable_log_stats"}
KNOWN |= {"async_scheduling", "seed", "enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"}


class LLM(FakeVLLM):
    def __init__(self, *, model, logits_processors=(), **known):
        for name in known.keys() - KNOWN:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument '{name}'")
        torch.manual_seed(99)  # as random as vLLM's own before the first load
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=getattr(torch, known["dtype"]))
        super().__init__(made.eval(), kept=Kept(logits_processors[0]) if logits_processors else None)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def tidemill_adapted(self):
        return [name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]


def SamplingParams(**how):
    return SimpleNamespace(**{"stop_token_ids": None, "extra_args": None, **how})
