"""From a file and the caller's wishes to a model with its context and its BackendInfo.

Whatever llama.cpp can load but Paceline cannot sample from is refused here by name: encoders, embedding and
diffusion models, adapters, projectors, files without a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidParams, InvariantError, ModelFormatError
from ...params import integer
from ...paths import file_fingerprint
from ...types import BackendInfo
from .gguf import GgufInfo, validate_gguf
from .native import NativeModel, Progress
from .refusals import refuse
from .threads import physical_cores
from .tokenizer import LlamaCppTokenizer

__all__ = ["Limits", "Wishes", "load"]

MAX_SEQS = 256  # LLAMA_MAX_SEQ of llama.cpp
MAX_INT = 2**31 - 1
MAX_THREADS = 512  # GGML_MAX_N_THREADS
DEFAULT_MAX_LEN = 4096
DEFAULT_STEP_TOKENS = 1024  # the scheduler prefills with half of it
NO_VOCABULARY, RWKV = 0, 5  # LLAMA_VOCAB_TYPE_NONE, _RWKV
NO_POOLING = 0  # LLAMA_POOLING_TYPE_NONE
FLASH_ATTENTION_AUTO = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of one context, all settled. See LlamaCppBackend."""

    max_seqs: int
    max_len: int
    n_threads: int
    max_step_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Wishes:
    """The caller's numbers; None where the default is wanted. See LlamaCppBackend."""

    max_seqs: int
    max_len: int | None
    n_threads: int | None
    max_step_tokens: int | None
    kv_tokens: int | None
    clip_max_len: bool = False

    def settled(self, trained_len: int, path: Path) -> Limits:
        """Every number filled in and checked against the others and the model's trained context.

        Raises InvalidParams naming the number, its value and what is allowed.
        """
        seqs = integer("max_seqs", self.max_seqs, 1, MAX_SEQS)
        kv = None if self.kv_tokens is None else integer("kv_tokens", self.kv_tokens, 1, MAX_INT)
        if self.max_len is None:
            length = min(trained_len, DEFAULT_MAX_LEN, kv or MAX_INT)
        else:
            length = integer("max_len", self.max_len, 1, MAX_INT)
            if self.clip_max_len:
                length = min(length, trained_len, kv or MAX_INT)
            elif length > trained_len:
                raise InvalidParams(
                    f"max_len = {length}; allowed: at most {trained_len}, what {path.name} was trained for"
                )
        if kv is None:
            kv = max(length * min(seqs, 4), 2 * seqs)
        elif kv < length:
            raise InvalidParams(f"kv_tokens = {kv}; allowed: at least max_len = {length}")
        step = min(DEFAULT_STEP_TOKENS, kv)
        if self.max_step_tokens is not None:
            step = integer("max_step_tokens", self.max_step_tokens, 1, MAX_INT)
            if step > kv:
                raise InvalidParams(f"max_step_tokens = {step}; allowed: at most kv_tokens = {kv}")
        if step < seqs:  # llama.cpp aborts: it makes room for one output row of every sequence
            raise InvalidParams(
                f"max_step_tokens = {step} (at most kv_tokens = {kv}); allowed: at least max_seqs = {seqs}"
            )
        threads = physical_cores() if self.n_threads is None else integer("n_threads", self.n_threads, 1, MAX_THREADS)
        return Limits(seqs, length, threads, step, kv)


def load(path: Path, wanted: Wishes, progress: Progress | None) -> tuple[NativeModel, BackendInfo, int]:
    """The loaded model, what it is, and its sliding window (0: none). Frees everything where it raises."""
    wanted.settled(MAX_INT, path)  # the numbers that need no model, before the time it takes to load one
    info = validate_gguf(path)
    _refuse_file(info)
    model = NativeModel(path, info.size, progress)
    try:
        _refuse_model(model)
        trained = int(model.native.llama_model_n_ctx_train(model.model))
        limits = wanted.settled(trained, path)
        model.make_context(_context_params(model.native, limits))
        _refuse_context(model)
        _refuse_tokenizer(model)
        return model, _describe(model, limits), int(model.native.llama_model_n_swa(model.model))
    except BaseException:
        model.close()
        raise


