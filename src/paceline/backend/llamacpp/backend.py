"""LlamaCppBackend: the Backend protocol over llama.cpp's C interface.

One context holds every slot (`kv_unified`): a slot is a llama.cpp sequence, a forward is one llama_decode over
the packed new tokens of many slots, a rollback is llama_memory_seq_rm, a fork is llama_memory_seq_cp of the whole
sequence. llama.cpp asserts on malformed batches, which ends the process, so everything is checked before it is called.
"""

from __future__ import annotations

import ctypes
import heapq
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError, InvariantError, RollbackError
from ...types import BackendInfo, Segment
from ..batch import check_batch, set_aside
from .cells import CellBook
from .loading import Wishes, load
from .native import Progress, said
from .tokenizer import LlamaCppTokenizer

__all__ = ["LlamaCppBackend"]

POINTER_CODE: Literal["I", "Q"] = "Q" if ctypes.sizeof(ctypes.c_void_p) == 8 else "I"
STATUS = {
    1: "no room in the KV memory for the batch",
    2: "aborted",
    -1: "the batch is not valid",
    -2: "out of memory",
    -3: "the computation failed",
}


class LlamaCppBackend:
    """Run a GGUF model. Implements Backend; use it from one thread at a time.

    path: the file. max_seqs: slots, 1..256. max_len: tokens one slot may hold (default: what the model was
    trained for, at most 4,096). clip_max_len: max_len is only an upper bound, so more than the model was trained for
    is no error. kv_tokens: tokens all slots together may hold, forks counted once (default: max_len * min(max_seqs,
    4)). max_step_tokens: tokens in one forward (default: 1,024, or kv_tokens where that is less). n_threads: default
    the physical cores this process may use. progress(description, bytes done, bytes in all) follows the loading.

    Raises ModelNotFound or ModelFormatError for a file that cannot be used, by name and with llama.cpp's own words;
    InvalidParams for a number out of range; UnsupportedOption where llama-cpp-python is missing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_seqs: int = 16,
        max_len: int | None = None,
        n_threads: int | None = None,
        max_step_tokens: int | None = None,
        kv_tokens: int | None = None,
        clip_max_len: bool = False,
        progress: Progress | None = None,
    ) -> None:
        wanted = Wishes(max_seqs, max_len, n_threads, max_step_tokens, kv_tokens, clip_max_len)
        self._model, self.info, self._window = load(Path(path), wanted, progress)
        self._native = self._model.native
        self.tokenizer = LlamaCppTokenizer(self._model)
        self._cells = CellBook(self.info.max_slots, self.info.kv_tokens)
        self._free_slots = list(range(self.info.max_slots))
        self._in_use = [False] * self.info.max_slots
        self._batch = _PackedBatch(self._native, self.info)
        self._no_rows = np.empty((0, self.info.vocab_size), np.float32)
        self._views_of = 0
        self._views: dict[int, NDArray[np.float32]] = {}

    # --- slots --------------------------------------------------------------------------------------

    def acquire(self, tokens: Sequence[int] = ()) -> int:
        """An empty slot, the lowest that is free; nothing is shared. Raises BackendError where none is."""
        self._model.check_open()
        if not self._free_slots:
            raise BackendError(f"all {self.info.max_slots} slots are in use; release one or raise max_seqs")
        slot = heapq.heappop(self._free_slots)
        self._in_use[slot] = True
        return slot

    def length(self, slot: int) -> int:
        """Tokens cached in `slot`."""
        return self._cells.length(self._used(slot))

    def fork(self, slot: int) -> int:
        """A new slot that holds the same tokens in the same KV cells. Raises BackendError where no slot is free."""
        memory = self._model.memory
        length = self.length(slot)
        new = self.acquire()
        self._native.llama_memory_seq_cp(memory, slot, new, -1, -1)
        self._cells.share(slot, new)
        if self._native.llama_memory_seq_pos_max(memory, new) != length - 1:
            self.release(new)
            raise BackendError(f"llama.cpp did not copy the {length} tokens of slot {slot} to slot {new}")
        return new

    def release(self, slot: int) -> None:
        """Give the slot back, whatever its state."""
        memory = self._model.memory
        self._used(slot)
        # Removing a whole sequence never fails, says llama.h; believe it only when it says so itself.
        if not self._native.llama_memory_seq_rm(memory, slot, -1, -1):
            raise BackendError(f"llama.cpp did not empty slot {slot}")
        self._cells.cut(slot, 0)
        self._in_use[slot] = False
        heapq.heappush(self._free_slots, slot)

    def reserve(self, slot: int, length: int) -> bool:
        """Set KV cells aside so that `slot` can grow to `length` tokens; False where too few are free."""
        return self._cells.reserve(self._used(slot), length)

    def commit(self, slot: int, length: int) -> None:
        """Nothing is published here; see acquire()."""

    def keep(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Trees are not run here (info.can_tree is False): raises RollbackError."""
        raise RollbackError(f"slot {slot}: llama.cpp sequences hold no trees here, so no path can be kept")

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of `slot`.

        Raises RollbackError where llama.cpp cannot or did not; the slot is then as it was, or only fit
        for release().
        """
        memory = self._model.memory
        cached = self.length(slot)
        if not 0 <= length <= cached:
            raise RollbackError(f"cannot truncate slot {slot} to {length} tokens: it holds {cached}")
        if length == cached:
            self._cells.cut(slot, length)
            return
        if length and not self.info.can_truncate:
            raise RollbackError(
                f"cannot truncate slot {slot} from {cached} to {length} tokens: {self.info.no_speculation_reason}"
            )
        if length and self._window:
            self._check_window(memory, slot, length)
        removed = self._native.llama_memory_seq_rm(memory, slot, length, -1)
        last = self._native.llama_memory_seq_pos_max(memory, slot)
        if not removed or last != length - 1:
            raise RollbackError(
                f"llama.cpp did not truncate slot {slot} from {cached} to {length} tokens: "
                f"seq_rm returned {bool(removed)} and the last position is {last}"
            )
        self._cells.cut(slot, length)

    def _check_window(self, memory: Any, slot: int, length: int) -> None:
        # Layers with a sliding window may have given cells that left the window to other tokens. Going back
        # moves the window back, and it must not reach a position that is gone.
        first = self._native.llama_memory_seq_pos_min(memory, slot)
        if first > max(0, length - self._window + 1):
            raise RollbackError(
                f"cannot truncate slot {slot} to {length} tokens: the sliding window of {self._window} reaches "
                f"before position {first}, and what was there is overwritten"
            )

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, batch: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """Cache every segment's tokens; float32[num_rows, V] logits for each segment.

        The arrays are views of llama.cpp's own buffer: the next forward overwrites them and close() frees
        them. Raises BackendError naming slot and size, and caches nothing, for an empty batch or segment, a slot
        that is not in use or comes twice, a start that is not the cached length, a token outside the vocabulary,
        or more tokens than a step, a slot or the KV memory holds.
        """
        context = self._model.context
        ids = check_batch(self.info, self.length, batch, code="i")
        with set_aside(batch, self._cells, self.reserve, lambda: self._room(sum(map(len, ids)))):
            rows = self._batch.pack(batch, ids)
            status = self._native.llama_decode(context, self._batch.struct)
            if status:
                self._undo(batch)
                why = STATUS.get(status, "fatal error")
                raise BackendError(
                    f"llama.cpp could not run a batch of {self._batch.struct.n_tokens} tokens for slots "
                    f"{[s.slot for s in batch]}: {why} (status {status}) {said()}".rstrip()
                )
        for segment in batch:
            self._cells.grow(segment.slot, len(segment.tokens))
        return self._rows(context, batch, rows)

    def _room(self, total: int) -> str:
        return (
            f"the batch has {total} tokens and the KV memory has room for {self._cells.free} of {self.info.kv_tokens}, "
            "reserved ones included; release a slot or raise kv_tokens"
        )

    def _undo(self, batch: Sequence[Segment]) -> None:
        """After a failed forward: leave every slot as it was, or empty where the model cannot roll back."""
        memory = self._model.memory
        for segment in batch:
            slot, start = segment.slot, segment.start
            if self._native.llama_memory_seq_pos_max(memory, slot) == start - 1:
                continue
            if not self._native.llama_memory_seq_rm(memory, slot, start, -1):
                self._native.llama_memory_seq_rm(memory, slot, -1, -1)
                self._cells.cut(slot, 0)

    def _rows(self, context: Any, batch: Sequence[Segment], rows: int) -> list[NDArray[np.float32]]:
        if not rows:
            return [self._no_rows for _ in batch]
        first = self._native.llama_get_logits(context)
        logits = self._view(ctypes.addressof(first.contents), rows)
        if len(batch) == 1:
            return [logits]
        out, at = [], 0
        for segment in batch:
            out.append(logits[at : at + segment.num_rows])
            at += segment.num_rows
        return out

    def _view(self, address: int, rows: int) -> NDArray[np.float32]:
        """The first `rows` rows of llama.cpp's buffer, which it moves only when it needs a larger one."""
        if self._views_of != address:
            self._views_of, self._views = address, {}
        view = self._views.get(rows)
        if view is None:
            V = self.info.vocab_size
            memory: Any = (ctypes.c_float * (rows * V)).from_address(address)
            view = self._views[rows] = np.ndarray((rows, V), np.float32, memory)
        return view

    # --- upkeep -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError where our lengths and llama.cpp's memory differ, or cells are lost."""
        memory = self._model.memory
        for slot in range(self.info.max_slots):
            length = self._cells.length(slot)
            last = self._native.llama_memory_seq_pos_max(memory, slot)
            if last != length - 1:
                raise InvariantError(f"slot {slot} holds {length} tokens, but llama.cpp's last is at {last}")
            first = self._native.llama_memory_seq_pos_min(memory, slot)
            if length and first and self.info.can_truncate and not self._window:
                raise InvariantError(f"slot {slot} has lost its first {first} tokens in llama.cpp")
            if length and not self._in_use[slot]:
                raise InvariantError(f"slot {slot} is free, yet holds {length} tokens")
        if sorted(self._free_slots) != [s for s, used in enumerate(self._in_use) if not used]:
            raise InvariantError(f"the free slots {sorted(self._free_slots)} are not those out of use")
        self._cells.check()

    def close(self) -> None:
        """Free the model and its context. Idempotent; everything else then raises BackendError."""
        self._model.close()

    def _used(self, slot: int) -> int:
        if not (0 <= slot < self.info.max_slots and self._in_use[slot]):
            raise BackendError(f"slot {slot} is not in use")
        return slot


