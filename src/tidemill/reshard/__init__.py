"""The weight flow: from the learner's layout to the rollout's, with the learner's own copy swapped to the host."""