def _refuse_file(info: GgufInfo) -> None:
    kind = str(info.metadata.get("general.type", "model"))
    if kind != "model":
        raise ModelFormatError(f"{info.path} holds a {kind!r}, not a model; give the model's own file")
    if not info.tensors:
        raise ModelFormatError(f"{info.path} holds no weights, only metadata")
    if info.metadata.get("tokenizer.ggml.model") == "bert":
        raise ModelFormatError(
            f"{info.path} is an embedding model, by its vocabulary; "
            "only models that write text from left to right can be used"
        )
    refuse(info)


def _refuse_model(model: NativeModel) -> None:
    native, pointer = model.native, model.model
    if native.llama_vocab_type(model.vocab) == NO_VOCABULARY:
        raise ModelFormatError(f"{model.path} has no vocabulary, so nothing can be sampled from it")
    for is_so, what in (
        (native.llama_model_has_encoder(pointer), "has an encoder"),
        (not native.llama_model_has_decoder(pointer), "has no decoder"),
        (native.llama_model_is_diffusion(pointer), "is a diffusion model"),
    ):
        if is_so:
            raise ModelFormatError(f"{model.path} {what}; only models that write text from left to right can be used")


def _refuse_tokenizer(model: NativeModel) -> None:
    """llama.cpp's tokeniser for RWKV never ends at a byte that begins a token and is none."""
    if model.native.llama_vocab_type(model.vocab) != RWKV:
        return
    tokenizer = LlamaCppTokenizer(model)
    pieces = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    missing = sum(bytes((byte,)) not in pieces for byte in range(256))
    if missing:
        raise ModelFormatError(f"{model.path}: its RWKV vocabulary lacks {missing} of the 256 bytes")


def _refuse_context(model: NativeModel) -> None:
    native = model.native
    if not model.memory or native.llama_pooling_type(model.context) != NO_POOLING:
        raise ModelFormatError(
            f"{model.path} is an embedding model; only models that write text from left to right can be used"
        )


def _context_params(native: Any, limits: Limits) -> Any:
    params = native.llama_context_default_params()
    params.n_ctx = limits.kv_tokens
    params.n_batch = params.n_ubatch = limits.max_step_tokens
    params.n_seq_max = limits.max_seqs
    params.n_threads = params.n_threads_batch = limits.n_threads
    params.flash_attn_type = FLASH_ATTENTION_AUTO
    # One buffer for all sequences. Otherwise each has its own share of it and a seq_cp aborts the process.
    params.kv_unified = True
    # Sliding-window layers keep every token: with a window-sized ring a rollback finds its cells overwritten.
    params.swa_full = True
    params.embeddings = False
    params.no_perf = True
    return params


def _describe(model: NativeModel, limits: Limits) -> BackendInfo:
    native, pointer, vocab = model.native, model.model, model.vocab
    if native.llama_n_batch(model.context) < limits.max_step_tokens:
        raise InvariantError(
            f"llama.cpp takes {native.llama_n_batch(model.context)} tokens, not {limits.max_step_tokens}"
        )
    size = int(native.llama_vocab_n_tokens(vocab))
    reason = None
    if native.llama_model_is_recurrent(pointer) or native.llama_model_is_hybrid(pointer):
        kind = "recurrent" if native.llama_model_is_recurrent(pointer) else "hybrid"
        reason = f"{model.path.name} is a {kind} model: its state cannot go back to an earlier token"
    return BackendInfo(
        name="llamacpp",
        model=model.path.name,
        vocab_size=size,
        stop_ids=frozenset(t for t in range(size) if native.llama_vocab_is_eog(vocab, t)),
        max_len=limits.max_len,
        kv_tokens=limits.kv_tokens,
        max_slots=limits.max_seqs,
        max_step_tokens=limits.max_step_tokens,
        can_truncate=reason is None,
        no_speculation_reason=reason,
        fingerprint=f"{file_fingerprint(model.path)}, {limits.n_threads} threads",
    )
