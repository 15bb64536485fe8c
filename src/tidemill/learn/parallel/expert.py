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


def check(model: Any) -> None:
    """Refuse a model without experts of a form that can be shared out."""
    if not any(experts.is_known(module) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has no experts of a form that can be shared out", "set learn.parallel.ep to 1"
        )


def apply(model: Any, cuts: Cuts, over: MeshLink, tp_rank: int = 0, tp_size: int = 1) -> Cuts:
    """Cut the experts of `model` in place; tensor parallelism, if any, cuts what is left of them after."""
    names = {id(p): name for name, p in model.named_parameters()}
    done = dict(cuts)
    for module in model.modules():
        if not experts.is_known(module):
            continue
        total = module.gate_up_proj.shape[0]
        for name, old in list(module.named_parameters(recurse=False)):
            full = names[id(old)]
            new = replace_parameter(module, name, narrow(old, Shard(0), over.rank, over.size))
            names[id(new)] = full
            done[full] = replace(done[full], is_expert=True)
        module.place = spread.ExpertPlace(over, total // over.size // tp_size, tp_rank, tp_size)
        module.forward = functools.partial(spread.forward, module, place=module.place, exchange=exchange)
    return done
