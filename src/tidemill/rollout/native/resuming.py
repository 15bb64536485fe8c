"""How a sample goes on or ends: what a paused one is resumed as, and whether a newest token is its last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tidemill.rollout.engine import Completion, Partial, token_limit
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.batch.sequences import Sequence, Trunk
from tidemill.rollout.native.check import RequestLimits, find_problem
from tidemill.rollout.native.pages.states import Hand
from tidemill.rollout.stops import ends_by_string


def taken_out(scheduler: Scheduler, hand_of: Callable[[Sequence], Hand], keep_cache: bool) -> Iterator[Partial]:
    """Every unfinished sample, in the order of arrival, with what it keeps of the cache."""
    for sequence in sorted(scheduler.running(), key=lambda s: int(scheduler.slots.arrival[s.slot])):
        cached = int(scheduler.slots.length[sequence.slot])
        hand = hand_of(sequence)
        cache = scheduler.keep(sequence, hand) if keep_cache else None
        scheduler.slots.save(sequence)
        scheduler.leave(sequence, remember=None if keep_cache else sequence.identity()[:cached], hand=hand)
        yield sequence.as_partial(cache)
    caches = scheduler.keep_waiting() if keep_cache else {}
    yield from (sequence.as_partial(caches.get(id(sequence))) for sequence in scheduler.remove(None))


def taken_up(
    scheduler: Scheduler, partials: Iterable[Partial], limits: RequestLimits
) -> Iterator[tuple[Partial, Trunk | Completion | None]]:
    """What each paused sample goes on as, or how it ends because nothing can be added to it. Of those that have not
    begun the first of a request is a trunk, which the others join."""
    fresh: dict[tuple[Any, ...], deque[Sequence]] = {}
    for p in partials:
        sequence = Sequence(p.request, p.index, list(p.tokens), list(p.logprobs), list(p.versions), p.kept)
        ending = ended(sequence, limits)
        if ending is not None or p.tokens:
            yield p, ending or trunk_of(scheduler, sequence, p.cache)
            continue
        # Ids are the caller's, and may come twice.
        one = (p.request.id, tuple(p.request.prompt), tuple(tile.digest for tile in p.request.tiles))
        members = fresh.setdefault(one, deque())
        members.append(sequence)
        yield p, scheduler.trunk(members, is_sole=False) if len(members) == 1 else None


def ended(sequence: Sequence, limits: RequestLimits) -> Completion | None:
    """How a paused sample ends that this engine cannot add a token to."""
    request, made = sequence.request, len(sequence.tokens)
    problem = find_problem(request, limits)
    if problem:
        return sequence.as_completion("error", problem)
    if made >= token_limit(request, sequence.index) or len(request.prompt) + made >= limits.max_len:
        return sequence.as_completion("length")
    return None


def trunk_of(scheduler: Scheduler, sequence: Sequence, cache: Any) -> Trunk:
    """An unfinished sample to go on with: its pages are its own again, or it is read from the start."""
    trunk = scheduler.trunk(deque([sequence]), is_sole=True)
    if cache in scheduler.kept:
        scheduler.kept.remove(cache)
        trunk.kept = cache if cache.pages or cache.copy is not None else None
    return trunk


def completes_a_stop(scheduler: Scheduler, slot: int, tokenizer: Any) -> bool:
    """Whether the newest token of the slot completes one of the request's own stops."""
    slots, sequence = scheduler.slots, scheduler.sequence[slot]
    assert sequence is not None
    how = sequence.request.sampling
    if int(slots.token[slot]) in how.stop_tokens:
        return True
    if not how.stop_strings:
        return False
    made = sequence.tokens + slots.tokens[slot, : slots.made[slot]].tolist()
    return ends_by_string(made, how.stop_strings, tokenizer)
