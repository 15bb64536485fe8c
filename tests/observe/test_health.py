import random

import pytest

from tidemill.observe.health import MOST, shortened, signs, warnings

FINE = {
    "equal_reward_groups": 0.2,
    "accuracy": 0.5,
    "reward": 0.5,
    "truncated_share": 0.02,
    "entropy": 0.8,
    "old_kl": 0.001,
    "clip_share_low": 0.01,
    "clip_share_high": 0.01,
    "ratio_max": 1.5,
    "gap_mean": 1e-4,
    "kl": 0.01,
    "response_tokens": 100.0,
    "skipped_updates": 0.0,
    "critic/explained_variance": 0.5,
}


def test_a_healthy_run_gets_no_warning() -> None:
    assert warnings([FINE] * 30) == []
    assert warnings([]) == []


@pytest.mark.parametrize(
    ("sign", "change", "words"),
    [
        ("equal_groups", {"equal_reward_groups": 0.62}, "62% of groups have equal rewards"),
        ("equal_groups", {"equal_reward_groups": 0.7, "accuracy": 0.95}, "solved already"),
        ("truncation", {"truncated_share": 0.4}, "40% of responses are cut off"),
        ("entropy", {"entropy": 0.02}, "Entropy has fallen from 0.8 to 0.02"),
        ("old_kl", {"old_kl": 0.3}, "0.3 nats per token"),
        ("clipping", {"clip_share_low": 0.2, "clip_share_high": 0.2}, "40% of tokens are clipped"),
        ("ratio", {"ratio_max": 55.0}, "55 times as likely"),
        ("gap", {"gap_mean": 0.15}, "old_logprobs=recompute"),
        ("kl", {"kl": 3.0}, "3 nats per token away"),
        ("reward_errors", {"reward_errors": 2.0}, "10 rewards failed in the last 5 steps"),
        ("environment_errors", {"environment_errors": 1.0}, "5 conversations of the last 5 steps ended"),
        ("length", {"response_tokens": 300.0}, "from 100 to 300 tokens"),
        ("skipped", {"skipped_updates": 2.0}, "2 updates were skipped"),
        ("critic", {"critic/explained_variance": -0.2}, "does not explain"),
        ("repetition", {"repetition": 0.5}, "50% of word sequences repeat"),
    ],
)
def test_each_sign_is_told_in_words_with_a_remedy(sign, change, words) -> None:
    (found,) = signs([FINE] * 20 + [{**FINE, **change}] * 5)
    assert found.sign == sign
    assert words in found.sentence
    assert "Try" in found.sentence or "Fix" in found.sentence


def test_a_run_that_learns_from_examples_may_become_sure_of_them() -> None:
    steps = [{"loss": value, "nll": value, "entropy": value} for value in (4.5, 4.0, 3.0, 2.0, 1.0, *[0.01] * 20)]
    assert warnings(steps) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"not_finite_loss": 1.0, "not_finite_tensors": 9.0}, "the loss was not finite itself"),
        (
            {"not_finite_tensors": 4.0, "learned_tensors": 20.0, "not_finite_layer": 3.0},
            "4 of 20 tensors, from layer 3",
        ),
        ({"not_finite_tensors": 0.0}, "beyond float32"),
    ],
)
def test_a_skipped_update_is_explained(fault, words) -> None:
    fault = {"not_finite_loss": 0.0, "not_finite_layer": -1.0, "learned_tensors": 20.0, **fault}
    (found,) = signs([FINE] * 20 + [{**FINE, "skipped_updates": 1.0, **fault}, {**FINE, "skipped_updates": 1.0}])
    assert "1 updates were skipped" in found.sentence and words in found.sentence


def test_a_critics_skipped_updates_count_too() -> None:
    (found,) = signs([FINE] * 20 + [{**FINE, "critic/skipped_updates": 3.0}] * 5)
    assert "3 updates were skipped" in found.sentence


def test_one_odd_step_is_no_alarm() -> None:
    assert warnings([*[FINE] * 20, {**FINE, "truncated_share": 0.5, "entropy": 0.1}]) == []


def test_a_run_that_never_earns_anything_is_told() -> None:
    steps = [{"reward": 0.0, "accuracy": 0.0}] * 20
    assert any("No response has earned any reward" in w for w in warnings(steps))
    assert not any("No response" in w for w in warnings(steps[:10]))


def test_a_shortened_history_shows_the_same_signs():
    draw = random.Random(0)
    for _ in range(40):
        kept, whole = [], []
        change = draw.randrange(300)
        for step in range(300):
            one = dict(FINE) if step < change else {k: v * draw.choice((0, 0.5, 1, 3)) for k, v in FINE.items()}
            one |= {"reward": draw.choice((0.0, 0.0, 0.0, 1.0)) if draw.random() < 0.02 else 0.0}
            one |= {"skipped_updates": float(step > change)}
            whole.append(one)
            kept = shortened([*kept, one])
            if step % 7 == 0:
                assert signs(kept) == signs(whole)
        assert len(kept) <= MOST
