"""Opening a model: which backend, with which options, and the refusal of options it does not have."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from .errors import InvalidParams, UnsupportedOption
from .models import Progress, backend_of, resolve, resolve_weights
from .params import integer
from .paths import cache_dir
from .schedule import CostTable
from .types import Backend, BackendInfo

BACKENDS = ("auto", "llamacpp", "hf", "toy")
# backend -> options it does not have, and why.
LACKS: Mapping[str, Mapping[str, str]] = {
    "llamacpp": {
        "dtype": "a GGUF's weights have the types that its file gives them; backend='hf' dequantises some GGUF files",
        "device": "where llama.cpp computes is settled when llama-cpp-python is built",
        "page_size": "llama.cpp keeps its memory token by token; backend='hf' has pages",
        "prefix_cache": "llama.cpp's memory is not shared between requests; backend='hf' shares pages",
        "compile": "llama.cpp is compiled already; backend='hf' can be",
    },
    "toy": {
        "n_threads": "a toy model runs on the calling thread",
        "dtype": "a toy model computes in float64",
        "device": "a toy model runs on the calling thread",
        "compile": "a toy model has nothing to compile",
    },
    "hf": {},
}
EXAMPLES = {"dtype": "bfloat16", "device": "cpu"}


class Options(TypedDict, total=False):
    """How a model is opened; what is left out is the backend's choice."""

    max_seqs: int
    max_len: int
    n_threads: int
    max_step_tokens: int
    kv_tokens: int
    page_size: int
    dtype: str
    device: str
    prefix_cache: bool
    compile: bool


def open_backend(
    model: str | Path,
    backend: str = "auto",
    *,
    clip_max_len: bool = False,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Backend:
    """Open a model by name or path. backend, options, progress: as in LLM.

    clip_max_len: a max_len beyond what the model was trained for means that instead of an error.
    Raises ModelNotFound, ModelFormatError, ModelDownloadError, InvalidParams; UnsupportedOption naming an option
    that the backend lacks, or what must be installed for it.
    """
    kind = chosen_backend(model, backend)
    for name, why in LACKS[kind].items():
        # Without a prefix cache or a compiler, doing without is what happens.
        if options.get(name, False) is not False:
            raise UnsupportedOption(f"{name} = {options[name]!r} is not an option of backend {kind!r}: {why}")  # type: ignore[literal-required]
    had: dict[str, Any] = {name: value for name, value in options.items() if name not in LACKS[kind]}
    if kind == "toy":
        from .backend.toy import ToyBackend

        return ToyBackend(seed=_toy_seed(str(model)), **had)
    if kind == "hf":
        from .backend.hf import HFBackend

        return HFBackend(resolve_weights(model, progress), clip_max_len=clip_max_len, progress=progress, **had)
    from .backend.llamacpp import LlamaCppBackend

    return LlamaCppBackend(resolve(model, progress), clip_max_len=clip_max_len, progress=progress, **had)


def cost_table(backend: Backend, progress: Progress | None = None) -> CostTable:
    """What a forward of `backend`, which nobody uses yet, costs: as measured before for this model and machine, or now.

    A table from the cache is held against a few forwards; one that no longer fits is measured anew.
    """
    path = _costs_file(backend.info)
    try:
        table = CostTable.from_json(path.read_text()) if path is not None else None
    except (OSError, ValueError):  # gone, or damaged, its bytes or its numbers
        table = None
    if table is not None and table.fits(backend):
        return table
    report = progress or (lambda description, done, total: None)
    name = f"measuring {backend.info.model}"
    table = CostTable.measure(backend, progress=lambda share: report(name, int(1000 * share), 1000))
    if path is not None:
        _write(path, table.to_json())
    return table


def _costs_file(info: BackendInfo) -> Path | None:
    if info.fingerprint is None:
        return None
    key = f"2, {info.fingerprint}, {platform.node()}, {os.cpu_count()} processors, {info.max_step_tokens} tokens a step"
    return cache_dir() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _write(path: Path, text: str) -> None:
    """Whole or not at all. A cache that cannot be written is none."""
    part = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(path)


def chosen_backend(model: str | Path, backend: str) -> str:
    """The backend that a model is opened with: "llamacpp", "hf" or "toy". Raises InvalidParams for an unfit one."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise InvalidParams(f"backend = {backend!r}; allowed: {', '.join(BACKENDS)}")
    name = str(model)
    if is_toy(name) != (backend == "toy") and backend != "auto":
        raise InvalidParams(f"backend = {backend!r} cannot run model {name!r}; leave backend at 'auto'")
    if backend != "auto":
        return backend
    return "toy" if is_toy(name) else backend_of(model)


def _toy_seed(name: str) -> int:
    seed = name.removeprefix("toy").removeprefix(":")
    if seed and not seed.isdecimal():
        raise InvalidParams(f"model = {name!r}; a toy model is 'toy' or 'toy:SEED' with a whole number")
    return int(seed or 0)


def checked_options(**options: Any) -> Options:
    """The options that were given, each of its type. Raises InvalidParams naming one that is not."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in ("dtype", "device"):
            text = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
            if not isinstance(text, str):
                raise InvalidParams(f"{name} = {value!r}; allowed: a name, such as {EXAMPLES[name]!r}")
            given[name] = text
        elif name in ("prefix_cache", "compile"):
            if not isinstance(value, bool):
                raise InvalidParams(f"{name} = {value!r}; allowed: True or False")
            given[name] = value
        else:
            given[name] = integer(name, value, 1)
    return cast(Options, given)


def is_toy(name: str) -> bool:
    """Whether a model's name means the toy model."""
    return name == "toy" or name.startswith("toy:")
