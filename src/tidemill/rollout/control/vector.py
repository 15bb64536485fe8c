"""The environments of a run's vectors, and one fragment of some of them.

Vector v has slots v·n to v·n + n − 1. Its fragment k begins where fragment k − 1 ended. A process that has not made
that one finds in the chain how the environments came there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.chain import FOLDER, Chain
from tidemill.environment.vector.duel import ANSWERS, DuelSlots
from tidemill.environment.vector.random import seeds_of
from tidemill.environment.vector.slots import GOES_ON, TRUNCATED, Slots
from tidemill.models.network.network import ACTIONS, ENDS, NEXT, OBSERVATIONS, STATE
from tidemill.models.policy import Policy
from tidemill.rollout.control.fragment import Episodes, Fragment

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
EVALUATION = 1 << 40  # slots of evaluations, whose episodes never have a training episode's seed


@dataclass(slots=True)
class Lives:
    """Where each slot is in its episode."""

    observations: Array
    returns: npt.NDArray[np.float64]  # of the episode so far
    lengths: Ints
    trace: npt.NDArray[np.float64]  # the discounted return so far, for the scale of rewards
    state: npt.NDArray[np.float32]  # of the policy's memory
    shown: npt.NDArray[np.float64]  # by vector: mean return of the episodes that ended last

    @staticmethod
    def of(count: int, vectors: int, policy: Policy, shape: Sequence[int]) -> Lives:
        dtype = np.uint8 if policy.spaces.pixels else np.float32
        return Lives(
            np.zeros((count, *shape), dtype),
            np.zeros(count),
            np.zeros(count, np.int64),
            np.zeros(count),
            np.zeros((count, policy.state_width), np.float32),
            np.zeros(vectors),
        )


class Vectors:
    def __init__(
        self, policy: Any, slots: Slots, rows: int, ticks: int, seed: int, gamma: float, wanted: Sequence[str],
        folder: Path | None, explores: Callable[[int], float] = lambda decisions: 0.0,
    ) -> None:  # fmt: skip
        """`rows`: slots of a vector. `wanted`: the columns that rollout writes. `folder`: the run's, for the chain.
        `explores`: share of random decisions, by how many were made before."""
        self.policy, self.slots, self.rows, self.ticks, self.seed = policy, slots, rows, ticks, seed
        self.gamma, self.wanted, self.explores = gamma, set(wanted), explores
        self.count = slots.count // rows
        self.duel = slots if isinstance(slots, DuelSlots) else None
        self.opening = np.full((slots.count, ANSWERS), -1, np.int16)
        self.lives = Lives.of(slots.count, self.count, policy, slots.spaces.observation)
        self.at = [-1] * self.count  # the fragment that comes next in each vector as its slots are now
        self.chains = [self._chain(folder, v) for v in range(self.count)] if folder is not None else []

    def _chain(self, folder: Path, vector: int) -> Chain:
        ticks, rows, head = self.ticks, self.rows, self.policy.head
        form: dict[str, tuple[type, tuple[int, ...]]] = {
            ACTIONS: (head.dtype, (ticks, rows, head.draws)),
            ENDS: (np.uint8, (ticks, rows)),
            "made": (np.uint8, (ticks, rows)),
            "logprobs": (np.float32, (ticks, rows)),
            STATE: (np.float32, (rows, self.policy.state_width)),
            "shown": (np.float64, ()),
            "version": (np.int64, ()),
        }
        if self.duel is not None:  # what the others did in each step, what they did first, and who they are
            form |= {"answers": (np.int16, (ticks, rows, ANSWERS)), "opening": (np.int16, (rows, ANSWERS))}
            form |= {"opponent": (np.int64, (rows,))}
        return Chain(folder / FOLDER / f"vector-{vector:04d}.bin", form)

    def own(self, vector: int) -> Ints:
        return np.arange(vector * self.rows, (vector + 1) * self.rows)

    # Where a vector is

    def is_known(self, vector: int, number: int) -> bool:
        """Whether the state before fragment `number` is here, or can be brought back."""
        return self.at[vector] == number or number == 0 or self._read(vector, number - 1) is not None

    def bring(self, vector: int, number: int) -> None:
        """Put a vector's slots where fragment `number` begins: as they are, by their moves, or in new episodes."""
        if self.at[vector] == number:
            return
        own = self.own(vector)
        last = self._read(vector, number - 1)
        if last is None:
            self._begin(own, np.full(self.rows, number * self.ticks))
            self.lives.shown[vector] = 0.0
        else:
            self._play_again(vector, number)
            self.lives.shown[vector] = float(last["shown"])
            self.lives.state[own] = last[STATE]
        self.at[vector] = number

    def _read(self, vector: int, number: int) -> Any:
        return self.chains[vector].read(number) if self.chains else None

    def _begin(self, own: Ints, ticks: Ints, opening: Array | None = None) -> None:
        """`opening`: what the others did first, where this is not chance any more."""
        self.script(own, opening)
        self.lives.observations[own] = self.slots.reset(own, seeds_of(self.seed, own, ticks))
        if self.duel is not None:
            self.opening[own] = self.duel.answers[own]
        for values in (self.lives.returns, self.lives.lengths, self.lives.trace, self.lives.state):
            values[own] = 0

    def _play_again(self, vector: int, number: int) -> None:
        """From the first of the fragments in which an episode that still runs began."""
        own, ticks = self.own(vector), self.ticks
        records: list[Any] = []
        born = np.full(self.rows, -1, np.int64)  # tick at which each slot's episode began
        first = number - 1
        while first >= 0 and (record := self._read(vector, first)) is not None:
            records.insert(0, record)
            ended = record[ENDS] != GOES_ON
            last = np.where(ended.any(0), ticks - np.argmax(ended[::-1], 0), -1)
            if not self.slots.is_joint:
                born = np.where((born < 0) & (last >= 0), first * ticks + last, born)
                if (born >= 0).all():
                    break
            first -= 1
        start = number - len(records)
        born[born < 0] = start * ticks
        opening = None
        if self.duel is not None:
            opening = records[0]["opening"].copy()
            for slot in np.flatnonzero(born > start * ticks).tolist():
                i, t = divmod(int(born[slot]) - 1 - start * ticks, ticks)
                opening[slot, 0] = records[i]["answers"][t, slot, 1]
        self._begin(own, born if not self.slots.is_joint else np.full(self.rows, start * ticks), opening)
        for i, record in enumerate(records):
            for t in range(ticks):
                tick = (start + i) * ticks + t
                chosen = np.flatnonzero(born <= tick) if not self.slots.is_joint else np.arange(self.rows)
                if len(chosen):
                    self.script(own[chosen], record["answers"][t, chosen] if self.duel is not None else None)
                    self._step_again(own[chosen], record[ACTIONS][t, chosen], tick)
        if self.duel is not None:
            self.duel.opponent[own] = records[-1]["opponent"]
            self.script(own, None)

    def script(self, own: Ints, answers: Array | None) -> None:
        """What the others will do in these slots; None: what they like."""
        if self.duel is None:
            return
        self.duel.script = None
        if answers is not None:
            self.duel.script = np.zeros((self.slots.count, ANSWERS), np.int64)
            self.duel.script[own] = answers

    def _step_again(self, own: Ints, actions: Array, tick: int) -> None:
        lives = self.lives
        stepped = self.slots.step(
            own, self.policy.moves(actions), seeds_of(self.seed, own, np.full(len(own), tick + 1))
        )
        lives.observations[own] = stepped.observations
        made = np.ones(len(own), np.bool_) if stepped.made is None else stepped.made
        lives.returns[own] += stepped.rewards
        lives.lengths[own] += made
        lives.trace[own] = lives.trace[own] * self.gamma + stepped.rewards
        ended = own[stepped.ends != GOES_ON]
        for values in (lives.returns, lives.lengths, lives.trace):
            values[ended] = 0

    # Fragments

    def begin(self, asked: Sequence[tuple[int, int]], groups: Sequence[int], again: bool) -> Run:
        """`asked`: vector and number of the fragment of each group."""
        for vector, number in asked:
            self.bring(vector, number)
            self.at[vector] = -1  # until the fragment is done
        records = [self._read(v, k) for v, k in asked] if again else []
        return Run(self, list(asked), list(groups), [] if any(r is None for r in records) else records)

    def close(self) -> None:
        self.slots.close()


