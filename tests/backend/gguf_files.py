"""Write small GGUF files for the tests: a writer of the format, and tiny random models that llama.cpp runs."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 32
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Metadata = Mapping[str, Any]
Tensors = Mapping[str, NDArray[np.float32]]


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type tag and value: bool, int (u32), float (f32), str, or a list of strings, ints (i32) or floats (f32)."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item & 0xFFFFFFFF)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, (str, bytes)):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, list) and item and isinstance(item[0], (str, bytes)):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
    if isinstance(item, list) and item and isinstance(item[0], float):
        return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
    if isinstance(item, list):
        return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    raise TypeError(f"cannot write {item!r}")


def regions(metadata: Metadata, tensors: Tensors) -> dict[str, bytes]:
    """The four regions of a file, in order; joined they are the file."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    pairs = b"".join(string(key) + value(item) for key, item in metadata.items())
    table, data = b"", b""
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]  # GGUF counts dimensions from the innermost
        table += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += padded(np.ascontiguousarray(tensor, np.float32).tobytes())
    before = len(header) + len(pairs) + len(table)
    table += b"\0" * (-before % ALIGNMENT)
    return {"header": header, "metadata": pairs, "tensor table": table, "tensor data": data}


def padded(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % ALIGNMENT)


def write(path: Path, metadata: Metadata, tensors: Tensors) -> Path:
    path.write_bytes(b"".join(regions(metadata, tensors).values()))
    return path


# --- vocabularies -----------------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself where it prints, else from 256 on."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, extra = [], 256
    for byte in range(256):
        letters.append(chr(byte) if byte in printing else chr(extra))
        extra += byte not in printing
    return letters


