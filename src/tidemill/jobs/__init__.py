"""A queue of runs for one machine or one Ray cluster: priorities, limits, preemption by checkpoint, a journal."""
