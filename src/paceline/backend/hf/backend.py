"""HFBackend: the Backend protocol over a transformers model whose keys and values lie in Paceline's own pages.

A forward is one packed row of all segments' new tokens with explicit positions and no cache of the model's own; who
attends to what travels in a context variable to the attention function (attention.py). `PageBook` says whose tokens sit
in which pages; this module owns the tensors behind them and moves what the books tell it to move.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...cache import PageBook
from ...errors import BackendError, InvalidParams, PacelineError
from ...params import integer
from ...paths import file_fingerprint
from ...types import BackendInfo, Segment, Tokenizer
from ..batch import check_batch, set_aside
from ..trees import TreeBook, depths
from .loading import LoadedModel, load
from .pools import Pools
from .probe import probe, probe_compiled
from .runner import Runner
from .step import Part, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HFBackend"]

MAX_SEQS = 65536
MAX_PAGE_SIZE = 65536
MAX_INT = 2**31 - 1
DEFAULT_STEP_TOKENS = 1024
Progress = Callable[[str, int, int | None], None]


class HFBackend:
    """Run any decoder of transformers that attends through its attention interface. Use it from one thread at a time.

    model: a folder, a hub id, a .gguf file, or an open PreTrainedModel, which is used as it is and attends through
    Paceline until close(). tokenizer: instead of the model's own. max_seqs: slots. max_len: tokens one slot may hold
    (default: what the model was trained for, at most 4,096). clip_max_len: max_len is only an upper bound, so more than
    the model was trained for is no error. kv_tokens: tokens all slots together may hold, shared ones counted once
    (default: max_len * min(max_seqs, 4)); rounded up to pages. page_size: tokens per page. prefix_cache: whether
    published pages are shared. max_step_tokens: tokens in one forward (default: 1,024, at most kv_tokens).
    n_threads: PyTorch's threads, a setting of the whole process; None leaves it alone. dtype: of weights and pages,
    e.g. "bfloat16". device: e.g. "cuda"; None is "cpu". compile: compile the forward ahead of time, which takes a
    minute or so, once (compiled.py). progress(description, bytes done, bytes in all) follows the loading.

    Raises ModelNotFound and ModelFormatError for a model that cannot be used, by name and reason; InvalidParams for a
    number out of range; UnsupportedOption where torch or transformers is missing.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Tokenizer | None = None,
        max_seqs: int = 16,
        max_len: int | None = None,
        n_threads: int | None = None,
        max_step_tokens: int | None = None,
        kv_tokens: int | None = None,
        page_size: int = 16,
        prefix_cache: bool = True,
        dtype: str | None = None,
        device: str | None = None,
        compile: bool = False,  # noqa: A002  # the word users know
        clip_max_len: bool = False,
        progress: Progress | None = None,
    ) -> None:
        seqs = integer("max_seqs", max_seqs, 1, MAX_SEQS)
        size = integer("page_size", page_size, 1, MAX_PAGE_SIZE)
        wanted_kv = None if kv_tokens is None else integer("kv_tokens", kv_tokens, 1, MAX_INT)
        if max_step_tokens is not None:
            integer("max_step_tokens", max_step_tokens, 1, MAX_INT)
        loaded = load(
            model,
            dtype=dtype,
            device=device,
            max_len=max_len,
            clip_max_len=clip_max_len,
            n_threads=n_threads,
            progress=progress,
            tokenizer=tokenizer,
        )
        length, pages = _sizes(loaded.max_len, max_len, wanted_kv, clip_max_len, seqs, size)
        step_tokens = _step_tokens(max_step_tokens, pages * size)
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.info = BackendInfo(
            name="hf",
            model=loaded.name,
            vocab_size=loaded.vocab_size,
            stop_ids=loaded.stop_ids,
            max_len=length,
            kv_tokens=pages * size,
            max_slots=seqs,
            max_step_tokens=step_tokens,
            can_tree=True,
            page_size=size,
            fingerprint=_fingerprint(model, loaded, compile),
        )
        self._dtype = np.float64 if loaded.dtype == torch.float64 else np.float32
        self._pools = Pools(pages, size, loaded.device)
        self._book = PageBook(pages, size, seqs, prefix_cache=prefix_cache)
        self._trees = TreeBook()
        self._model: Any = loaded.model
        self._attention_before = self._model.config._attn_implementation
        if progress is not None:  # the first time after an installation its kernels are compiled
            progress(f"comparing {loaded.name} with its own attention", 0, None)
        probe(self._model, loaded.name, self._pools, length, loaded.vocab_size)
        self._run = Runner(self._model)
        if compile:
            self._compile(progress, own=self._model is not model)

    def _compile(self, progress: Progress | None, *, own: bool) -> None:
        """Put a compiled forward in the model's place, once it has said the same. own: nobody else has the model."""
        from .compiled import compile_forward

        try:
            compiled = Runner(self._model, compile_forward(self._model, name=self.info.model, progress=progress))
            probe_compiled(self._run, compiled, self.info.model, self._pools, self.info.max_len, self.info.vocab_size)
        except BaseException:
            self.close()
            raise
        self._run = compiled
        if own:
            self._model.to("meta")  # the compiled forward has weights of its own

    # --- slots --------------------------------------------------------------------------------------

    def acquire(self, tokens: Sequence[int] = ()) -> int:
        """A slot for a sequence that starts with `tokens`; length() says how many of them it holds already.

        Raises BackendError where no slot is free.
        """
        self._check_open()
        return self._book.open(tokens)

    def length(self, slot: int) -> int:
        """Tokens cached in `slot`."""
        return self._book.length(slot)

    def reserve(self, slot: int, length: int) -> bool:
        """Set pages aside so that `slot` can grow to `length` tokens; False, and nothing done, if too few are free."""
        self._check_open()
        copies = self._book.reserve(slot, length)
        if copies is None:
            return False
        self._pools.copy_pages(copies)
        return True

    def commit(self, slot: int, length: int) -> None:
        """The first `length` cached tokens are committed: full pages of them may be published.

        Raises BackendError where fewer are cached, or some of them are branches of a tree.
        """
        self._check_open()
        self._trees.check_settled(slot, length, self._book.length(slot))
        self._book.commit(slot, length)

    def fork(self, slot: int) -> int:
        """A new slot that holds the same tokens in the same pages; whoever writes to one copies it first."""
        self._check_open()
        cached = self._book.length(slot)
        self._trees.check_settled(slot, cached, cached)
        return self._book.fork(slot)

    def release(self, slot: int) -> None:
        """Give the slot back, whatever its state."""
        self._book.release(slot)
        self._trees.forget(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of `slot`, and what was set aside.

        Raises RollbackError where fewer are cached, or what would stay is not one branch of a tree.
        """
        self._check_open()
        self._trees.check_truncate(slot, length, self._book.length(slot))
        self._book.truncate(slot, length)
        self._trees.forget(slot)

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """After a tree: keep the first `length` tokens and, behind them, those `nodes` further on.

        Keys are stored rotated to their position in the sequence, and along a path from the cached tokens a node's
        depth is its place: its keys and values are moved as they are. Raises RollbackError where nodes are not a
        path, or would be moved into a page that another branch was committed in.
        """
        self._check_open()
        self._trees.check_keep(slot, length, nodes, self._book.length(slot))
        self._book.check_keep(slot, length, nodes)  # before a cell is moved into a page that somebody else sees
        moves = [(length + node, length + place) for place, node in enumerate(nodes) if node != place]
        if moves:
            pages, size = self._book.pages(slot), self.info.page_size
            sources, targets = (
                [pages[at // size] * size + at % size for at in ends] for ends in zip(*moves, strict=True)
            )
            self._pools.move_cells(sources, targets)
        self._book.keep(slot, length, nodes)
        self._trees.forget(slot)

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, batch: Sequence[Segment]) -> list[NDArray[Any]]:
        """Cache every segment's tokens; float32[num_rows, V] logits for each segment (float64 of a float64 model).

        Raises BackendError naming slot and size, and caches nothing, for an empty batch or segment, a slot that is
        not in use, comes twice or holds a tree nobody decided, a start that is not the cached length, a token outside
        the vocabulary, parents that are no tree, more tokens than a step, a slot or the memory holds, and for
        whatever goes wrong inside PyTorch.
        """
        self._check_open()
        ids = array("q")
        for tokens in check_batch(self.info, self._book.length, batch, trees=self._trees):
            ids += tokens
        with set_aside(batch, self._book, self.reserve, self._room):
            values = self._computed(batch, np.frombuffer(ids, np.int64))
        for segment in batch:
            self._book.append(segment.slot, segment.tokens)
            self._trees.wrote(segment)
        out, at = [], 0
        for segment in batch:
            out.append(values[at : at + segment.num_rows])
            at += segment.num_rows
        return out

    def _computed(self, batch: Sequence[Segment], ids: NDArray[np.int64]) -> NDArray[Any]:
        """Run the model on a batch that is checked and has its memory; the logits [rows, V] that were asked for."""
        step, rows = self._pack(batch)
        try:
            logits = self._run(step, ids, rows)
            values = np.asarray(logits.to("cpu", torch.float64 if self._dtype == np.float64 else torch.float32))
        except PacelineError:
            raise
        except Exception as error:
            raise BackendError(
                f"a forward of {len(ids)} tokens for slots {[s.slot for s in batch]} failed with "
                f"{type(error).__name__}: {error}"
            ) from error
        if step.hits != self._pools.layers:  # somebody else has the model too, and set it otherwise
            raise BackendError(
                f"{len(step.hits)} of {len(self._pools.layers)} layers attended through Paceline in this forward; a "
                "model that a backend holds must stay set to its attention"
            )
        return values

    def _pack(self, batch: Sequence[Segment]) -> tuple[Step, NDArray[np.int64]]:
        """The step, and which rows of the packed row give logits: at least one, for a model always gives some."""
        parts: list[Part] = []
        rows: list[int] = []
        at = 0
        for segment in batch:
            count = len(segment.tokens)
            tree = (None, None) if segment.parents is None else depths(segment.parents)
            pages = self._book.pages(segment.slot)
            parts.append(Part(at, count, segment.start, pages, *tree))
            at += count
            rows.extend(range(at - segment.num_rows, at))
        return Step(parts, self._pools), np.array(rows or [at - 1], np.int64)

    def _room(self) -> str:
        return (
            f"{self._book.free_pages} of {self._pools.num_pages} pages of {self.info.page_size} tokens are free; "
            "release a slot or raise kv_tokens"
        )

    # --- upkeep -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError where the books do not balance."""
        self._book.check()
        self._trees.check(self._book.length)

    def close(self) -> None:
        """Free model and pages; a model that was given open attends as before. Idempotent."""
        if self._model is not None:
            self._model.set_attn_implementation(self._attention_before)
            self._model = self._run = None  # type: ignore[assignment]
            self._pools.free()

    def _check_open(self) -> None:
        if self._model is None:
            raise BackendError("the model is closed")


def _sizes(
    longest: int, wanted: int | None, kv_tokens: int | None, clip: bool, seqs: int, page_size: int
) -> tuple[int, int]:
    """max_len and the number of pages."""
    if kv_tokens is None:
        return longest, -(-longest // page_size) * min(seqs, 4)
    if kv_tokens < longest and wanted is not None and not clip:
        raise InvalidParams(f"kv_tokens = {kv_tokens}; allowed: at least max_len = {longest}")
    return min(longest, kv_tokens), -(-kv_tokens // page_size)


def _step_tokens(wanted: int | None, kv_tokens: int) -> int:
    if wanted is None:
        return min(DEFAULT_STEP_TOKENS, kv_tokens)
    if wanted > kv_tokens:
        raise InvalidParams(f"max_step_tokens = {wanted}; allowed: at most kv_tokens = {kv_tokens}")
    return wanted


def _fingerprint(model: Any, loaded: LoadedModel, compiled: bool) -> str | None:
    """What the time of a forward depends on; None for a model that came from memory."""
    path = Path(model) if isinstance(model, str | Path) else None
    if path is None:
        return None
    what = file_fingerprint(path) if path.exists() else str(model)
    kind = "compiled" if compiled else "eager"
    return f"{what}, {loaded.dtype} on {loaded.device}, {kind}, {torch.get_num_threads()} threads, {torch.__version__}"
