"""Making a model ready to be called here, and calling its decoder with the tokens of one pass: the one way in which
learner, engine and trial do it."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from tidemill.models.attention.registry import Context, serve
from tidemill.models.attention.wholes import Dense
from tidemill.models.mixture import experts
from tidemill.models.parts import decoder_of
from tidemill.models.recurrent import mixers


def plug(model: Any) -> None:
    """Let the model's experts and recurrent layers run as they do here."""
    experts.plug(model)
    mixers.plug(model)


def hidden_states(model: Any, context: Context, **inputs: Any) -> Tensor:
    """(tokens, width) of the decoder. `inputs`: what it is called with, (1, tokens, …) each."""
    return through(decoder_of(model), context, **inputs).squeeze(0)  # not [0], whose gradient is a zeroed copy


def through(decoder: Any, context: Context, **inputs: Any) -> Tensor:
    """(1, tokens, width) of this decoder."""
    if isinstance(context, Dense):
        return context.through(decoder, inputs["input_ids"][0])
    known, takes_more = parameters_of(decoder)
    given = {**inputs, "use_cache": False, "tide": context}
    given = {name: value for name, value in given.items() if takes_more or name in known}
    with serve(context):
        out: Tensor = decoder(**given).last_hidden_state
    return out


def parameters_of(module: Any) -> tuple[frozenset[str], bool]:
    """What a module's forward pass takes by name, and whether it takes more."""
    kind: Any = type(module)
    return _parameters_of(kind)


@cache
def _parameters_of(kind: Any) -> tuple[frozenset[str], bool]:
    named = inspect.signature(inspect.unwrap(kind.forward)).parameters
    return frozenset(named), any(one.kind is inspect.Parameter.VAR_KEYWORD for one in named.values())
