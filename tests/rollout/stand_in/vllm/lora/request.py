from tests.rollout.test_vllm_adapter import LoRARequest

__all__ = ["LoRARequest"]