class _PackedBatch:
    """The arrays of one llama_batch, allocated once; pack() writes the segments one behind the other.

    Plain memoryviews: after a forward the processor's caches hold the model's weights, and every line of numpy that
    is fetched again costs more than the few bytes that are copied here.
    """

    def __init__(self, native: Any, info: BackendInfo) -> None:
        size = info.max_step_tokens
        int32, pointer = ctypes.c_int32, ctypes.c_void_p
        tokens, positions, counts = (int32 * size)(), (int32 * size)(), (int32 * size)(*[1] * size)
        sequences, wanted = (pointer * size)(), (ctypes.c_int8 * size)()
        slots = (int32 * info.max_slots)(*range(info.max_slots))
        self._owned = (tokens, positions, counts, sequences, wanted, slots)
        self._tokens, self._positions = _memory_of(tokens, "i"), _memory_of(positions, "i")
        self._sequences, self._wanted = _memory_of(sequences, POINTER_CODE), _memory_of(wanted, "B")
        self._range = memoryview(array("i", range(info.max_len)))
        first = ctypes.addressof(slots)
        self._slot_address = [first + slot * ctypes.sizeof(int32) for slot in range(info.max_slots)]
        self.struct = native.llama_batch()
        self.struct.token, self.struct.pos, self.struct.n_seq_id = tokens, positions, counts
        self.struct.seq_id = ctypes.cast(sequences, ctypes.POINTER(ctypes.POINTER(int32)))
        self.struct.logits = wanted

    def pack(self, batch: Sequence[Segment], ids: Sequence[array[int]]) -> int:
        """Fill the arrays; how many rows of logits will come."""
        at = rows = 0
        for segment, tokens in zip(batch, ids, strict=True):
            count, wanted = len(tokens), segment.num_rows
            end = at + count
            self._tokens[at:end] = tokens
            self._positions[at:end] = self._range[segment.start : segment.start + count]
            self._sequences[at:end] = array(POINTER_CODE, [self._slot_address[segment.slot]]) * count
            self._wanted[at:end] = bytes(count - wanted) + b"\1" * wanted
            at, rows = end, rows + wanted
        self.struct.n_tokens = at
        return rows


def _memory_of(values: Any, code: Literal["i", "I", "Q", "B"]) -> memoryview[int]:
    return memoryview(values).cast("B").cast(code)
