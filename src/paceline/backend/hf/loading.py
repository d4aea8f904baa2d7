"""From a folder, a hub id, a GGUF file or an open model to a model that the HF backend can run.

Weights come from safetensors or GGUF files, never from pickles, and code never comes with a model: nothing that
a model's author wrote is executed here. A model is read whole or not at all.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import (
    BackendError,
    InvalidParams,
    ModelDownloadError,
    ModelError,
    ModelFormatError,
    ModelNotFound,
    PacelineError,
    UnsupportedOption,
)
from ...params import integer
from ...types import Tokenizer
from ..llamacpp.gguf import GgufInfo, validate_gguf
from . import refusals
from .gguf_vocabulary import gguf_tokenizer
from .runtime import quiet, require
from .tokenizer import NoTokenizer, folder_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["DTYPES", "LoadedModel", "is_hub_id", "load"]

Progress = Callable[[str, int, int | None], None]
"""progress(description, bytes done, bytes in all or None where that is not known)."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFAULT_MAX_LEN = 4096
MAX_INT = 2**31 - 1
NAMED = 5  # keys or files that a message names
SAID = 300  # characters of somebody else's message
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is known of it.

    model: in eval mode, without gradients; its attention is still transformers' own. name: for messages.
    max_len: tokens one sequence may hold. vocab_size: V, the width of its logits.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    name: str
    max_len: int
    stop_ids: frozenset[int]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device


def load(
    model: str | Path | PreTrainedModel,
    *,
    dtype: str | None,
    device: str | None,
    max_len: int | None,
    clip_max_len: bool,
    n_threads: int | None,
    progress: Progress | None,
    tokenizer: Tokenizer | None = None,
) -> LoadedModel:
    """Load and check a model; everything HFBackend is told about it.

    model: a folder with config.json and safetensors, a hub id "owner/name" (resolved, and fetched if it must be, by
    transformers), a .gguf file (its weights are dequantised), or an open PreTrainedModel, which is used as
    it is, but for eval mode and no gradients: dtype and device can then only repeat its own.
    dtype: one of DTYPES; None: bfloat16 for a GGUF, what config.json says for others, else float32. device: what
    torch.device understands; None is "cpu", also where there is a GPU. max_len: None is what the model was trained for,
    at most 4,096; clip_max_len: more than that is no error. n_threads: for PyTorch, hence for the process;
    None leaves it alone. progress: in bytes. tokenizer: instead of the model's own.

    Raises ModelNotFound, ModelFormatError (by name and reason, for files that cannot be read whole and for
    architectures that cannot be served), InvalidParams, UnsupportedOption, and BackendError for an open model that
    another backend holds.
    """
    _check_options(dtype, max_len, n_threads)
    if isinstance(model, str | Path):
        source = _Source.find(model)
        require(gguf=source.gguf is not None)
        where = _device(device)
        with quiet(source.stepper(progress)):
            config = source.config()
            longest = settle_max_len(config, max_len, clip_max_len, source.name)
            opened = source.model(config, dtype).to(where)
            own = tokenizer or source.tokenizer(opened)
    else:
        require()
        opened, source = _open_already(model, dtype, device), None
        longest = settle_max_len(opened.config, max_len, clip_max_len, _class_name(opened))
        own = tokenizer or NoTokenizer(_class_name(opened), _vocab_size(opened))
    return _finished(opened, own, source.name if source else _class_name(opened), longest, n_threads)


def _check_options(dtype: str | None, max_len: int | None, n_threads: int | None) -> None:
    """What can be said before a model is looked at, which may take long."""
    if dtype is not None and dtype not in DTYPES:
        raise InvalidParams(f"dtype = {dtype!r}; allowed: {', '.join(DTYPES)}")
    if max_len is not None:
        integer("max_len", max_len, 1, MAX_INT)
    if n_threads is not None:
        integer("n_threads", n_threads, 1, MAX_INT)


