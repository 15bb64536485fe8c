"""Expert parallel: each rank has some of a layer's experts; tokens go to the experts they chose and come back
(`models.ranks.spread`). Ranks along ep have different tokens, so an expert's gradient is complete over ep when the
backward pass is.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from tidemill.errors import ModelError
from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.context import exchange
from tidemill.learn.parallel.cuts import Cuts, narrow, replace_parameter
from tidemill.models.mixture import experts, spread
from tidemill.reshard.layouts.layout import Shard


def apply(model: Any, cuts: Cuts, over: MeshLink, tp_rank: int = 0, tp_size: int = 1) -> Cuts:
    """Cut the experts of `model` in place; tensor parallelism, if any, cuts what is left of them after."""
    names = {id(p): name for name, p in model.named_parameters()}
    done, found = dict(cuts), False
    for module in model.modules():
        if not experts.is_known(module):
            continue
        found = True
        total = module.gate_up_proj.shape[0]
        for name, old in list(module.named_parameters(recurse=False)):
            full = names[id(old)]
            new = replace_parameter(module, name, narrow(old, Shard(0), over.rank, over.size))
            names[id(new)] = full
            done[full] = replace(done[full], is_expert=True)
        module.place = spread.ExpertPlace(over, total // over.size // tp_size, tp_rank, tp_size)
        module.forward = functools.partial(spread.forward, module, place=module.place, exchange=exchange)
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no experts of a form that can be shared out", "set learn.parallel.ep to 1"
        )
    return done
