"""How the calls of a sample become trajectories and a row."""

from __future__ import annotations

from tidemill.rollout.engine import Completion, Request
from tidemill.serve.programs.capture import row_of, trajectories


def call(prompt, tokens, version=0):
    return Completion(Request(1, prompt), 0, tokens, [-1.0] * len(tokens), [version] * len(tokens), "stop")


def test_a_call_that_repeats_all_tokens_goes_on_with_its_trajectory():
    (one,) = trajectories([call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6], version=2)])
    assert one.tokens == [1, 2, 3, 4, 5, 6] and one.mask == [1, 1, 0, 1] and one.versions == [0, 0, 2, 2]


def test_a_history_that_was_changed_begins_another():
    found = trajectories([call([1, 2], [3, 4]), call([1, 2, 3, 9], [6]), call([1, 2, 3, 4, 5], [7])])
    assert [t.tokens for t in found] == [[1, 2, 3, 4, 5, 7], [1, 2, 3, 9, 6]]


def test_two_answers_to_one_prompt_share_no_sampled_token():
    found = trajectories([call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3], [5])])
    assert [t.mask for t in found] == [[1, 0, 1], [1]] and found[1].prompt_length == 3


def test_a_row_has_each_sampled_token_once_and_says_where_trajectories_begin():
    calls = [call([1, 2], [3, 4]), call([7, 8], [9]), call([1, 2, 3, 4, 5], [6])]
    row = row_of(trajectories(calls), [0], 99, 0)
    whole = [*row.prompt, *row.tokens]
    assert whole == [1, 2, 3, 4, 5, 6, 7, 8, 9] and row.starts == [6] and row.mask == [1, 1, 0, 1, 0, 0, 1]
    assert [row.tokens[t] for t in row.turns] == [3, 6, 9] and row.calls == [0, 2, 1]


def test_a_sample_without_answers_is_its_prompt_and_a_masked_end():
    row = row_of([], [5, 6], 99, 3)
    assert (row.prompt, row.tokens, row.mask, row.versions) == ([5, 6], [99], [0], [3])
