"""PyTorch and transformers as libraries: importing them, and keeping them quiet while they load a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from typing import Any

from ...errors import UnsupportedOption

__all__ = ["Report", "quiet", "require"]

Report = Callable[[int, int], None]
"""report(tensors done, tensors in all)."""

INSTALL = "install what it needs with: pip install 'paceline[hf]'"
OLDEST_TRANSFORMERS = 5
SILENCE = 100  # above every level of logging
_settings_lock = threading.Lock()


def require(*, gguf: bool = False) -> Any:
    """The module `transformers`; torch imports too then. gguf: what reading a GGUF file takes is there as well.

    Raises UnsupportedOption naming what is missing or too old, and how to install it.
    """
    needed = ["torch", "transformers", "safetensors"] + (["gguf", "accelerate"] if gguf else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedOption(f"backend 'hf' needs {' and '.join(missing)}, not installed here; {INSTALL}")
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < OLDEST_TRANSFORMERS:
        raise UnsupportedOption(
            f"backend 'hf' needs transformers {OLDEST_TRANSFORMERS} or newer, and {version} is installed; {INSTALL}"
        )
    try:
        import torch  # noqa: F401
        import transformers
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedOption(f"backend 'hf' needs torch and transformers, which do not import: {error}") from error
    return transformers


@contextmanager
def quiet(report: Report | None = None) -> Iterator[None]:
    """Inside, transformers and the hub client print nothing; report() follows the tensors. One thread at a time.

    Levels, bars and warning filters belong to the whole process, and are as before afterwards.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    loggers = [getLogger("transformers"), getLogger("huggingface_hub")]
    with _settings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        levels = [logger.level for logger in loggers]
        bars, hub_bars = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
        for logger in loggers:
            logger.setLevel(SILENCE)
        logging.disable_progress_bar()
        disable_progress_bars()
        try:
            with _bars_replaced(report or (lambda done, total: None)):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            if bars:
                logging.enable_progress_bar()
            (disable_progress_bars if hub_bars else enable_progress_bars)()


@contextmanager
def _bars_replaced(report: Report) -> Iterator[None]:
    """report() in place of the bar over the tensors that are loaded, and nothing in place of the one of GGUF files."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging

    def loaded(factory: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if args and hasattr(args[0], "__len__"):
            return _counted(args[0], report)
        return factory(*args, **keywords)

    set_hook = getattr(logging, "set_tqdm_hook", None)  # not in the first releases of 5
    previous = set_hook(loaded) if set_hook else None
    # It asks tqdm itself for its bar, whatever transformers is told.
    bar = getattr(gguf_loading, "tqdm", None)
    if bar is not None:
        gguf_loading.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        if bar is not None:
            gguf_loading.tqdm = bar
        if set_hook:
            with suppress(Exception):
                set_hook(previous)


def _counted(items: Collection[Any], report: Report) -> Iterator[Any]:
    total = len(items)
    for done, item in enumerate(items):
        report(done, total)
        yield item
    report(total, total)
