"""How many KV cells all slots use together. Integers only.

llama.cpp keeps the keys and values of every sequence in one buffer of cells and does not say how many
are free. A forked slot shares the cells of its prefix, and such a cell is free again when the last slot that
holds it lets go. Cells have numbers of our own here; which of llama.cpp's they are does not matter.
"""

from __future__ import annotations

from ...errors import InvariantError

__all__ = ["CellBook"]


class CellBook:
    """The cells of each slot, in order of position; a slot's length is how many it holds."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._reserved = [0] * slots  # tokens a slot may grow to; only what exceeds its length counts
        self._holders = [0] * capacity
        self._free = list(range(capacity))

    @property
    def free(self) -> int:
        """Cells nobody holds."""
        return len(self._free)

    def length(self, slot: int) -> int:
        """Tokens cached in `slot`."""
        return len(self._held[slot])

    def reserve(self, slot: int, length: int) -> bool:
        """Set cells aside so that `slot` can grow to `length` tokens; False where too few are free."""
        others = self._set_aside() - self._claim(slot)
        if length - len(self._held[slot]) > self.free - others:
            return False
        self._reserved[slot] = max(length, self._reserved[slot])
        return True

    def reserved(self, slot: int) -> int:
        """Tokens `slot` may grow to; 0 or less than it holds where nothing is set aside."""
        return self._reserved[slot]

    def unreserve(self, slot: int, length: int) -> None:
        """Give back what was reserved beyond `length` tokens."""
        self._reserved[slot] = min(self._reserved[slot], length)

    def grow(self, slot: int, count: int) -> None:
        """Give `slot` `count` more cells, which it has reserved."""
        at = len(self._free) - count
        new = self._free[at:]
        del self._free[at:]
        for cell in new:
            self._holders[cell] = 1
        self._held[slot] += new

    def cut(self, slot: int, length: int) -> None:
        """Let go of all but the first `length` cells, and of what was reserved."""
        self._reserved[slot] = 0
        held = self._held[slot]
        for cell in held[length:]:
            self._holders[cell] -= 1
            if not self._holders[cell]:
                self._free.append(cell)
        del held[length:]

    def share(self, source: int, target: int) -> None:
        """Let the empty slot `target` hold every cell that `source` holds."""
        self._held[target] = list(self._held[source])
        for cell in self._held[target]:
            self._holders[cell] += 1

    def check(self) -> None:
        """Raise InvariantError where holders, free cells and what is set aside do not add up."""
        holders = [0] * self.capacity
        for held in self._held:
            for cell in held:
                holders[cell] += 1
        free = sorted(cell for cell, count in enumerate(holders) if not count)
        if holders != self._holders or free != sorted(self._free):
            raise InvariantError(
                f"KV cells do not add up: {len(free)} should be free of {self.capacity}, {self.free} are listed"
            )
        if self._set_aside() > self.free:
            raise InvariantError(f"{self._set_aside()} KV cells are set aside, and {self.free} are free")

    def _claim(self, slot: int) -> int:
        """Cells set aside for `slot` beyond those it holds."""
        return max(0, self._reserved[slot] - len(self._held[slot]))

    def _set_aside(self) -> int:
        return sum(self._claim(slot) for slot in range(len(self._held)))
