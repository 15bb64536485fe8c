"""A league: members, opponents, ratings, and what a resumed run finds."""

from __future__ import annotations

import pytest

from tidemill.environment.league import POLICY, START, League, Match, elo, member_name
from tidemill.recipe.environment import LeagueSettings


def league(folder, writer="0", **settings):
    return League(folder, LeagueSettings(every=2, **settings), writer)


def add(made, *versions):
    for version in versions:
        made.add(version, lambda path, v=version: path.write_text(str(v)))


def won(id, version, member, score=1.0):
    return Match(id, version, (POLICY, member_name(member)), (score, -score))


def test_elo_moves_by_what_was_not_expected():
    ratings = elo([won("a", 5, 2)], [2])
    assert ratings == {POLICY: START + 8, member_name(2): START - 8}
    even = elo([won("a", 5, 2, 0.0)], [2])
    assert even == {POLICY: START, member_name(2): START}


def test_a_member_enters_with_the_policys_rating():
    ratings = elo([won("a", 3, 2), won("b", 4, 2)], [2, 4, 6])
    assert ratings[member_name(4)] == START + 8 and ratings[member_name(6)] == ratings[POLICY] > START + 15


def test_ratings_do_not_depend_on_the_order_of_results():
    matches = [won(str(i), 4 + i // 3, 2, (-1.0) ** i) for i in range(9)]
    assert elo(matches, [2]) == elo(matches[::-1], [2])


def test_a_match_that_is_played_again_counts_once(tmp_path):
    first = league(tmp_path)
    add(first, 2)
    first.record([won("a", 3, 2), won("b", 3, 2)])
    again = league(tmp_path)
    again.record([won("b", 3, 2, -1.0)])
    assert again.score(member_name(2)) == (0.5, 2)
    assert league(tmp_path).ratings() == again.ratings()


def test_results_of_several_writers_are_one_table(tmp_path):
    one, other = league(tmp_path, "one"), league(tmp_path, "other")
    add(one, 2)
    add(other, 2)  # it was there
    one.record([won("a", 3, 2)])
    other.record([won("b", 3, 2)])
    assert one.ratings() == other.ratings() and one.score(member_name(2)) == (1.0, 2)
    assert one.members() == [2] and not list(tmp_path.glob("*.new"))


def test_the_newest_and_the_first_are_kept(tmp_path):
    made = league(tmp_path, keep=3)
    add(made, 0, 2, 4, 6, 8)
    assert made.members() == [0, 6, 8] and made.members(8) == [0, 6]
    assert made.wants(10) and not made.wants(8) and not made.wants(9)


def test_opponents_are_drawn_by_key_and_come_from_before(tmp_path):
    made = league(tmp_path, share=0.5)
    add(made, 0, 2, 4)
    drawn = [made.draw(str(i), 4) for i in range(200)]
    assert set(drawn) == {None, 0, 2} and drawn == [made.draw(str(i), 4) for i in range(200)]
    assert 60 < drawn.count(None) < 140
    assert {league(tmp_path, share=1.0).draw(str(i), 0) for i in range(9)} == {None}


def test_a_hard_opponent_is_one_that_wins(tmp_path):
    made = league(tmp_path, share=1.0, draw="hard")
    add(made, 0, 2)
    made.record([won(f"w{i}", 4, 0) for i in range(30)] + [won(f"l{i}", 4, 2, -1.0) for i in range(30)])
    drawn = [made.draw(str(i), 6) for i in range(200)]
    assert drawn.count(2) > 160


@pytest.mark.parametrize("end", ["", '["c", 3, ["pol'])
def test_a_line_that_is_being_written_waits(tmp_path, end):
    made = league(tmp_path)
    made.record([won("a", 3, 2)])
    with open(tmp_path / "results-x.jsonl", "w") as file:
        file.write('["b", 3, ["policy", "v00000002"], [1.0, -1.0]]\n' + end)
    assert {m.id for m in made.matches()} == {"a", "b"}