class Run:
    """Fragments of some vectors, side by side."""

    def __init__(
        self, vectors: Vectors, asked: list[tuple[int, int]], groups: list[int], records: Sequence[Any] = ()
    ) -> None:
        """`records`: of the same fragments, made before: their moves are played once more."""
        self.vectors, self.asked, self.records, self.again, self.t = vectors, asked, records, bool(records), 0
        policy, ticks = vectors.policy, vectors.ticks
        self.own = np.concatenate([vectors.own(v) for v, _ in asked])
        size, lives = len(self.own), vectors.lives
        begins = np.repeat([k * ticks for _, k in asked], vectors.rows)
        self.seeds = seeds_of(vectors.seed, self.own, begins[None] + np.arange(1, ticks + 1)[:, None])
        head = policy.head
        self.noise = None if records else _noise(vectors.seed, groups, ticks, vectors.rows, head.draws, head.is_uniform)
        self.observations = np.empty((ticks, size, *lives.observations.shape[1:]), lives.observations.dtype)
        self.actions = np.empty((ticks, size, head.draws), head.dtype)
        self.logprobs, self.values, self.next_values = (np.zeros((ticks, size), np.float32) for _ in range(3))
        self.rewards = np.zeros((ticks, size))
        self.ends = np.zeros((ticks, size), np.uint8)
        self.made = np.ones((ticks, size), np.bool_)
        self.next = np.empty_like(self.observations) if NEXT in vectors.wanted else None
        self.state = lives.state[self.own].copy()  # before the first decision
        self.answers = None if vectors.duel is None else np.empty((ticks, size, ANSWERS), np.int16)
        self.opening = vectors.opening[self.own].copy()
        self.has_values = "values" in vectors.wanted
        self.explore = vectors.explores(max(k for _, k in asked) * ticks * vectors.slots.count)
        self.version = 0

    def advance(self, ticks: int, version: int) -> bool:
        """Make some more decisions; whether the fragments are done."""
        self.version = version if self.t == 0 else min(self.version, version)
        for _ in range(min(ticks, self.vectors.ticks - self.t)):
            self._tick()
        return self.t == self.vectors.ticks

    def _tick(self) -> None:
        vectors, t = self.vectors, self.t
        lives, policy = vectors.lives, vectors.policy
        seen = lives.observations[self.own]
        self.observations[t] = seen
        if self.again:
            self.actions[t] = np.concatenate([r[ACTIONS][t] for r in self.records])
            self.logprobs[t] = np.concatenate([r["logprobs"][t] for r in self.records])
        else:
            state = lives.state[self.own] if policy.state_width else None
            assert self.noise is not None
            acted = policy.act(seen, self.noise[t], state, self.explore)
            self.actions[t], self.logprobs[t] = acted.actions, acted.logprobs
            if self.has_values:
                self.values[t] = acted.values
            if acted.state is not None:
                lives.state[self.own] = acted.state
        if self.answers is not None:
            vectors.script(self.own, np.concatenate([r["answers"][t] for r in self.records]) if self.again else None)
        stepped = vectors.slots.step(self.own, policy.moves(self.actions[t]), self.seeds[t])
        if self.answers is not None and vectors.duel is not None:
            self.answers[t] = vectors.duel.answers[self.own]
        self.rewards[t], self.ends[t] = stepped.rewards, stepped.ends
        lives.observations[self.own] = stepped.observations
        if stepped.made is not None:
            self.made[t] = stepped.made
        if self.next is not None:
            self.next[t] = stepped.observations
        if stepped.ends.any():
            self._end(stepped.ends, stepped.finals)
        self.t += 1

    def _end(self, ends: Array, finals: Array) -> None:
        lives, policy, t = self.vectors.lives, self.vectors.policy, self.t
        ended, cut = np.flatnonzero(ends), np.flatnonzero(ends == TRUNCATED)
        if self.next is not None:
            self.next[t, ended] = finals[ended]
        if len(cut) and self.has_values:
            state = lives.state[self.own[cut]] if policy.state_width else None
            self.next_values[t, cut] = policy.judge(finals[cut], state)
        if policy.state_width:
            lives.state[self.own[ended]] = 0

    def fragments(self) -> list[Fragment]:
        """One for each vector, once all ticks are made. The chain has them before anybody else."""
        vectors, policy, lives = self.vectors, self.vectors.policy, self.vectors.lives
        if self.has_values:
            state = lives.state[self.own] if policy.state_width else None
            self._follow(policy.judge(lives.observations[self.own], state))
        gains = self._trace() if "gains" in vectors.wanted else None
        made = []
        for i, (vector, number) in enumerate(self.asked):
            rows = slice(i * vectors.rows, (i + 1) * vectors.rows)
            episodes = self._episodes(rows)
            if episodes.returns:
                lives.shown[vector] = float(np.mean(episodes.returns))
            elif number == 0:
                lives.shown[vector] = float(lives.returns[self.own[rows]].mean())
            fragment = Fragment(
                columns={name: values[:, rows] for name, values in self._columns().items() if name in vectors.wanted},
                made=self.made[:, rows],
                of_rows=self._of_rows(rows, gains),
                version=self.version,
                episodes=episodes,
                shown=float(lives.shown[vector]),
                is_again=self.again,
            )
            if vectors.chains and not self.again:
                self._keep(vector, number, rows, fragment.shown)
            vectors.at[vector] = number + 1
            made.append(fragment)
        return made

    def _columns(self) -> dict[str, Array]:
        columns: dict[str, Array] = {
            OBSERVATIONS: self.observations,
            ACTIONS: self.actions,
            "logprobs": self.logprobs,
            "values": self.values,
            "next_values": self.next_values,
            "rewards": self.rewards.astype(np.float32),
            ENDS: self.ends,
        }
        return columns | ({} if self.next is None else {NEXT: self.next})

    def _of_rows(self, rows: slice, gains: Array | None) -> dict[str, Array]:
        wanted, count = self.vectors.wanted, rows.stop - rows.start
        found: dict[str, Array] = {}
        if "reward_scale" in wanted:
            found["reward_scale"] = np.full(count, self.vectors.policy.reward_scale, np.float32)
        if gains is not None:
            found["gains"] = gains[rows]
        if STATE in wanted:
            found[STATE] = self.state[rows]
        return found

    def _follow(self, after: Array) -> None:
        """The value after each decision: of the next one, or of what an episode that was cut off ended with."""
        later = np.concatenate([self.values[1:], after[None]])
        self.next_values = np.where(self.ends == GOES_ON, later, self.next_values)

    def _trace(self) -> Array:
        """(rows, 3) count, sum and sum of squares of the discounted returns so far, at every decision."""
        trace, gamma = self.vectors.lives.trace[self.own], self.vectors.gamma
        sums = np.zeros((3, len(self.own)))
        for t in range(self.t):
            trace = trace * gamma + self.rewards[t]
            sums += self.made[t], trace, np.square(trace)
            trace[self.ends[t] != GOES_ON] = 0.0
        self.vectors.lives.trace[self.own] = trace
        return sums.T.copy()

    def _episodes(self, rows: slice) -> Episodes:
        lives, found = self.vectors.lives, Episodes()
        own = self.own[rows]
        rewards, made, ends = self.rewards[:, rows], self.made[:, rows], self.ends[:, rows]
        for i, slot in enumerate(own.tolist()):
            start = 0
            for t in np.flatnonzero(ends[:, i]).tolist():
                found.returns.append(_one_by_one(lives.returns[slot], rewards[start : t + 1, i]))
                found.lengths.append(int(lives.lengths[slot] + made[start : t + 1, i].sum()))
                lives.returns[slot] = lives.lengths[slot] = 0
                start = t + 1
            lives.returns[slot] = _one_by_one(lives.returns[slot], rewards[start:, i])
            lives.lengths[slot] += made[start:, i].sum()
        return found

    def _keep(self, vector: int, number: int, rows: slice, shown: float) -> None:
        self.vectors.chains[vector].write(
            number,
            actions=self.actions[:, rows],
            ends=self.ends[:, rows],
            made=self.made[:, rows],
            logprobs=self.logprobs[:, rows],
            state=self.vectors.lives.state[self.own[rows]],
            shown=shown,
            version=self.version,
            **self._others(rows),
        )

    def _others(self, rows: slice) -> dict[str, Array]:
        if self.answers is None or self.vectors.duel is None:
            return {}
        opponents = self.vectors.duel.opponent[self.own[rows]]
        return {"answers": self.answers[:, rows], "opening": self.opening[rows], "opponent": opponents}


def _one_by_one(before: float, rewards: Array) -> float:
    """The sum in the order of time, so that it does not tell where fragments were cut."""
    return float(np.cumsum(np.concatenate([[before], rewards]))[-1])


def _noise(seed: int, groups: Sequence[int], ticks: int, rows: int, draws: int, is_uniform: bool) -> Array:
    """(ticks, all rows, draws): a stream for each group, whatever is made beside it."""
    made = []
    for group in groups:
        stream = np.random.Generator(np.random.Philox(key=np.array([seed, group], np.uint64)))
        shape = (ticks, rows, draws)
        made.append(stream.random(shape, np.float32) if is_uniform else stream.standard_normal(shape, np.float32))
    return np.concatenate(made, 1)
