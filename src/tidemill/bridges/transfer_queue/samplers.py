"""Samplers: which ready rows a fetch gets. They run in the ledger's process, on row numbers alone; a sampler of your
own is a subclass of BaseSampler. They choose as TransferQueue's do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tidemill.bridges.transfer_queue import pickles
from tidemill.bridges.transfer_queue.balance import balanced
from tidemill.dock.keyed.partition import Partition
from tidemill.dock.keyed.sampling import Chosen
from tidemill.dock.keyed.tags import with_numbers
from tidemill.dock.ledger.records import Ints

SAMPLER_FILE = "sampler"  # in the dock's folder

Indexes = list[int]


class BaseSampler(ABC):
    """Chooses rows. `_states[partition][task][rank][batch]` remembers what ranks were given."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: Indexes, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Indexes, Indexes]:
        """Return the rows to give and those of them that count as consumed, both empty where there are too few."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Indexes, Indexes]:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        config = sampling_config or {}
        rank = config.get("dp_rank")
        known = self._of_task(partition_id, task_name).get(rank, {}) if rank is not None else {}
        return config.get("batch_index") in known

    def clear_cache(self, partition_id: str) -> None:
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        self._states = state["_states"]

    def _of_task(self, partition_id: str, task_name: str) -> dict[Any, Any]:
        found: dict[Any, Any] = self._states.get(partition_id, {}).get(task_name, {})
        return found

    def _remember(self, partition_id: str, task_name: str, rank: Any, batch: Any, given: Any) -> None:
        task = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        task.setdefault(rank, {})[batch] = given


class SequentialSampler(BaseSampler):
    """The rows with the lowest numbers, each once."""

    def sample(self, ready_indexes: Indexes, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Indexes, Indexes]:
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


class GRPOGroupNSampler(BaseSampler):
    """Whole groups: runs of `n_samples_per_prompt` neighbouring numbers."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be at least 1, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Indexes, Indexes]:
        rank, batch = kwargs.get("dp_rank"), kwargs.get("batch_index")
        known = self._of_task(partition_id, task_name).get(rank, {})
        if batch in known:
            first, second = known[batch]
            return first, second
        if batch_size % self.n_samples_per_prompt:
            raise ValueError(f"batch_size {batch_size} is not a multiple of {self.n_samples_per_prompt} per prompt")
        chosen = self._groups(sorted(ready_indexes), batch_size)
        if len(chosen) < batch_size:
            return [], []
        if rank is not None:
            self._remember(partition_id, task_name, rank, batch, (chosen, chosen.copy()))
        return chosen, chosen.copy()

    def _groups(self, ready: Indexes, rows: int) -> Indexes:
        n, chosen, at = self.n_samples_per_prompt, list[int](), 0
        while at + n <= len(ready) and len(chosen) < rows:
            if ready[at + n - 1] - ready[at] == n - 1:
                chosen += ready[at : at + n]
                at += n
            else:
                at += 1
        return chosen


class RankAwareSampler(BaseSampler):
    """Each rank its own rows; whoever asks for the same rank and batch gets the same."""

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Indexes, Indexes]:
        if dp_rank < 0:
            raise ValueError(f"dp_rank must be 0 or more, got {dp_rank}")
        known = self._of_task(partition_id, task_name).get(dp_rank, {})
        chosen = known.get(batch_index) or ready_indexes[:batch_size]
        if len(chosen) < batch_size and batch_index not in known:
            return [], []
        self._remember(partition_id, task_name, dp_rank, batch_index, chosen)
        return chosen, chosen


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, decided for all ranks at once so that each gets about as many tokens: the tag `total_lengths`."""

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be at least 1, got {dp_size}")
        self.dp_size = dp_size
        self._balanced_cache: dict[tuple[str, str, Any], list[Indexes]] = {}

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Indexes, Indexes]:
        rank, batch = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        decision = (partition_id, task_name, batch)
        if decision not in self._balanced_cache:
            chosen, _ = super().sample(ready_indexes, batch_size * self.dp_size, task_name, partition_id)
            if not chosen:
                return [], []
            parts = self._balanced_cache[decision] = self._split(chosen, kwargs.get("partition"))
            for i in range(self.dp_size):
                self._remember(partition_id, task_name, i, batch, (parts[i], parts[i].copy()))
        parts = self._balanced_cache[decision]
        given = parts[rank] if rank < len(parts) else []
        return given, given.copy()

    def _split(self, chosen: Indexes, partition: Any) -> list[Indexes]:
        n = self.n_samples_per_prompt
        if partition is None:  # nothing is known of lengths
            share = len(chosen) // self.dp_size
            return [chosen[i * share : (i + 1) * share] for i in range(self.dp_size)]
        tags = partition.get_custom_meta(chosen)
        lengths = [tags.get(i, {}).get("total_lengths", 1) for i in chosen]
        groups = [sum(lengths[at : at + n]) for at in range(0, len(chosen), n)]
        return [
            [row for group in part for row in chosen[group * n : (group + 1) * n]]
            for part in balanced(groups, self.dp_size)
        ]

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        self._balanced_cache = {key: parts for key, parts in self._balanced_cache.items() if key[0] != partition_id}

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "_balanced_cache": self._balanced_cache}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._balanced_cache = state["_balanced_cache"]


SAMPLERS = {
    sampler.__name__: sampler
    for sampler in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}


# -- in the ledger's process ------------------------------------------------------------------------------------------


def of_folder(folder: Path) -> LedgerSampler:
    """Make the dock's sampler from the file that `init` left in its folder."""
    return LedgerSampler(pickles.read(folder / SAMPLER_FILE))


class LedgerSampler:
    """A BaseSampler as a dock's keyed table calls it."""

    def __init__(self, sampler: BaseSampler) -> None:
        self._sampler = sampler

    def __call__(self, ready: Ints, rows: int, partition: Partition | None = None, **config: Any) -> Chosen:
        view = None if partition is None else PartitionView(partition)
        return self._sampler(ready.tolist(), rows, partition=view, **config)

    def has_cached_result(self, partition: str, task: str, config: Mapping[str, Any]) -> bool:
        return bool(self._sampler.has_cached_result(partition, task, dict(config)))

    def clear_cache(self, partition: str) -> None:
        self._sampler.clear_cache(partition)

    def dumped(self) -> bytes:
        return pickles.dumps(self._sampler.save_checkpoint())

    def load(self, state: bytes) -> None:
        self._sampler.load_checkpoint(pickles.loads(state))


class PartitionView:
    """What a sampler may ask of a partition."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.partition_id = partition.name

    @property
    def global_indexes(self) -> set[int]:
        return set(self._partition.rows)

    @property
    def total_samples_num(self) -> int:
        return len(self._partition.rows)

    def get_custom_meta(self, global_indices: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the tags of those rows that have some. Objects that only Python can read stay closed."""
        tags = self._partition.tags
        return {i: with_numbers(tags[i]) for i in global_indices if i in tags}
