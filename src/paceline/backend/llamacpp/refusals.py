"""What llama.cpp asserts on instead of refusing, found by breaking small models key by key; refused here, before
llama.cpp sees the file, because a failed assert ends the process.

Each rule is one that every usable model keeps: where a file breaks it, llama.cpp could not run it either.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ModelFormatError
from .gguf import GgufInfo

__all__ = ["refuse"]

MAX_INT = 2**31 - 1
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 512  # LLAMA_MAX_EXPERTS
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


def refuse(info: GgufInfo) -> None:
    """Raise ModelFormatError naming the key and its value where llama.cpp would end the process."""
    if not info.architecture:
        raise ModelFormatError(f"{info.path} does not name its architecture (general.architecture)")
    for problem in _problems(_Hyperparameters(info)):
        raise ModelFormatError(f"{info.path}: {problem}")


class _Hyperparameters:
    """A model's numbers by name, without the architecture in front; a number or one for each layer."""

    def __init__(self, info: GgufInfo) -> None:
        self.info = info
        self.prefix = f"{info.architecture}."
        self.layers = self.number("block_count", 0)

    def get(self, name: str) -> object:
        """What the file says, None where it says nothing."""
        key = self.prefix + name
        return self.info.metadata.get(key, self.info.lists.get(key))

    def number(self, name: str, default: int) -> int:
        """One integer; the first where there is one for each layer."""
        return next(iter(self.each(name)), default)

    def each(self, name: str) -> tuple[int, ...]:
        """The integers of all layers; one where the file gives one for all, none where it gives none."""
        value = self.get(name)
        values = value if isinstance(value, tuple) else (value,)
        return tuple(v for v in values if isinstance(v, int))


def _problems(model: _Hyperparameters) -> Iterator[str]:
    for name, most in (("block_count", MAX_LAYERS), ("embedding_length", MAX_INT), ("context_length", MAX_INT)):
        value = model.get(name)
        if value is not None and (not isinstance(value, int) or not 0 < value <= most):
            yield f"{model.prefix}{name} = {value!r} is not in 1 .. {most}"
    for key, value in model.info.metadata.items():
        if key.endswith("_epsilon") and not (isinstance(value, float) and 0 <= value < 1):
            yield f"{key} = {value!r} is not a small number"
    nextn = model.number("nextn_predict_layers", 0)
    if nextn > model.layers:
        yield f"{model.prefix}nextn_predict_layers = {nextn} is more than its {model.layers} layers"
    scaling = model.get("rope.scaling.type")
    if scaling is not None and scaling not in ROPE_SCALINGS:
        yield f"{model.prefix}rope.scaling.type = {scaling!r} is not one of {', '.join(ROPE_SCALINGS)}"
    pattern = model.get("attention.sliding_window_pattern")
    if pattern == 1 or (isinstance(pattern, tuple) and not any(pattern)):
        yield f"{model.prefix}attention.sliding_window_pattern leaves no layer a sliding window"
    yield from _experts(model)
    yield from _heads(model)
    yield from _bytes(model.info)


def _experts(model: _Hyperparameters) -> Iterator[str]:
    experts, groups = model.number("expert_count", 0), model.number("expert_group_count", 0)
    used = max(model.each("expert_used_count"), default=0)
    if not 0 <= experts <= MAX_EXPERTS:
        yield f"{model.prefix}expert_count = {experts} is not in 0 .. {MAX_EXPERTS}"
    if not (0 < used <= experts or experts == used == 0):
        yield f"{model.prefix}expert_used_count = {used} is not in 1 .. {experts}, its number of experts"
    for layer, count in enumerate(model.each("expert_used_count")):
        if not count and f"blk.{layer}.ffn_gate_inp.weight" in model.info.shapes:
            yield f"layer {layer} chooses among experts, and uses none"
    chosen = model.number("expert_group_used_count", 0)
    if groups and (groups >= experts or (groups > 1 and (experts % groups or not 0 < chosen < groups))):
        yield f"{model.prefix}expert_group_count = {groups}, of which {chosen} are used, does not fit {experts} experts"


def _heads(model: _Hyperparameters) -> Iterator[str]:
    """Rotary dimensions that are odd or wider than a head; layers whose keys are not as wide as their heads."""
    heads = model.number("attention.head_count", 0)
    width = model.number("embedding_length", 0) // heads if heads > 0 else 0
    key_length = model.number("attention.key_length", width)
    lengths = {"": key_length, "_swa": model.number("attention.key_length_swa", key_length)}
    for suffix, length in lengths.items():
        rotated = model.number(f"rope.dimension_count{suffix}", length)
        if heads > 0 and (rotated % 2 or rotated > length):
            yield f"{model.prefix}rope.dimension_count{suffix} = {rotated} is odd or more than a head's {length}"
    kv_heads = model.each("attention.head_count_kv") or model.each("attention.head_count")
    if len(set(kv_heads)) < 2:
        return
    for layer, count in enumerate(kv_heads):
        shape = model.info.shapes.get(f"blk.{layer}.attn_k.weight", ())
        if len(shape) < 2 or (not count and _is_linear(model.info, layer)):
            continue
        if shape[1] not in {count * length for length in lengths.values()}:
            yield f"layer {layer} has {count} key heads, and keys of {shape[1]} numbers"


def _is_linear(info: GgufInfo, layer: int) -> bool:
    """Whether a layer has a recurrent state, whose keys are not attention's."""
    return any(name.startswith(f"blk.{layer}.ssm_") for name in info.shapes)


def _bytes(info: GgufInfo) -> Iterator[str]:
    """SentencePiece spells what no other token covers byte by byte."""
    if info.metadata.get("tokenizer.ggml.model") == "llama" and len(info.byte_tokens) < 256:
        missing = sorted(set(range(256)) - info.byte_tokens)
        yield f"its SentencePiece vocabulary lacks {len(missing)} of the 256 bytes, such as <0x{missing[0]:02X}>"
