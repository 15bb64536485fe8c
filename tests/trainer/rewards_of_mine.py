"""A module beside a program, with a reward that other processes can import."""


def digits(sample) -> float:
    return sum(c.isdigit() for c in sample.response) / 4
