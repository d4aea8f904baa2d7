"""Tiny models with random weights, and what they say by themselves.

A reference runs a model's own code, with its own masks and its own cache, through an attention function of this
file: transformers' eager attention takes its softmax in float32 even where the weights are float64, which would hide
everything below 1e-7.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from paceline.backend.hf import HFBackend

VOCAB = 61
WINDOW = 9
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
# family -> (prefix of its classes, what its configuration says besides SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "head_dim": 16, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 7}),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 7,
                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "original_max_position_embeddings": 256}),
    "olmo2": ("Olmo2", {}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt_oss": ("GptOss", {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                           "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                           "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0,
                                               "original_max_position_embeddings": 128, "truncate": False}}),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    # Keys and values of different widths. Its router is left out: it works in float32, where widths tell.
    "deepseek_v3": ("DeepseekV3", {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
                                   "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 3}),
}  # fmt: skip
WINDOWED = ("mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "mixtral")
REFERENCE = "reference64"


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 1, **changes: Any) -> Any:
    """A new model; equal arguments give equal weights."""
    prefix, extra = FAMILIES[family]
    config = getattr(transformers, prefix + ("TextConfig" if family == "gemma3" else "Config"))(
        **{**SIZES, **extra, **changes}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, prefix + "ForCausalLM")(config).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:  # norms, biases and sinks: none of them may be left out unseen
                parameter.add_(0.4 * noise)
    model.generation_config.eos_token_id = None
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model.to(dtype).requires_grad_(False)


def _reference_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """By the textbook, one head after the other, under the mask that the model made itself."""
    assert attention_mask is not None
    groups = query.shape[1] // key.shape[1]
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=value.dtype)
    for head in range(query.shape[1]):
        k, v = key[:, head // groups], value[:, head // groups]
        scores = torch.einsum("bqd,bkd->bqk", query[:, head], k) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(attention_mask[:, 0] < 0, -torch.inf, scores)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + torch.exp(s_aux[head] - top)
        out[:, head] = torch.einsum("bqk,bkd->bqd", weights / total, v)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(REFERENCE, _reference_attention)
AttentionMaskInterface.register(REFERENCE, eager_mask)


class Reference:
    """A model by itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.exact = torch.promote_types(model.dtype, torch.float32)
        model.set_attn_implementation(REFERENCE)

    def rows(self, tokens: Sequence[int]) -> NDArray[Any]:
        """Logits of every position, without a cache."""
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].to(self.exact).numpy()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What model.generate appends, with its own cache."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return out[0, len(prompt) :].tolist()


@functools.cache
def reference(family: str, dtype: torch.dtype = torch.float64) -> Reference:
    return Reference(build(family, dtype))


def opened(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> HFBackend:
    """A backend around a model of its own. Every cell holds NaN: whoever reads one that was not written shows it."""
    backend = HFBackend(build(family, dtype), **{"max_len": 128, "max_seqs": 6, **options})
    for layer in backend._pools.layers:
        for pool in backend._pools._layers[layer]:
            pool.fill_(torch.nan)
    return backend


def apart(got: Any, wanted: Any) -> float:
    """The largest difference; the shapes are equal."""
    assert got.shape == wanted.shape
    return float(np.abs(np.asarray(got) - np.asarray(wanted)).max(initial=0.0))


def contents(backend: HFBackend, slot: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """The keys and values in a slot's cells, layer by layer, in the order of its tokens."""
    size, pages = backend.info.page_size, backend._book.pages(slot)
    cells = [pages[i // size] * size + i % size for i in range(backend.length(slot))]
    read = backend._pools.read(cells)
    return [(read[layer][0].numpy(), read[layer][1].numpy()) for layer in backend._pools.layers]


def cells_apart(a: Any, b: Any) -> float:
    """The largest difference between two contents()."""
    assert len(a) == len(b) > 0
    return max(apart(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def tokens(seed: int, count: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """Random ids, the special ones left out."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(2, vocab, count))
