"""Layers whose state goes along the sequence: state-space models, linear attention, short convolutions.

transformers' own layers compute them, batch by batch, and keep their state in transformers' cache. `mixers` finds these
layers and lets the context of a forward pass call them; `rows` calls them for packed samples, from nothing or from the
state that a shared prompt leaves; `states` is the cache that they are given meanwhile.
"""
