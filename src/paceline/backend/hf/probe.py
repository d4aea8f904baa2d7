"""Does this model really run through Paceline's attention, and say what it says by itself? Asked once, at load.

A family may ignore the registered function, keep its masks to itself, pass what no keyword tells, or count
positions its own way. None of that shows as an error; all of it shows as other logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import BackendError, ModelFormatError, PacelineError, UnsupportedOption
from .attention import NAME
from .pools import Pools
from .refusals import windows
from .runner import Runner
from .step import CHAIN_ROWS, Part, Step

__all__ = ["probe", "probe_compiled"]

SHORT = 24  # tokens of a probe where no window asks for more
LONGEST_WINDOW = 128  # windows up to this are filled and left behind
ROWS = 32  # rows that are compared
# Largest root mean square difference from the model's own logits, in units of their spread. The model's own
# softmax is in float32 whatever the weights are.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


def probe(model: Any, name: str, pools: Pools, max_len: int, vocab_size: int) -> None:
    """Leave the model set to Paceline's attention, or raise with its own attention set as before.

    Allocates the pools of every layer and writes to them. Raises ModelFormatError naming the model and the reason
    where a layer does not reach the attention function exactly once and in order, or the logits differ from those of
    the model's own attention, whole, in two chunks or in small steps.
    """
    before = model.config._attn_implementation
    try:
        with _refused(model, name):
            _Probe(model, pools, max_len, vocab_size).run()
    except BaseException:
        model.set_attn_implementation(before)
        raise


def probe_compiled(eager: Runner, compiled: Runner, name: str, pools: Pools, max_len: int, vocab_size: int) -> None:
    """Raise BackendError where a compiled forward does not say what the model says, for one token or several."""
    limit = min(max_len, pools.num_pages * pools.page_size)
    for count in sorted({1, min(SHORT, limit)}):
        ids, rows = _ids(count, vocab_size), np.arange(count)
        parts = [Part(0, count, 0, range(-(-count // pools.page_size)))]
        wanted, got = (run(Step(parts, pools), ids, rows).clone() for run in (eager, compiled))
        ratio, allowed = _ratio(got, wanted), _allowed(wanted.dtype)
        if not ratio <= allowed:
            raise BackendError(
                f"compile=True: for {count} tokens the compiled forward of {name} differs from the model's own by "
                f"{ratio:.2g} of its logits' spread where {allowed:g} is allowed ({wanted.dtype}); use compile=False"
            )


def _ids(count: int, vocab_size: int) -> NDArray[np.int64]:
    # Random: in a text that repeats itself, seeing too much or too little may leave every average as it is.
    return np.random.default_rng(0).integers(vocab_size, size=count, dtype=np.int64)


def _beyond(window: int) -> int:
    """Tokens of a text most of whose last rows have left a window."""
    return window + window // 2 + 1


def _ratio(got: Tensor, wanted: Tensor) -> float:
    """The root mean square difference of logits [rows, V] in units of their spread, over the worst row."""
    exact = torch.float64
    apart = (got.to(exact) - wanted.to(exact)).square().mean(-1).sqrt()
    spread = wanted.to(exact).std(-1)
    # Rounding may send a row of a 16-bit mixture of experts to another expert: there the rows' mean counts.
    return float(apart.mean() / spread.mean() if wanted.dtype.itemsize == 2 else (apart / spread).max())


def _allowed(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, 1e-3)


@contextmanager
def _refused(model: Any, name: str) -> Iterator[None]:
    """Say by name which model cannot be served, and why; too little memory is no fault of the model's."""
    who = f"{type(model).__name__} ({name}) cannot be served by backend 'hf'"
    try:
        yield
    except (ModelFormatError, UnsupportedOption) as error:
        raise ModelFormatError(f"{who}: {error}") from None
    except PacelineError:
        raise
    except Exception as error:
        raise ModelFormatError(f"{who}: a trial forward failed with {type(error).__name__}: {error}") from error


