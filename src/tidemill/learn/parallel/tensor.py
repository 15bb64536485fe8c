"""Tensor parallelism from the model's own plan, with the residual stream and its norms cut along the sequence.

Between blocks a rank has some of the row's tokens. A block (attention, feed-forward) gathers them, computes its heads
or its share of the width, and what it makes is a part of a sum that a reduce-scatter turns back into tokens.
Parameters become plain tensors of this rank's rows or columns, so the modules' own code runs as it is. Blocks that
the plan does not cut (latent attention) are computed whole by every rank.

Key/value heads fewer than ranks are held by several neighbours each, whose gradients add up. Experts go round the
ranks: each computes its own for all tokens, which costs the same exchange as cutting every expert and keeps their
products large.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.learn.parallel.collectives import MeshLink, copy_tokens, gather_tokens, keep_tokens, scatter_tokens
from tidemill.learn.parallel.cuts import Cut, Cuts, narrow, replace_parameter
from tidemill.models.lora import LoraLinear
from tidemill.models.mixture import experts
from tidemill.models.parts import decoder_of, layers_of
from tidemill.reshard.layouts.layout import Replicate, Shard

COLUMNS, ROWS, WHOLE, EXPERTS = "colwise", "rowwise", "replicated_with_grad_allreduce", "moe_tp_experts"
KNOWN = frozenset({COLUMNS, ROWS, WHOLE, EXPERTS, "packed_colwise"})
KEYS = ("k_proj", "v_proj")


def apply(model: Any, cuts: Cuts, over: MeshLink) -> Cuts:
    """Cut `model` in place; gives the table with what became of each parameter."""
    plan = {f"{k}": v for k, v in (getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}).items()}
    if not plan:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan in transformers", "use learn.parallel.fsdp instead"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    done = dict(cuts)
    for i, layer in enumerate(layers_of(model)):
        for child_name, child in layer.named_children():
            styles = dict(_styles(plan, f"layers.{i}.{child_name}", child))
            _cut_child(child, styles, names, done, over, model)
    _sum_gradients(_final_norms(model), names, done)
    _cut_embedding(model, names, done, over)
    return done


def _styles(plan: dict[str, str], at: str, child: Any) -> Iterator[tuple[str, str]]:
    """Module or parameter inside a block → how the plan cuts it."""
    inside = [n for n, _ in child.named_modules() if n] + [n for n, _ in child.named_parameters()]
    for name in inside:
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(f"{at}.{name}", pattern):
                if style not in KNOWN:
                    raise ModelError(
                        f"the tensor-parallel plan of {type(child).__name__} cuts {name} in an unknown way, {style!r}",
                        "use learn.parallel.fsdp instead of tp for this model",
                    )
                yield name, style


def _cut_child(
    child: Any, styles: dict[str, str], names: dict[int, str], cuts: Cuts, over: MeshLink, model: Any
) -> None:
    own = list(child.parameters())
    if not own:
        return
    if not {COLUMNS, ROWS, EXPERTS} & set(styles.values()):
        if all(p.ndim == 1 for p in own):  # a norm: it sees this rank's tokens alone
            _sum_gradients([child], names, cuts)
        else:
            _whole_block(child, over)
        return
    _sum_gradients([child], names, cuts)  # what is not cut sees this rank's heads or words alone
    for name, style in styles.items():
        module = child.get_submodule(name) if name in dict(child.named_modules()) else None
        if module is not None and style in (COLUMNS, ROWS):
            _cut_linear(module, name.rpartition(".")[2], style, names, cuts, over, model)
        elif module is not None and style == EXPERTS:
            _cut_experts(module, names, cuts, over)
    _summed_block(child, over)


def _cut_linear(
    module: Any, name: str, style: str, names: dict[int, str], cuts: Cuts, over: MeshLink, model: Any
) -> None:
    kv_heads = getattr(model.config.get_text_config(), "num_key_value_heads", over.size)
    parts = kv_heads if name in KEYS and kv_heads < over.size else 0
    place = Shard(0, parts=parts) if style == COLUMNS else Shard(1)
    _cut_parameter(module, "weight", place, "kv" if parts else "", names, cuts, over)
    is_adapted = isinstance(module, LoraLinear)
    if is_adapted:  # the adapter's other matrix is whole: ranks have parts of its gradient
        _cut_parameter(
            module,
            "lora_b" if style == COLUMNS else "lora_a",
            place,
            cuts[names[id(module.weight)]].adds,
            names,
            cuts,
            over,
        )
    if module.bias is None:
        return
    if style == COLUMNS:
        _cut_parameter(module, "bias", Shard(0, parts=parts), "kv" if parts else "", names, cuts, over)
    elif over.rank:  # parts are added up over ranks, so only one adds the bias
        through = module.through if is_adapted else lambda x, bias: F.linear(x, module.weight, bias)
        module.forward = lambda x: through(x, module.bias * 0.0)


def _cut_parameter(
    module: Any, name: str, place: Shard, adds: Any, names: dict[int, str], cuts: Cuts, over: MeshLink
) -> None:
    old = getattr(module, name)
    full = names[id(old)]
    new = replace_parameter(module, name, narrow(old, place, over.rank, over.size))
    names[id(new)] = full
    cuts[full] = replace(cuts[full], place=place, adds=adds)


def _cut_experts(module: Any, names: dict[int, str], cuts: Cuts, over: MeshLink) -> None:
    if not {"gate_up_proj", "down_proj"} <= {n for n, _ in module.named_parameters(recurse=False)}:
        raise ModelError(f"experts of {type(module).__name__} are of an unknown form", "set learn.parallel.tp to 1")
    for name, _ in list(module.named_parameters(recurse=False)):
        _cut_parameter(module, name, Shard(0), "", names, cuts, over)
    if hasattr(module, "place"):  # shared out over ep before: it knows what is left to this rank
        return
    count = module.gate_up_proj.shape[0]
    module.forward = lambda hidden, index, weights: run_experts(module, hidden, index - over.rank * count, weights)


def run_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """(tokens, width) through this rank's experts; `index` (tokens, k) counts from the first of them, others are not
    computed here."""
    out = torch.zeros_like(hidden)
    # Joined to the weights even if no token comes: every rank's gradient has the same parts.
    wide = module.down_proj.shape[2]
    none = experts.linear_of(module, "gate_up_proj", 0, hidden[:0])[:, :wide]
    out = out + experts.linear_of(module, "down_proj", 0, none).sum()
    for expert in range(module.gate_up_proj.shape[0]):
        token, choice = torch.where(index == expert)
        if len(token):
            gate, up = experts.linear_of(module, "gate_up_proj", expert, hidden[token]).chunk(2, dim=-1)
            made = experts.linear_of(module, "down_proj", expert, module.act_fn(gate) * up)
            made = made * weights[token, choice, None]
            out = out.index_add(0, token, made.to(out.dtype))
    return out


# Blocks: what happens to tokens on their way in and out


def _summed_block(block: Any, over: MeshLink) -> None:
    block.register_forward_pre_hook(lambda _, args, kwargs: _enter(args, kwargs, over, gather_tokens), with_kwargs=True)
    block.register_forward_hook(lambda _, args, out: _leave(out, over, scatter_tokens))


def _whole_block(block: Any, over: MeshLink) -> None:
    block.register_forward_pre_hook(lambda _, args, kwargs: _enter(args, kwargs, over, copy_tokens), with_kwargs=True)
    block.register_forward_hook(lambda _, args, out: _leave(out, over, keep_tokens))


def _enter(args: Any, kwargs: Any, over: MeshLink, gather: Any) -> tuple[Any, Any]:
    """A block's first argument is the stream: (1, own tokens, width) → (1, tokens, width)."""
    if args:
        return (gather(args[0][0], over)[None], *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"][0], over)[None]}


def _leave(out: Any, over: MeshLink, scatter: Any) -> Any:
    if isinstance(out, tuple):
        return (scatter(out[0][0], over)[None], *out[1:])
    return scatter(out[0], over)[None]


# Norms, embedding, head


def _sum_gradients(modules: list[Any], names: dict[int, str], cuts: Cuts) -> None:
    for module in modules:
        for p in module.parameters():
            cuts[names[id(p)]] = replace(cuts[names[id(p)]], adds="tp")


def _final_norms(model: Any) -> list[Any]:
    decoder = decoder_of(model)
    return [m for name, m in decoder.named_children() if name not in ("layers", "embed_tokens") and _is_vector(m)]


def _is_vector(module: Any) -> bool:
    own = list(module.parameters())
    return bool(own) and all(p.ndim == 1 for p in own)


def _cut_embedding(model: Any, names: dict[int, str], cuts: Cuts, over: MeshLink) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeds, predicts = (getattr(m, "weight", None) is not None for m in (embedding, head))  # or another stage does
    tied = embeds and predicts and head.weight is embedding.weight
    if embeds:
        _cut_parameter(embedding, "weight", Shard(0), cuts[names[id(embedding.weight)]].adds, names, cuts, over)
    if tied:
        head.weight = embedding.weight
    elif predicts:
        _cut_parameter(head, "weight", Shard(0), "", names, cuts, over)
    if predicts and getattr(head, "bias", None) is not None:
        _cut_parameter(head, "bias", Shard(0), "", names, cuts, over)
    if not embeds:
        return
    first = first_word(cuts[names[id(embedding.weight)]], over)
    scale = getattr(embedding, "embed_scale", None)
    padding = embedding.padding_idx

    def embed(ids: Tensor) -> Tensor:
        """(1, tokens) → (1, own tokens, width): each rank knows its words, the sum knows them all."""
        weight = embedding.weight
        own = ids[0] - first
        is_mine = (own >= 0) & (own < weight.shape[0])
        skip = padding - first if padding is not None and 0 <= padding - first < weight.shape[0] else None
        rows = F.embedding(own.clamp(0, weight.shape[0] - 1), weight, padding_idx=skip) * is_mine[:, None]
        out = scatter_tokens(rows, over)[None]
        return out.clone() if scale is None else out * scale  # FSDP wants what it returns to be nobody's view

    embedding.forward = embed


def first_word(cut: Cut, over: MeshLink) -> int:
    """Of this rank's rows of the vocabulary."""
    if isinstance(cut.place, Replicate):
        return 0
    return cut.place.cut(0, cut.shape[0], over.rank, over.size)[0]
