"""A reward whose author wanted to look at it."""


def reward(sample):
    breakpoint()
    return 0.0