def settle_max_len(config: Any, max_len: int | None, clip: bool, name: str) -> int:
    """Tokens one sequence may hold: the caller's wish within what the model can do.

    Raises InvalidParams naming the limit and its reason where the wish is beyond it and `clip` is off.
    """
    limit, why = refusals.longest(config)
    if max_len is None:
        return min(limit or DEFAULT_MAX_LEN, DEFAULT_MAX_LEN)
    if limit is not None and max_len > limit:
        if clip:
            return limit
        raise InvalidParams(f"max_len = {max_len}; allowed: at most {limit}, {why} ({name})")
    return max_len


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a model comes from. place: folder or hub id, as transformers takes it. gguf: its head, for a GGUF."""

    name: str
    place: str
    gguf: GgufInfo | None
    size: int | None

    @classmethod
    def find(cls, model: str | Path) -> _Source:
        """Raises ModelNotFound or ModelFormatError for what is neither a folder, a GGUF file nor a hub id."""
        try:
            path = Path(model).expanduser()
            exists = path.exists()
        except (OSError, RuntimeError) as error:  # a name longer than any file's; ~user of a user that is not there
            raise ModelNotFound(f"no model at {str(model)[:80]!r}: {error}") from error
        if exists and path.is_dir():
            return cls(path.name or str(path), str(path), None, _folder_size(path))
        if exists or path.suffix == ".gguf":
            info = validate_gguf(path)
            if int(info.metadata.get("split.count", 0)) > 1:
                raise UnsupportedOption(f"{path} is split into parts; merge them (llama-gguf-split --merge) for 'hf'")
            return cls(path.name, str(path), info, info.size)
        if isinstance(model, str) and is_hub_id(model):
            return cls(model, model, None, None)
        raise ModelNotFound(f"no model at {model}: neither a folder, nor a .gguf file, nor a hub id owner/name")

    def stepper(self, progress: Progress | None) -> Callable[[int, int], None] | None:
        """The caller's progress, in bytes, fed with tensors."""
        if progress is None:
            return None
        size = self.size
        progress(f"loading {self.name}" if size else f"fetching and loading {self.name}", 0, size)

        def step(done: int, total: int) -> None:
            progress(f"loading {self.name}", (size or 0) * done // max(total, 1), size)

        return step

    def config(self) -> Any:
        """Its configuration. Raises ModelFormatError for an architecture that is not inside transformers."""
        from transformers import AutoConfig

        if self.gguf is None:
            self._refuse_code()
        else:
            refusals.refuse_gguf(self.gguf)
        with self._explained():
            return AutoConfig.from_pretrained(*self._where, **self._how, trust_remote_code=False)

    def _refuse_code(self) -> None:
        from transformers import CONFIG_MAPPING, __version__
        from transformers.utils import cached_file

        with self._explained():
            raw = json.loads(Path(cached_file(self.place, "config.json")).read_text(encoding="utf-8"))
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        if not isinstance(kind, str):
            raise ModelFormatError(f"{self.name}: its config.json names no model_type, the kind of model it is")
        if kind in CONFIG_MAPPING:
            return
        if raw.get("auto_map"):
            raise ModelFormatError(
                f"{self.name} ({kind}) comes with code of its own, which is never run; only architectures that are "
                "part of transformers can be used"
            )
        raise ModelFormatError(f"{self.name}: transformers {__version__} knows no model_type {kind!r}")

    def model(self, config: Any, dtype: str | None) -> PreTrainedModel:
        """Its weights, all of them and no others."""
        import torch
        import transformers

        refusals.refuse(config, self.name)
        refusals.refuse_class(_class_of(config, self.name), config, self.name)
        how = self._how
        if self.gguf is not None:
            # Releases that have this class leave weights packed otherwise: other numbers, by other kernels.
            if packed := getattr(transformers, "GgufConfig", None):
                how["quantization_config"] = packed(dequantize=True)
            wanted = torch.bfloat16
        else:
            how["use_safetensors"] = True
            wanted = getattr(config, "dtype", None) or torch.float32
        with self._explained("; weights are read from safetensors, never from pickles"):
            opened, report = transformers.AutoModelForCausalLM.from_pretrained(
                *self._where,
                **how,
                config=config,
                dtype=wanted if dtype is None else getattr(torch, dtype),
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below by name
            )
        _check_whole(self.name, report)
        return opened

    def tokenizer(self, model: PreTrainedModel) -> Tokenizer:
        """The model's own tokenizer; one that refuses text, and says why, where there is none to be used."""
        if self.gguf is not None:
            return gguf_tokenizer(self.gguf, _vocab_size(model))
        with self._explained():
            return folder_tokenizer(self.place, self.name, _vocab_size(model))

    @property
    def _where(self) -> tuple[str]:
        return (self.place if self.gguf is None else str(Path(self.place).parent),)

    @property
    def _how(self) -> dict[str, Any]:
        return {} if self.gguf is None else {"gguf_file": Path(self.place).name}

    @contextmanager
    def _explained(self, hint: str = "") -> Iterator[None]:
        """What transformers and the hub client raise, as errors of ours that name the model; `hint` behind it."""
        try:
            yield
        except (PacelineError, MemoryError):
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise BackendError(f"there is too little memory to load {self.name}: {said}") from error
            what = (said if len(said) <= SAID else said[: SAID - 3] + "...") + hint
            if self.gguf is None and self.size is None and isinstance(error, OSError):
                raise _not_fetched(self.name, error, what) from error
            raise ModelFormatError(f"transformers cannot load {self.name}: {type(error).__name__}: {what}") from error


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, owner/name."""
    return HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def _folder_size(folder: Path) -> int:
    """Bytes of a model folder's safetensors. Raises ModelFormatError where it is no such folder."""
    if not (folder / "config.json").is_file():
        found = sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"; it holds {', '.join(found[:NAMED])}: give the file itself" if found else ""
        raise ModelFormatError(f"{folder} has no config.json, so it is no model of transformers{hint}")
    if (folder / "adapter_config.json").is_file():
        raise ModelFormatError(f"{folder} holds an adapter; merge it into its model (merge_and_unload) and save that")
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
        if pickles:
            raise ModelFormatError(
                f"{folder} has its weights in {', '.join(pickles[:NAMED])}: pickles may run code and are never read; "
                "save the model again as safetensors (save_pretrained)"
            )
        raise ModelFormatError(f"{folder} holds no weights: no .safetensors file")
    return sum(path.stat().st_size for path in weights)


def _not_fetched(name: str, error: BaseException, said: str) -> ModelError:
    """The hub client's refusal: no such model, no access, or no network."""
    from huggingface_hub import errors as hub

    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, hub.GatedRepoError):
            return ModelDownloadError(f"{name} is gated: accept its conditions on its page, then run: hf auth login")
        if isinstance(chain, hub.RepositoryNotFoundError | hub.RevisionNotFoundError):
            return ModelNotFound(f"no model {name!r}: no such folder here, and the hub does not show one of that name")
        chain = chain.__cause__ or chain.__context__
    return ModelDownloadError(
        f"{name} could not be fetched from the hub ({said}); check the name and the network, or give a folder's path"
    )


