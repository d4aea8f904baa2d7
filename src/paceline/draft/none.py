"""No drafter: plain decoding, which is speculation with an empty proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ..errors import PacelineError
from ..types import DraftContext, Proposal

__all__ = ["NoDrafter"]


class NoDrafter:
    """Proposes nothing, remembers nothing."""

    name = "none"

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """An empty proposal for everybody."""
        return [Proposal.point(()) for _ in contexts]

    def observe(self, request_id: int, committed: Sequence[int], hidden: NDArray[Any] | None = None) -> None:
        """Nothing to learn."""

    def release(self, request_id: int) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to free."""