def bpe_vocabulary(**changes: Any) -> dict[str, Any]:
    """Three control tokens, the 256 bytes, and "he", "hel"."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters(), "he", "hel"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        **changes,
    }


def spm_vocabulary(**changes: Any) -> dict[str, Any]:
    """SentencePiece: unknown, <s>, </s>, the 256 byte tokens, some pieces with and without the word mark."""
    pieces = ["▁", "h", "e", "l", "o", "▁h", "▁he", "ll", "llo", "▁hello", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        **changes,
    }


def wordpiece_vocabulary() -> dict[str, Any]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁world"]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 5 + [NORMAL] * 2,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


# --- models -----------------------------------------------------------------------------------------

EMBED, HEADS, FEED, LAYERS = 32, 2, 48, 2


def _random(seed: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        # Norms around one; matrices large enough that every row of logits has a clear argmax.
        made[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
    return made


def _attention_shapes(layer: int) -> dict[str, Sequence[int]]:
    block = f"blk.{layer}."
    square = (EMBED, EMBED)
    return {
        block + "attn_norm.weight": (EMBED,),
        **{block + f"attn_{name}.weight": square for name in ("q", "k", "v", "output")},
        block + "ffn_norm.weight": (EMBED,),
        block + "ffn_gate.weight": (FEED, EMBED),
        block + "ffn_up.weight": (FEED, EMBED),
        block + "ffn_down.weight": (EMBED, FEED),
    }


def _hyper(architecture: str, vocabulary: Metadata, context: int, **more: Any) -> dict[str, Any]:
    return {
        "general.architecture": architecture,
        "general.type": "model",
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": EMBED,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": FEED,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        **{f"{architecture}.{key}": item for key, item in more.items()},
        **vocabulary,
    }


def llama(seed: int = 0, vocabulary: Metadata | None = None, context: int = 512) -> tuple[Metadata, Tensors]:
    vocabulary = bpe_vocabulary() if vocabulary is None else vocabulary
    size = len(vocabulary.get("tokenizer.ggml.tokens", range(300)))
    shapes: dict[str, Sequence[int]] = {"token_embd.weight": (size, EMBED), "output_norm.weight": (EMBED,)}
    for layer in range(LAYERS):
        shapes |= _attention_shapes(layer)
    metadata = _hyper("llama", vocabulary, context)
    if "tokenizer.ggml.tokens" not in vocabulary:
        metadata["llama.vocab_size"] = size
    return metadata, _random(seed, shapes)


def moe(experts: int = 4, used: int = 2, seed: int = 0) -> tuple[Metadata, Tensors]:
    """A mixture of experts."""
    metadata, tensors = llama(seed)
    shapes: dict[str, Sequence[int]] = {}
    for layer in range(LAYERS):
        block = f"blk.{layer}.ffn_"
        shapes |= {
            block + "gate_inp.weight": (experts, EMBED),
            block + "gate_exps.weight": (experts, FEED, EMBED),
            block + "up_exps.weight": (experts, FEED, EMBED),
            block + "down_exps.weight": (experts, EMBED, FEED),
        }
    dense = tuple(f"ffn_{name}.weight" for name in ("gate", "up", "down"))
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(dense)}
    counts = {"llama.expert_count": experts, "llama.expert_used_count": used}
    return {**metadata, **counts}, {**kept, **_random(seed + 1, shapes)}


def gemma2(window: int, seed: int = 0, context: int = 512) -> tuple[Metadata, Tensors]:
    """A decoder whose even layers see a sliding window."""
    _, tensors = llama(seed, spm_vocabulary(), context)
    extra: dict[str, Sequence[int]] = {}
    for layer in range(LAYERS):
        extra |= {f"blk.{layer}.{name}.weight": (EMBED,) for name in ("post_attention_norm", "post_ffw_norm")}
    sizes = {"attention.key_length": EMBED // HEADS, "attention.value_length": EMBED // HEADS}
    hyper = _hyper("gemma2", spm_vocabulary(), context, **{"attention.sliding_window": window}, **sizes)
    return hyper, {**tensors, **_random(seed + 1, extra)}


def mamba(seed: int = 0) -> tuple[Metadata, Tensors]:
    """A recurrent model: its state cannot go back."""
    inner, state, conv, rank = 2 * EMBED, 8, 4, 4
    vocabulary = bpe_vocabulary()
    shapes: dict[str, Sequence[int]] = {
        "token_embd.weight": (len(vocabulary["tokenizer.ggml.tokens"]), EMBED),
        "output_norm.weight": (EMBED,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (EMBED,),
            block + "ssm_in.weight": (2 * inner, EMBED),
            block + "ssm_conv1d.weight": (inner, conv),
            block + "ssm_conv1d.bias": (inner,),
            block + "ssm_x.weight": (rank + 2 * state, inner),
            block + "ssm_dt.weight": (inner, rank),
            block + "ssm_dt.bias": (inner,),
            block + "ssm_a": (inner, state),
            block + "ssm_d": (inner,),
            block + "ssm_out.weight": (EMBED, inner),
        }
    sizes = {"conv_kernel": conv, "inner_size": inner, "state_size": state, "time_step_rank": rank}
    metadata = _hyper("mamba", vocabulary, 512, **{f"ssm.{key}": item for key, item in sizes.items()})
    tensors = _random(seed, shapes)
    for name in tensors:
        if name.endswith("ssm_a"):
            tensors[name] = -np.abs(tensors[name])  # a decaying state
    return metadata, tensors


def bert(seed: int = 0) -> tuple[Metadata, Tensors]:
    """An encoder."""
    vocabulary = wordpiece_vocabulary()
    size = len(vocabulary["tokenizer.ggml.tokens"])
    shapes: dict[str, Sequence[int]] = {
        "token_embd.weight": (size, EMBED),
        "token_types.weight": (2, EMBED),
        "position_embd.weight": (64, EMBED),
        "token_embd_norm.weight": (EMBED,),
        "token_embd_norm.bias": (EMBED,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name in ("q", "k", "v", "output"):
            shapes |= {block + f"attn_{name}.weight": (EMBED, EMBED), block + f"attn_{name}.bias": (EMBED,)}
        for name in ("attn_output_norm", "layer_output_norm"):
            shapes |= {block + f"{name}.weight": (EMBED,), block + f"{name}.bias": (EMBED,)}
        shapes |= {block + "ffn_up.weight": (FEED, EMBED), block + "ffn_up.bias": (FEED,)}
        shapes |= {block + "ffn_down.weight": (EMBED, FEED), block + "ffn_down.bias": (EMBED,)}
    metadata = _hyper("bert", vocabulary, 64, **{"attention.layer_norm_epsilon": 1e-5, "attention.causal": False})
    metadata |= {"bert.pooling_type": 1, "tokenizer.ggml.token_type_count": 2}
    return metadata, _random(seed, shapes)


def embedding_llama(seed: int = 0) -> tuple[Metadata, Tensors]:
    """A causal decoder that is published for its embeddings: the file names a pooling."""
    metadata, tensors = llama(seed)
    return {**metadata, "llama.pooling_type": 3}, tensors
