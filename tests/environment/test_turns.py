"""An engine that converses: what was sampled stays as it was, whatever it means as text."""

from __future__ import annotations

import time
from collections import deque

import pytest

from tidemill.environment.api import Task, Turn, last_said
from tidemill.environment.speech import Speech
from tidemill.errors import PlayError
from tidemill.recipe.config import EnvironmentSettings
from tidemill.rollout.engine import Completion, Partial, Request, Sampling
from tidemill.rollout.turns import TurnsEngine

EOS = 9


class Words:
    """A tokenizer that would betray a round trip: it reads 7 as it reads 1, and writes every a as 1."""

    all_special_tokens = ("<end>",)
    eos_token = "<end>"

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join({1: "a", 7: "a", 2: "b"}.get(t, "?") for t in tokens if t != EOS)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [{"a": 1, "b": 2}.get(c, 3) for c in text]


class Scripted:
    """An engine that says what it is told to, and remembers what it was asked."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns, self.asked, self.version = deque(turns), [], 0
        self.queue: list[tuple[Request, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.queue)

    def submit(self, request: Request) -> None:
        self.asked.append(request)
        self.queue += [(request, k) for k in range(request.n)]

    def step(self) -> list[Completion]:
        done = []
        for request, k in self.queue:
            said = self.turns.popleft()[: request.limits[k] if request.limits else None]
            finish = "stop" if said[-1] == EOS else "length"
            done.append(Completion(request, k, said, [-0.5] * len(said), [self.version] * len(said), finish))
        self.queue = []
        return done

    def cancel(self, request_id: int) -> None:
        self.cancelled = [r for r, _ in self.queue if r.id == request_id]

    def pause(self) -> list[Partial]:
        out, self.queue = [Partial(r, k, [], [], []) for r, k in self.queue], []
        return out

    def resume(self, partials: list[Partial]) -> None:
        self.queue += [(p.request, p.index) for p in partials]

    def load(self, weights, version: int) -> None:
        self.version = version


class Echo:
    """Answers with what it heard and a b; done after so many turns."""

    def __init__(self, task: Task, turns: int = 3, inline: bool = True) -> None:
        self.left, self.inline, self.heard = turns, inline, []

    def reset(self) -> str:
        return ""

    def step(self, text: str) -> Turn:
        self.heard.append(text)
        self.left -= 1
        return Turn(text + "b", is_done=self.left == 0, reward=1.0, is_inline=self.inline, parts={"said": len(text)})


class Broken(Echo):
    def step(self, text: str) -> Turn:
        raise RuntimeError("out of cards")


class Wordy(Echo):
    def step(self, text: str) -> Turn:
        return "just text"


class Wordless(Echo):
    def step(self, text: str) -> Turn:
        return Turn(None)


class Priceless(Echo):
    def step(self, text: str) -> Turn:
        return Turn("b", reward=None)


class Jammed(Echo):
    def close(self) -> None:
        raise RuntimeError("the door is stuck")


class Slow(Echo):
    def step(self, text: str) -> Turn:
        time.sleep(0.3)
        return super().step(text)


def engine(inner, kind=Echo, **settings) -> TurnsEngine:
    made = TurnsEngine(inner, EnvironmentSettings(name="nim", **settings), Speech(Words(), is_chat=False), [EOS])
    made.make = lambda task, **args: kind(task, **args)
    return made


def finish(playing: TurnsEngine) -> list[Completion]:
    done: list[Completion] = []
    while playing.has_work:
        done += playing.step()
    return done


def request(n: int = 1, most: int = 50, id: int = 5) -> Request:
    return Request(id, [4, 4], Sampling(max_tokens=most), n=n, task=Task("answer"))


def test_sampled_tokens_stay_and_answers_are_masked() -> None:
    inner = Scripted([7, EOS], [7, 7, EOS], [1, EOS])
    (made,) = _play(inner, request())
    assert made.tokens == [7, EOS, 1, 2, 7, 7, EOS, 1, 1, 2, 1, EOS]  # 7 is never read and written again as 1
    assert made.mask == [1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert made.logprobs == [-0.5 * m for m in made.mask]
    assert len(made.versions) == len(made.tokens)
    assert (made.finish, made.played.turns, made.played.reward) == ("stop", 3, 3.0)
    assert made.played.parts == {"said": 4.0}


def _play(inner, *requests, kind=Echo, **settings) -> list[Completion]:
    playing = engine(inner, kind, **settings)
    for each in requests:
        playing.submit(each)
    return finish(playing)


def test_each_turn_goes_on_from_the_very_tokens_so_far() -> None:
    inner = Scripted([7, EOS], [2, EOS], [1, EOS])
    _play(inner, request())
    assert [list(r.prompt) for r in inner.asked] == [[4, 4], [4, 4, 7, EOS, 1, 2], [4, 4, 7, EOS, 1, 2, 2, EOS, 2, 2]]
    assert len({r.id for r in inner.asked}) == 3  # random streams of their own


def test_the_samples_of_a_prompt_share_its_first_turn_and_part_then() -> None:
    inner = Scripted([7, EOS], [2, EOS], [1, EOS], [1, EOS])
    made = _play(inner, request(n=2), args={"turns": 2})
    assert [(r.n, len(r.prompt)) for r in inner.asked] == [(2, 2), (1, 6), (1, 6)]
    assert sorted((c.index, c.tokens[0]) for c in made) == [(0, 7), (1, 2)]
    assert all(c.request.id == 5 for c in made)


def test_a_conversation_ends_at_the_longest_length_however_it_is_made_up() -> None:
    (made,) = _play(Scripted([7, EOS], [7] * 50), request(most=7))
    assert len(made.tokens) <= 7 and made.finish == "length"
    assert made.played.turns == 2  # what was said last still reached the environment


def test_an_answer_that_does_not_fit_ends_the_conversation() -> None:
    (made,) = _play(Scripted([1, 1, 1, EOS]), request(most=6))
    assert (made.finish, made.mask) == ("length", [1, 1, 1, 1])


def test_turns_are_counted_and_bounded() -> None:
    (made,) = _play(Scripted([7, EOS], [7, EOS]), request(), max_turns=2)
    assert (made.finish, made.played.turns, made.mask[-1]) == ("length", 2, 1)


def test_a_turn_has_its_own_limit() -> None:
    inner = Scripted([7, 7, 7], [7, 7], [7])
    (made,) = _play(inner, request(), max_turn_tokens=1)
    assert made.mask == [1, 0, 0, 1, 0, 0, 1] and made.finish == "stop"


def test_an_environment_that_fails_ends_its_conversation_or_the_run() -> None:
    (made,) = _play(Scripted([7, EOS]), request(), kind=Broken)
    assert made.finish == "stop" and "out of cards" in made.played.error
    (made,) = _play(Scripted([7, EOS]), request(), kind=Wordy)
    assert "answered with 'just text', not with a Turn" in made.played.error
    with pytest.raises(PlayError, match="out of cards"):
        _play(Scripted([7, EOS]), request(), kind=Broken, on_error="fail")


def test_slow_environments_answer_side_by_side_and_one_that_hangs_is_left() -> None:
    began = time.monotonic()
    made = _play(Scripted(*[[7, EOS]] * 8), request(n=8), kind=Slow, workers=8, args={"turns": 1})
    assert len(made) == 8 and time.monotonic() - began < 1.5
    (made,) = _play(Scripted([7, EOS]), request(), kind=Slow, workers=1, timeout_s=0.05)
    assert "gave no answer in 0.05 s" in made.played.error


def test_a_request_without_a_task_passes_through() -> None:
    (made,) = _play(Scripted([7, EOS]), Request(3, [4], Sampling(max_tokens=5), user="mine"))
    assert (made.tokens, made.mask, made.played, made.request.user) == ([7, EOS], None, None, "mine")


def test_a_paused_conversation_goes_on_where_it_was() -> None:
    inner = Scripted([7, EOS], [7, EOS], [7, EOS])
    playing = engine(inner)
    playing.submit(request())
    playing.step()
    (partial,) = playing.pause()
    assert partial.request.id == 5 and partial.tokens == [7, EOS, 1, 2]
    playing.load(None, 3)
    playing.resume([partial])
    (made,) = finish(playing)
    assert made.versions[:2] == [0, 0] and made.versions[-1] == 3 and made.played.turns == 3
    with pytest.raises(PlayError, match="paused elsewhere"):
        playing.resume([partial])


def test_what_was_said_last_is_found_by_the_mask() -> None:
    assert [last_said(m) for m in ([1, 1], [1, 0, 1, 1], [0, 1, 1, 0], [0, 0], [])] == [0, 2, 1, 2, 0]


def test_a_conversation_calls_back_once_when_it_ends() -> None:
    heard: list[Completion] = []
    asked = Request(5, [4, 4], Sampling(max_tokens=50), n=2, task=Task("answer"), on_done=heard.append)
    done = _play(Scripted(*[[7, EOS]] * 6), asked)
    assert len(done) == 2 and heard == done


def test_a_callback_that_raises_costs_no_conversation() -> None:
    heard: list[int] = []

    def hear(completion: Completion) -> None:
        heard.append(completion.index)
        if completion.index == 0:
            raise ZeroDivisionError

    playing = engine(Scripted(*[[7, EOS]] * 6))
    playing.submit(Request(5, [4, 4], Sampling(max_tokens=50), n=2, task=Task("answer"), on_done=hear))
    with pytest.raises(ZeroDivisionError):
        finish(playing)
    assert [c.index for c in finish(playing)] == heard == [0, 1]


@pytest.mark.parametrize("kind, says", [(Wordless, "Turn"), (Priceless, "Turn"), (Jammed, "door is stuck")])
def test_an_answer_that_is_no_use_and_an_end_that_fails_cost_that_conversation_alone(kind: type, says: str) -> None:
    made = _play(Scripted(*[[7, EOS]] * 6), request(n=2), kind=kind)
    assert len(made) == 2 and all(c.finish == "stop" and says in c.played.error for c in made)
    with pytest.raises(PlayError, match=says):
        _play(Scripted(*[[7, EOS]] * 6), request(n=2), kind=kind, on_error="fail")


def test_a_sample_that_was_paused_elsewhere_costs_no_other() -> None:
    playing = engine(Scripted(*[[7, EOS]] * 6))
    playing.submit(request(n=2))
    playing.step()
    mine = playing.pause()
    with pytest.raises(PlayError, match="paused elsewhere"):
        playing.resume([*mine, Partial(request(id=6), 0, [], [], [])])
    playing.resume(mine)
    assert [c.finish for c in finish(playing)] == ["stop", "stop"]


def test_a_request_without_samples_is_the_engines_to_refuse() -> None:
    inner = Scripted()
    playing = engine(inner)
    playing.submit(request(n=0))
    playing.submit(Request(6, [4], n=2, limits=(3,), task=Task("answer")))
    assert [r.id for r in inner.asked] == [5, 6] and not playing.under_way


@pytest.mark.parametrize("odd", [{"prompt": None}, {"prompt": [-1]}, {"n": None}, {"n": 10**9}, {"limits": 3}])
def test_a_request_that_cannot_be_read_is_the_engines_to_refuse(odd: dict) -> None:
    inner = Scripted()
    playing = engine(inner)
    asked = Request(**{"id": 5, "prompt": [4, 4], "task": Task("answer"), **odd})
    inner.submit = inner.asked.append
    playing.submit(asked)
    assert inner.asked == [asked] and not playing.under_way


def test_a_paused_conversation_can_be_cancelled() -> None:
    inner = Scripted([7, EOS], [7, EOS])
    playing = engine(inner)
    playing.submit(request())
    playing.step()
    assert len(playing.pause()) == 1
    playing.cancel(5)
    (made,) = finish(playing)
    assert made.finish == "cancelled" and made.mask[:2] == [1, 1]
    assert not playing.under_way and not playing.paused