def _class_of(config: Any, name: str) -> type[PreTrainedModel]:
    """The class that transformers would build. Raises ModelFormatError where it is no causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES

    if type(config) not in CLASSES:
        raise ModelFormatError(
            f"{name} is a {config.model_type!r}, which transformers does not know as a causal language model; "
            "only models that write text from left to right can be used"
        )
    found = CLASSES[type(config)]
    kind: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return kind


def _check_whole(name: str, report: dict[str, Any]) -> None:
    """Raise ModelFormatError where the files lack weights of the model, hold others, or of other shapes."""
    problems = []
    for what, keys in (
        ("lack", report.get("missing_keys")),
        ("also hold", report.get("unexpected_keys")),
        ("hold in another shape", report.get("mismatched_keys")),
    ):
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys or ())
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            problems.append(f"{what} {', '.join(names[:NAMED])}{more}")
    problems += [str(message) for message in report.get("error_msgs") or ()]
    if problems:
        raise ModelFormatError(f"the weights of {name} are not its configuration's: they {'; they '.join(problems)}")


def _open_already(model: Any, dtype: str | None, device: str | None) -> PreTrainedModel:
    """An open model, unchanged. Raises InvalidParams where dtype or device would mean to change it."""
    import torch
    from transformers import PreTrainedModel

    from .attention import NAME

    if not isinstance(model, PreTrainedModel):
        raise InvalidParams(f"model = {model!r}; allowed: a folder, a hub id, a .gguf file or a PreTrainedModel")
    name = _class_name(model)
    if dtype is not None and getattr(torch, dtype) != model.dtype:
        raise InvalidParams(f"dtype = {dtype!r}; {name} is open already, in {_dtype_name(model.dtype)}; leave it out")
    if device is not None and _device(device) != model.device:
        raise InvalidParams(f"device = {device!r}; {name} is open already, on {model.device}; leave it out")
    if model.config.get_text_config()._attn_implementation == NAME:
        raise BackendError(
            f"{name} attends through Paceline already: another backend holds it; close that one first, or load the "
            "model twice (if none does, say model.set_attn_implementation('sdpa'))"
        )
    refusals.refuse(model.config, name)
    refusals.refuse_class(type(model), model.config, name)
    return model


def _device(device: str | None) -> torch.device:
    """A device that works here. Raises InvalidParams for no device, UnsupportedOption for one that is not there."""
    import torch

    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidParams(f"device = {device!r}; allowed: what torch.device understands, such as 'cpu'") from error
    if found.type == "meta":
        raise InvalidParams(f"device = {device!r}; nothing can be computed there")
    try:
        return torch.zeros(1, device=found).device
    except Exception as error:  # each kind of device has its own
        said = " ".join(str(error).split()) or repr(error)
        why = said if len(said) <= SAID else said[: SAID - 3] + "..."
        raise UnsupportedOption(f"device = {device!r} cannot be used here (leave it out for cpu): {why}") from error


def _finished(
    model: PreTrainedModel, tokenizer: Tokenizer, name: str, max_len: int, n_threads: int | None
) -> LoadedModel:
    import torch

    model.eval()
    model.requires_grad_(False)
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    V = _vocab_size(model)
    return LoadedModel(model, tokenizer, name, max_len, _stop_ids(model, tokenizer, V), V, model.dtype, model.device)


def _stop_ids(model: PreTrainedModel, tokenizer: Tokenizer, V: int) -> frozenset[int]:
    """Every id that the model's files name as an end: generation config, config and tokenizer together."""
    named: list[Any] = [getattr(tokenizer, "stop_ids", None)]
    for config in (getattr(model, "generation_config", None), model.config):
        named.append(getattr(config, "eos_token_id", None))
    ids: set[int] = set()
    for entry in named:
        ids.update(entry if isinstance(entry, list | tuple | set | frozenset) else () if entry is None else (entry,))
    odd = [token for token in ids if not isinstance(token, int)]
    if odd:
        raise ModelFormatError(f"{_class_name(model)}: eos_token_id = {odd[0]!r} in its files; allowed: whole numbers")
    return frozenset(token for token in ids if 0 <= token < V)


def _vocab_size(model: PreTrainedModel) -> int:
    """V: the width of the logits. Raises ModelFormatError where ids that are sampled could not be fed back."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    V = rows if head is None else int(head.weight.shape[0])
    if rows < V:
        raise ModelFormatError(f"{_class_name(model)} gives logits for {V} tokens and has embeddings for {rows}")
    return V


def _class_name(model: Any) -> str:
    return type(model).__name__


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
