"""llama.cpp as a library: importing it, silencing it, and owning one model with its context.

Everything that llama.cpp would print goes to the logger "paceline.llamacpp" at DEBUG; its errors
are also kept for the message of the exception that follows.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import BackendError, ModelFormatError, UnsupportedOption

__all__ = ["NativeModel", "Progress", "library", "said"]

Progress = Callable[[str, int, int | None], None]
"""progress(description, bytes done, bytes in all or None where that is not known)."""

logger = logging.getLogger("paceline.llamacpp")

ERROR, CONTINUED = 4, 5
_recent: deque[tuple[int, str]] = deque(maxlen=64)
_kept_alive: list[Any] = []


def library() -> Any:
    """The module of llama-cpp-python's C bindings, imported, initialised and silenced once.

    Raises UnsupportedOption where it is not installed or its shared library does not load.
    """
    if _kept_alive:
        return _kept_alive[0]
    try:
        from llama_cpp import llama_cpp as native
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedOption(
            f"GGUF models need llama-cpp-python, which does not import here ({error}); "
            "install it with: pip install 'paceline[llamacpp]' (it compiles llama.cpp: a C++ compiler is needed)"
        ) from error
    callback = native.llama_log_callback(_log)
    native.llama_log_set(callback, ctypes.c_void_p(0))
    native.llama_backend_init()
    # llama.cpp keeps the bare pointer: were the callback collected, its next message would crash.
    _kept_alive.extend((native, callback))
    return native


def _log(level: int, text: bytes | None, _data: Any) -> None:
    line = (text or b"").decode("utf-8", "replace").strip()
    if not line or level == CONTINUED:  # progress dots
        return
    _recent.append((level, line))
    logger.debug("%s", line)


def said() -> str:
    """The last errors of llama.cpp since this was last asked, for an exception's message; "" if there were none."""
    lines = [line for level, line in _recent if level == ERROR]
    _recent.clear()
    return "; ".join(dict.fromkeys(lines[-3:]))


class NativeModel:
    """One loaded model and its context, freed exactly once: by close(), collection or interpreter exit.

    Pointers are read through properties that refuse after close(), so that nothing reaches freed memory.
    """

    def __init__(self, path: Path, size: int, progress: Progress | None) -> None:
        """Load `path`, which validate_gguf has accepted. Raises ModelFormatError quoting llama.cpp."""
        self.native = library()
        self.path = path
        model = self._load(path, size, progress)
        self._pointers: dict[str, Any] = {"model": model}
        self._finalizer = weakref.finalize(self, _free, self.native, self._pointers)
        self._pointers["vocab"] = self.native.llama_model_get_vocab(model)

    def _load(self, path: Path, size: int, progress: Progress | None) -> Any:
        params = self.native.llama_model_default_params()
        raised: list[BaseException] = []
        if progress is not None:
            # An exception cannot cross the C frames: stop the load, then raise it here.
            def step(fraction: float, _data: Any) -> bool:
                try:
                    progress(f"loading {path.name}", int(fraction * size), size)
                except BaseException as error:
                    raised.append(error)
                return not raised

            params.progress_callback = self.native.llama_progress_callback(step)
        said()  # whatever came before is not about this
        model = self.native.llama_model_load_from_file(str(path).encode(), params)
        if raised:
            if model:
                self.native.llama_model_free(model)
            raise raised[0]
        if not model:
            raise ModelFormatError(f"llama.cpp cannot load {path}: {said() or 'it does not say why'}")
        return model

    def make_context(self, params: Any) -> None:
        """Create the context. Raises BackendError quoting llama.cpp, mostly where memory is short."""
        said()  # whatever came before is not about this
        context = self.native.llama_init_from_model(self.model, params)
        if not context:
            raise BackendError(
                f"llama.cpp cannot make a context of {params.n_ctx} tokens for {self.path}: "
                f"{said() or 'it does not say why'}; a smaller max_len or max_seqs needs less memory"
            )
        self._pointers["context"] = context
        self._pointers["memory"] = self.native.llama_get_memory(context)

    @property
    def model(self) -> Any:
        return self._pointer("model")

    @property
    def vocab(self) -> Any:
        return self._pointer("vocab")

    @property
    def context(self) -> Any:
        return self._pointer("context")

    @property
    def memory(self) -> Any:
        return self._pointer("memory")

    def check_open(self) -> None:
        """Raise BackendError after close()."""
        self._pointer("model")

    def _pointer(self, name: str) -> Any:
        try:
            return self._pointers[name]
        except KeyError:
            raise BackendError(f"the model {self.path.name} is closed") from None

    def close(self) -> None:
        """Free context and model. Idempotent."""
        self._finalizer()


def _free(native: Any, pointers: dict[str, Any]) -> None:
    context, model = pointers.pop("context", None), pointers.pop("model", None)
    pointers.clear()
    if context:
        native.llama_free(context)
    if model:
        native.llama_model_free(model)
