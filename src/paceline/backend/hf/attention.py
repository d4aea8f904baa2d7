"""Attention over Paceline's own pages, registered with transformers under the name "paceline".

A model's layer hands over its new queries, keys and values, rotated, with heads still grouped. The keys and values
go to their cells; then every sequence's rows attend to its cached tokens and to those of this step that they may
see. Which is which says the `Step` of the running forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ...errors import BackendError, UnsupportedOption
from .chains import attend_chains
from .step import Chains, Step, View, current_step

__all__ = ["NAME", "attention"]

NAME = "paceline"

MOST_THREADS: int = vars(numba.config)["NUMBA_NUM_THREADS"]  # it is not in numba's annotations
# What chains.py can read, and in what it sums.
SUMS = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
# Keywords that say nothing about the mathematics of one attention call, whatever their value.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_router_logits", "output_hidden_states"})
# Keywords that change nothing with exactly this value.
NEUTRAL = {"output_attentions": False, "is_causal": True, "dropout": 0.0}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer.

    query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> ([1, T, Hq, Dv], None). scaling: None is
    1 / sqrt(D). sliding_window: a row sees that many positions, its own included. softcap: scores become
    softcap * tanh(score / softcap) after scaling. s_aux: [Hq], attention sinks.

    Raises UnsupportedOption for a mask and for any keyword that would change the result and is not known here.
    """
    if attention_mask is not None:
        raise UnsupportedOption(
            f"{type(module).__name__} brings its own attention mask, and what a token may see is Paceline's to say"
        )
    for name, option in options.items():
        if option is None or name in HARMLESS or (name in NEUTRAL and option == NEUTRAL[name]):
            continue
        raise UnsupportedOption(
            f"{type(module).__name__} passes {name} = {option!r} to its attention, which Paceline does not know"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedOption(f"{type(module).__name__} does not attend causally (is_causal is False)")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    layer: Any = module.layer_idx
    return torch.ops.paceline.attend(query, key, value, layer, scale, sliding_window or 0, softcap or 0.0, s_aux), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The work of one layer: write this step's rows to their cells, attend, return [1, T, Hq, Dv].

    To torch.compile this is one opaque operation from tensors to a tensor. That it reads the step from a context
    variable and writes to the pools is hidden from the graph on purpose: every layer's call has another layer number
    and a result that is used, so calls are neither merged nor dropped, and a layer's pools are touched by it alone.
    """
    step = current_step.get()
    if step is None:
        raise BackendError(
            'attention "paceline" was called outside of HFBackend.forward; for other uses of the model say '
            'model.set_attn_implementation("sdpa") first'
        )
    if query.shape[0] != 1 or query.shape[2] != step.total:
        raise BackendError(f"layer {layer} attends with shape {tuple(query.shape)}; the step has {step.total} tokens")
    step.hits.append(layer)
    step.windows.add(window)
    keys, values = step.pools.layer(layer, key, value)
    _write(step, keys, key)
    _write(step, values, value)
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    compiled = _is_plain(query, keys, values, scale, softcap, sinks)
    chains = step.chains(window) if compiled else None
    views = step.views(window, groups, query.dtype, but_chains=compiled)
    call = (scale, softcap, sinks)
    if chains is None and len(views) == 1 and not views[0].wide:
        out = _one(query.reshape(1, heads, -1, query.shape[3]), keys, values, views[0], *call)
        return out.view(1, heads * groups, step.total, -1).transpose(1, 2).contiguous()
    rows = query[0].transpose(0, 1).unflatten(1, (heads, groups))  # type: ignore[no-untyped-call]
    out = query.new_empty(step.total, heads, groups, value.shape[3])
    if chains is not None:
        if chains.rows is None:
            out.copy_(_short(rows, keys, values, chains, window, scale))
        else:
            short = _short(rows.index_select(0, chains.rows), keys, values, chains, window, scale)
            out.index_copy_(0, chains.rows, short.to(out.dtype))
    for view in views:
        q = rows.narrow(0, view.at, view.count).permute(1, 2, 0, 3)
        if not view.wide:
            q = q.reshape(1, heads, -1, q.shape[3])
        attended = _one(q, keys, values, view, *call).view(heads, groups, view.count, -1)
        out.narrow(0, view.at, view.count).copy_(attended.permute(2, 0, 1, 3))
    return out.view(1, step.total, heads * groups, -1)


def _is_plain(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> bool:
    """Whether chains.py can attend: on a CPU, in a type that it sums, and nothing but scale and window asked for."""
    alike = query.dtype == keys.dtype == values.dtype and query.dtype in SUMS
    return query.is_cpu and alike and scale > 0 and not softcap and sinks is None


def _short(rows: Tensor, keys: Tensor, values: Tensor, chains: Chains, window: int, scale: float) -> Tensor:
    """The short chains' rows [R, Hkv, G, D], attended: [R, Hkv, G, Dv] in the precision of the sums."""
    query = rows.to(SUMS[rows.dtype]).contiguous()
    out = query.new_empty(*query.shape[:3], values.shape[3])
    with _as_many_threads():
        attend_chains(query.numpy(), _raw(keys), _raw(values), chains.chains, chains.cells, window, scale, out.numpy())
    return out


@contextmanager
def _as_many_threads() -> Iterator[None]:
    """Let numba use as many threads as PyTorch, and leave both settings as they were.

    Where numba starts its threads, in the first call, it sets the number of PyTorch's too: they are the same library's.
    """
    wanted, before = torch.get_num_threads(), numba.get_num_threads()
    numba.set_num_threads(min(wanted, MOST_THREADS))
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        numba.set_num_threads(before)


def _raw(pool: Tensor) -> NDArray[Any]:
    """[1, Hkv, C, D] as numpy's [Hkv, C, D]; of bfloat16, which numpy does not know, the bits."""
    return (pool.view(torch.uint16) if pool.dtype == torch.bfloat16 else pool)[0].numpy()


def _write(step: Step, pool: Tensor, rows: Tensor) -> None:
    """This step's rows [1, Hkv, T, D] to their cells."""
    if step.run is None:
        pool.index_copy_(2, step.cells, rows)
    else:
        pool.narrow(2, step.run, step.total).copy_(rows)


def _one(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    view: View,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """One sequence. q is [1, Hkv, G * n, D], the groups of a key head as further rows, or [Hkv, G, n, D] for a wide
    view; the result is alike."""
    k, v = _visible(keys, view), _visible(values, view)
    if view.wide:
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # [Hkv, 1, L, D]: every group reads the same keys
    if softcap != 0.0 or sinks is not None:
        return _scored(q, k, v, view, scale, softcap, sinks)
    if view.wide:
        k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=view.mask, is_causal=view.causal, scale=scale)


def _visible(pool: Tensor, view: View) -> Tensor:
    """[1, Hkv, L, D]; a view of the pool where the cells lie side by side."""
    if view.index is None:
        return pool.narrow(2, view.first, view.length)
    return pool.index_select(2, view.index)


def _scored(q: Tensor, k: Tensor, v: Tensor, view: View, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """Attention by its formula, for what the fused kernel cannot do.

    q [1, Hkv, G * n, D] with k [1, Hkv, L, D], or q [Hkv, G, n, D] with k [Hkv, 1, L, D]. The softmax is taken in
    float32, or float64 where the model is.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if view.mask is not None:
        scores = scores + view.mask
    elif view.causal:
        n = view.count
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # A sink takes part in the denominator only: neither scaled nor capped, and no value belongs to it.
        heads = k.shape[0] * k.shape[1]
        column = sinks.to(scores.dtype).view(heads, -1, 1, 1).expand(-1, -1, view.count, 1)
        column = column.reshape(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)


def _shape_only(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


SCHEMA = (
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int window, float softcap, "
    "Tensor? sinks) -> Tensor"
)
# Typed as Any: this corner of PyTorch carries no annotations.
_library: Any = torch.library
_library = _library.Library(NAME, "DEF")
_library.define(SCHEMA)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAME}::attend", _shape_only, lib=_library)
AttentionInterface.register(NAME, attention)