class _Probe:
    def __init__(self, model: Any, pools: Pools, max_len: int, vocab_size: int) -> None:
        self.model, self.pools, self.vocab_size = model, pools, vocab_size
        self.config = model.config.get_text_config()
        self.layers = int(self.config.num_hidden_layers)
        self.limit = min(max_len, pools.num_pages * pools.page_size)

    def run(self) -> None:
        _set(self.model, NAME)
        named, passed = windows(self.config), self._passed()
        lengths = [_beyond(w) for w in {*named.values(), *passed} if 0 < w <= LONGEST_WINDOW]
        length = min(self.limit, max([SHORT, *lengths]))
        self._refuse_unseen({name: w for name, w in named.items() if w not in passed and _beyond(w) > length})
        ids = _ids(length, self.vocab_size)
        whole = self._paged(ids, [length], backwards=False)
        # Pages in falling order, so that keys are gathered instead of read as a view.
        half = length // 2
        chunked = self._paged(ids, [half, length - half], backwards=True)
        chains = [min(CHAIN_ROWS, length - at) for at in range(half, length, CHAIN_ROWS)]
        stepped = self._paged(ids, [half, *chains], backwards=True)
        _set(self.model, "eager")
        own = self._own(ids)
        _set(self.model, NAME)
        self._compare(whole, own, "differ from those of the model's own attention")
        self._compare(chunked, whole, "of a text in two chunks differ from those of the same text in one")
        self._compare(stepped, whole, "of a text in small steps differ from those of the same text in one")

    def _passed(self) -> set[int]:
        """Sliding windows that come with the call."""
        step = self._step(1, 0, backwards=False)
        self._forward(step, np.zeros(1, np.int64))
        return step.windows

    def _refuse_unseen(self, unseen: dict[str, int]) -> None:
        """Windows that no layer asks for and no trial reaches may be in the masks, where Paceline does not see them."""
        for name, window in unseen.items():
            if window < self.limit:
                raise ModelFormatError(
                    f"its configuration says {name} = {window}, and none of its layers passes that to the attention "
                    f"function; max_len = {window} would do without it"
                )

    def _step(self, count: int, start: int, *, backwards: bool) -> Step:
        pages = range(-(-(start + count) // self.pools.page_size))
        return Step(
            [Part(0, count, start, [self.pools.num_pages - 1 - p for p in pages] if backwards else pages)], self.pools
        )

    def _paged(self, ids: NDArray[np.int64], chunks: list[int], *, backwards: bool) -> Tensor:
        at, rows = 0, []
        for count in chunks:
            if count:
                step = self._step(count, at, backwards=backwards)
                rows.append(self._forward(step, ids[at : at + count]))
                at += count
        return torch.cat(rows)[-ROWS:]

    def _forward(self, step: Step, ids: NDArray[np.int64]) -> Tensor:
        logits = Runner(self.model)(step, ids, np.arange(max(0, len(ids) - ROWS), len(ids)))
        if step.hits != list(range(self.layers)):
            raise ModelFormatError(
                f"its {self.layers} layers should call the attention function once each and in order, and the calls "
                f"came from layers {step.hits}"
            )
        if logits.shape[-1] != self.vocab_size:
            raise ModelFormatError(f"its logits are {logits.shape[-1]} wide, the vocabulary {self.vocab_size}")
        return logits

    def _own(self, ids: NDArray[np.int64]) -> Tensor:
        with torch.inference_mode():
            row = torch.from_numpy(ids).to(self.pools.device)[None]
            logits: Tensor = self.model(input_ids=row, use_cache=False).logits
            return logits[0, -ROWS:]

    def _compare(self, got: Tensor, wanted: Tensor, what: str) -> None:
        ratio, allowed = _ratio(got, wanted), _allowed(wanted.dtype)
        if not ratio <= allowed:
            raise ModelFormatError(
                f"its logits {what}, by {ratio:.2g} of their spread where {allowed:g} is allowed ({wanted.dtype})"
            )


def _set(model: Any, implementation: str) -> None:
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelFormatError(f"its attention cannot be set to {implementation!r} ({error})") from None
    if model.config.get_text_config()._attn_implementation != implementation:
        raise ModelFormatError("its attention is not on the interface of transformers")
