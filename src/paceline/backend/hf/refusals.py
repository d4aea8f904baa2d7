"""Which models of transformers the HF backend cannot serve, by their configuration and class, and why.

Each rule protects one assumption: that a layer's memory is keys and values, a row per token, which can be forgotten
from the end; that every layer gives its attention to the function registered with transformers; and that what a token
may see follows from its position alone. What slips through is caught by the probe that runs a loaded model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ModelFormatError
from ..llamacpp.gguf import GgufInfo

__all__ = ["longest", "refuse", "refuse_class", "refuse_gguf", "windows"]

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
STATE = "keeps a running state instead of a row per token, and it cannot go back when drafts are rejected"
UNSERVED_LAYERS = {
    "linear_attention": STATE,
    "mamba": STATE,
    "recurrent": STATE,
    "conv": STATE,
    "hybrid": STATE,
    "hybrid_sliding": STATE,
    "chunked_attention": "sees a chunk of the sequence that only a mask says, and masks are Paceline's",
}
# Those whose older configurations do not say it layer by layer.
RECURRENT = frozenset({
    "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2", "zaya",
    "falcon_h1", "lfm2", "lfm2_moe", "lfm3", "granitemoehybrid", "qwen3_next", "kimi_linear", "nemotron_h",
    "olmo_hybrid", "minimax", "bailing_hybrid"
})  # fmt: skip
ENCODERS = frozenset({
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"
})  # fmt: skip
# Parts of a configuration that only group settings of the one model.
SETTINGS = frozenset({"attn_config", "ffn_config"})
# What transformers takes over from a GGUF of this architecture, compared with llama.cpp on the same file. It leaves out
# whatever else a file says or holds without a word, such as the factors of a stretched RoPE.
GGUF_KEYS = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
    "attention.key_length", "attention.value_length"
})  # fmt: skip
GGUF_TENSOR = re.compile(
    r"(token_embd|output_norm|output|blk\.\d+\.(attn_(norm|q|k|v|output)|ffn_(norm|gate|up|down)))\.weight"
)
# Settings by which a configuration says how far back a token sees, and what is only called alike.
WINDOW = re.compile(r"window|local_attention|chunk")
NO_WINDOW = re.compile(r"layers|pattern|feed_forward|lm_head|mamba|num_|prob")
# RoPE that takes its factors from the longest position in the forward.
LONGROPE, DYNAMIC = "longrope", "dynamic"


def refuse(config: Any, name: str) -> None:
    """Raise ModelFormatError naming the model and the reason where its configuration cannot be served.

    config: a PreTrainedConfig. Reads attributes only.
    """
    for reason in _reasons(config):
        raise ModelFormatError(f"{name} ({config.model_type}) cannot be served by backend 'hf': {reason}")


def refuse_class(kind: type, config: Any, name: str) -> None:
    """Raise ModelFormatError naming the model and the reason where its class cannot be served."""
    layers = _get(config, "layer_types")
    if _get(kind, "_is_stateful") and not layers:
        reason = f"{kind.__name__} {STATE}"
    elif not _on_interface(kind):
        reason = f"{kind.__name__} computes its own attention instead of asking transformers' attention interface"
    else:
        return
    raise ModelFormatError(f"{name} ({config.model_type}) cannot be served by backend 'hf': {reason}")


def refuse_gguf(info: GgufInfo) -> None:
    """Raise ModelFormatError where transformers would make another model of a GGUF file than llama.cpp."""
    for reason in _gguf_reasons(info):
        raise ModelFormatError(f"{info.path.name} cannot be served by backend 'hf', only by 'llamacpp': {reason}")


def longest(config: Any) -> tuple[int | None, str]:
    """Tokens that one sequence may hold at most (None: the configuration does not say), and why no more."""
    trained = _get(config, "max_position_embeddings")
    limit, why = (trained, "what it was trained for") if isinstance(trained, int) else (None, "")
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == LONGROPE:
            # Up to here the short factors always hold, whoever else is in the forward.
            original = rope.get("original_max_position_embeddings") or _get(config, "original_max_position_embeddings")
            if isinstance(original, int) and (limit is None or original < limit):
                limit = original
                why = (
                    "for beyond that its RoPE (longrope) takes other factors, for the longest request and with it "
                    "for all others in the same forward"
                )
        elif kind == DYNAMIC and limit == trained:
            why = (
                "for beyond that its RoPE (dynamic NTK) depends on the longest request in the forward, and rotates "
                "the others' tokens differently than those they have cached"
            )
    return limit, why


def windows(config: Any) -> dict[str, int]:
    """Every setting that may limit how many tokens back a token sees, and to how many; none if all layers see all."""
    kinds = set(_get(config, "layer_types") or ())
    if kinds and kinds <= {"full_attention", "attention"}:
        return {}
    # Some are properties that follow from another setting.
    said = {**vars(config), "sliding_window": _get(config, "sliding_window")}
    if isinstance(said.get("local_attention"), int):  # counted to both sides
        said["local_attention // 2"] = said.pop("local_attention") // 2
    return {
        name: value
        for name, value in said.items()
        if WINDOW.search(name) and not NO_WINDOW.search(name) and type(value) is int and value > 0
    }


def _reasons(config: Any) -> Iterator[str]:
    if _get(config, "is_encoder_decoder"):
        yield "it has an encoder; only models that write text from left to right can be used"
    if config.model_type in ENCODERS:
        yield "it is an encoder, which sees what comes behind a token; only decoders can be used"
    parts = sorted(set(_get(config, "sub_configs") or ()) - SETTINGS)
    if parts:
        yield f"it is put together from parts ({', '.join(parts)}); only models of text alone can be used"
    quantised = _get(config, "quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else _get(quantised, "quant_method")
        yield f"its weights are quantised ({getattr(method, 'value', method)}); give the unquantised model, or a GGUF"
    yield from _layer_reasons(config)
    if _get(config, "num_kv_shared_layers"):
        yield f"its last {config.num_kv_shared_layers} layers take their keys and values from earlier layers"
    if _get(config, "use_bidirectional_attention") or _get(config, "is_causal") is False:
        yield "its tokens see what comes behind them; only models that write text from left to right can be used"


def _layer_reasons(config: Any) -> Iterator[str]:
    kinds = _get(config, "layer_types")
    if not kinds:
        if config.model_type in RECURRENT:
            yield f"it has layers of a kind that {STATE}"
        if _get(config, "attention_chunk_size"):
            yield f"it has layers of a kind that {UNSERVED_LAYERS['chunked_attention']}"
        return
    for kind in sorted(set(kinds) - SERVED_LAYERS):
        count = list(kinds).count(kind)
        why = UNSERVED_LAYERS.get(kind, "is of a kind that is not known here")
        yield f"of its {len(kinds)} layers, {count} are {kind!r}, and such a layer {why}"


def _gguf_reasons(info: GgufInfo) -> Iterator[str]:
    if info.architecture != "llama":
        yield f"of GGUF files those of the architecture 'llama' are dequantised, not {info.architecture!r}"
    said = {k.removeprefix("llama."): v for k, v in (info.metadata | info.lists).items() if k.startswith("llama.")}
    if said.get("rope.scaling.type") == "none":
        del said["rope.scaling.type"]
    for key in sorted(set(said) - GGUF_KEYS):
        yield f"transformers does not take over what it says as llama.{key}"
    heads, width = said.get("attention.head_count"), said.get("embedding_length")
    if not (isinstance(heads, int) and isinstance(width, int) and isinstance(said.get("attention.head_count_kv"), int)):
        # Without one of them, transformers does not undo llama.cpp's order of the rows of q and k.
        yield "it does not give one llama.attention.head_count and head_count_kv for all layers"
        return
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if key in said and said[key] != width // max(heads, 1):
            yield f"llama.{key} = {said[key]!r} is not its embedding's {width} divided by its {heads} heads"
    for tensor in info.shapes:
        if not GGUF_TENSOR.fullmatch(tensor):
            yield f"transformers leaves out its tensor {tensor!r}"


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of its rotary embeddings: one set, or one for each kind of layer."""
    found = _get(config, "rope_parameters") or _get(config, "rope_scaling") or {}
    if not isinstance(found, Mapping):
        return
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    yield from nested or [found]


def _on_interface(kind: type) -> bool:
    """Whether a class takes its attention from the interface, by its own flag or, as transformers does, by its source.

    StableLM has no flag and takes it.
    """
    if _get(kind, "_supports_attention_backend"):
        return True
    by_source = getattr(kind, "_can_set_attn_implementation", None)
    return bool(by_source and by_source())


def _get(thing: Any, name: str) -> Any:
    # Some configurations raise errors of their own for what differs from layer to layer.
    try:
        return getattr(thing, name, None)
    except Exception:
        return None
