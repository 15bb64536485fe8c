"""A reward that cannot be used where rewards run, though it can be imported elsewhere."""

import multiprocessing

if multiprocessing.current_process().name.startswith("reward"):
    raise RuntimeError("no licence was found")


def reward(sample):
    return 0.0
