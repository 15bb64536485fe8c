"""Stop strings are found in the tail where they are found in the whole text."""

from __future__ import annotations

import numpy as np

from tidemill.rollout.stops import ends_by_string


class Pieces:
    """Tokens are pieces of bytes, which may cut a character, or nothing at all."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf8", "replace")


def test_a_stop_is_found_however_tokens_cut_it() -> None:
    text = "aé→🙂\n\nEND!b".encode()
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(1500):
        runs = zip(rng.integers(0, len(text), 6), rng.integers(1, 6, 6))
        pieces = [bytes([b]) for b in sorted(set(text))] + [text[at : at + size] for at, size in runs] + [b""] * 8
        tokenizer = Pieces(pieces)
        stops = tuple(map(str, rng.choice(["é", "→", "🙂", "\n\n", "END", "é→", "!b"], 2, replace=False)))
        made: list[int] = []
        is_in_all = False
        while len(made) < 40 and not is_in_all:
            made.append(int(rng.integers(len(pieces))))
            is_in_all = any(stop in tokenizer.decode(made) for stop in stops)
            assert ends_by_string(made, stops, tokenizer) == is_in_all, (stops, [pieces[t] for t in made])
        found += is_in_all
    assert found > 500
