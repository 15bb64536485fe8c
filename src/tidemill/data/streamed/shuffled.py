"""Permutations that need no memory: the place of a row in a pass is computed, forwards only, from a key."""

from __future__ import annotations

ROUNDS = 4
MASK = (1 << 64) - 1


def scattered(place: int, size: int, *key: int) -> int:
    """Return where `place` goes in a permutation of `range(size)` that the key chooses.

    A Feistel network permutes the numbers of twice as many bits as half of `size` needs; those that come out at `size`
    or beyond go through again until one is below (at most four tries on average).
    """
    if size < 2:
        return place
    half = ((size - 1).bit_length() + 1) // 2
    low = (1 << half) - 1
    salt = 0
    for part in key:
        salt = _mixed(salt ^ _mixed(part & MASK))
    while True:
        left, right = place >> half, place & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mixed(salt + turn + (right << 8)) & low)
        place = left << half | right
        if place < size:
            return place


def _mixed(x: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31
