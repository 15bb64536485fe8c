"""Our rollout engine and packed log-probs inside TRL's trainers, on their own weights and in their own process."""

from tidemill.bridges.trl.generation import give_back, rollout, take_over
from tidemill.bridges.trl.packed import pack, unpack

__all__ = ["give_back", "pack", "rollout", "take_over", "unpack"]
