"""The worker that scores samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.dock import Counts, Dock, Lease, Want
from tidemill.environment.api import last_said
from tidemill.errors import RewardError
from tidemill.flow.stages.rolling import FINISH
from tidemill.flow.stages.stage import committed
from tidemill.flow.tally import Tally
from tidemill.reward.api import FROM, Sample, Scored
from tidemill.reward.score import Scorer
from tidemill.reward.verifiers.text import repetition
from tidemill.tiles import images, of_batch


class RewardWorker:
    """Scores samples in the scorer's own threads or processes while others go on."""

    name = "reward"

    def __init__(
        self,
        dock: Dock,
        scorer: Scorer,
        decode: Callable[[list[int]], str],
        tally: Tally,
        keep_samples: Callable[[dict[str, Any]], None],
        show: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`show`: decodes tokens for people, with special tokens visible; without it, as for rewards."""
        self.show = show or decode
        self.dock, self.scorer, self.decode, self.tally, self.keep_samples = dock, scorer, decode, tally, keep_samples
        self.scoring: list[tuple[Lease, list[Sample], Future[list[Scored]]]] = []
        self._since, self._rows = 0.0, 0  # when scoring began, and samples since

    def begin(self, first_group: int, tag: str | None) -> None:
        """Do nothing: it scores samples of any step."""

    @property
    def waits(self) -> bool:
        return bool(self.scoring)

    def poll(self) -> bool:
        lease = self.dock.take(self.name, Want(rows=1024))
        if lease is not None:
            self._since = self._since if self.scoring else self.tally.now()
            self._rows += lease.batch.rows
            prompts: dict[tuple[int, ...], str] = {}  # the same for a whole group
            shown = [images(tiles) for tiles in of_batch(lease.batch)]
            samples = [self._sample(lease.batch.row(i), prompts, shown[i]) for i in range(lease.batch.rows)]
            self.scoring.append((lease, samples, self.scorer.submit(samples)))
        is_done = [future.done() for *_, future in self.scoring]  # read once: it may become true between two reads
        done = [s for s, done in zip(self.scoring, is_done) if done]
        self.scoring = [s for s, done in zip(self.scoring, is_done) if not done]
        for finished in done:
            self._commit(*finished)
        if done and not self.scoring:
            self.tally.took(self.name, self._since, rows=self._rows)
            self._rows = 0
        return lease is not None or bool(done)

    def _sample(self, row: dict[str, Any], prompts: dict[tuple[int, ...], str], shown: Sequence[Any]) -> Sample:
        start = int(row["prompt_length"])
        tokens = row["tokens"].tolist()
        prompt = tuple(tokens[:start])
        if prompt not in prompts:
            prompts[prompt] = self.decode(tokens[:start])
        played = json.loads(row["played"]) if "played" in row else {}
        transcript = self.decode(tokens[start:])
        is_said_last = bool(played)  # of a conversation, a reward judges the last turn
        return Sample(
            prompt=prompts[prompt],
            response=self.decode(tokens[start + last_said(row["mask"]) :]) if is_said_last else transcript,
            transcript=transcript,
            tokens=tokens,
            images=shown,
            played=played,
            answer=row["answer"],
            meta=json.loads(row["meta"]),
            id=int(row[ID]),
            where=row["where"],
            finish=FINISH[int(row["finish"])],
        )

    def _commit(self, lease: Lease, samples: list[Sample], future: Future[list[Scored]]) -> None:
        scored = future.result()
        outputs = Batch(
            {
                "reward": np.array([r.value for r in scored], np.float32),
                "correct": np.array([r.correct for r in scored], np.uint8),
                "parts": Column.text([json.dumps(dict(r.parts)) for r in scored]),
            }
        )
        if any(r.error for r in scored) and self.scorer.rewards.on_error == "fail":
            raise RewardError(
                next(r.error for r in scored if r.error), "fix the function, or set rewards.on_error=zero (or drop)"
            )
        is_dropped = self.scorer.rewards.on_error == "drop"
        dropped = {int(g) for g, r in zip(lease.batch.values(GROUP), scored) if r.error and is_dropped}
        drop = [int(i) for i, g in zip(lease.batch.values(ID), lease.batch.values(GROUP)) if int(g) in dropped]
        batch = lease.batch
        if committed(lease, outputs, drop, reward_counts(samples, scored, set(drop))):
            self._keep(batch, samples, scored)

    def _keep(self, batch: Batch, samples: list[Sample], scored: list[Scored]) -> None:
        """Keep a sample for people to look at."""
        versions, groups = batch["versions"], batch.values(GROUP).tolist()
        starts, prompts = batch.values("prompt_length").tolist(), dict[int, str]()
        for i, (sample, result) in enumerate(zip(samples, scored)):
            start, group = starts[i], groups[i]
            if group not in prompts:
                prompts[group] = self.show(list(sample.tokens[:start]))
            self.keep_samples(
                {
                    "id": sample.id,
                    "group": group,
                    "prompt": prompts[group],
                    "response": self.show(list(sample.tokens[start:])),
                    "answer": sample.answer,
                    "reward": result.value,
                    "rewards": dict(result.parts),
                    "correct": result.correct,
                    "finish": sample.finish,
                    "versions": sorted(set(versions[i].tolist())),
                    **_tokens(sample, versions[i].tolist(), batch["mask"][i].tolist() if "mask" in batch else None),
                    **({"error": result.error} if result.error else {}),
                }
            )


def _tokens(sample: Sample, versions: list[int], mask: list[int] | None) -> dict[str, Any]:
    """Return the response token by token, so that a page can colour it; versions and mask only where they differ."""
    found: dict[str, Any] = {"tokens": sample.tokens[len(sample.tokens) - len(versions) :]}
    if len(set(versions)) > 1:
        found["token_versions"] = versions
    if mask is not None and not all(mask):
        found["mask"] = mask
    return found


def reward_counts(samples: list[Sample], scored: list[Scored], dropped: set[int]) -> Counts:
    sums, means = [], []
    for sample, result in zip(samples, scored):
        averaged = {"reward": result.value, "accuracy": float(result.correct), "repetition": -repetition(sample)}
        if source := sample.meta.get(FROM):
            averaged |= {f"source/{source}/{name}": averaged[name] for name in ("reward", "accuracy")}
        means.append(averaged | {f"reward/{part}": value for part, value in result.parts.items()})
        is_counted = {"reward_errors": result.error is not None, "dropped_samples": sample.id in dropped}
        is_counted |= {f"source/{source}/samples": True} if source else {}
        sums.append({name: 1.0 for name, is_so in is_counted.items() if is_so})
    return Counts.of_rows(sums, means)
