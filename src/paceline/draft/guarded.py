"""A drafter may be anybody's code: whatever it does wrong becomes a typed error."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import DrafterError, PacelineError
from ..types import DraftContext, Drafter, Proposal

__all__ = ["GuardedDrafter"]


class GuardedDrafter:
    """`inner` as the engine calls it. propose() never raises; observe() and release() raise PacelineError only."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """One answer for each context; the same error for all where the drafter failed as a whole."""
        try:
            answers = list(self.inner.propose(contexts, budgets))
            if len(answers) != len(contexts):
                raise DrafterError(f"drafter {self.inner.name} answered {len(answers)} of {len(contexts)} requests")
        except Exception as error:
            return [self._typed(error)] * len(contexts)
        return answers

    def observe(self, request_id: int, committed: Sequence[int]) -> None:
        """Pass on newly committed tokens."""
        try:
            self.inner.observe(request_id, committed)
        except PacelineError:
            raise
        except Exception as error:
            raise self._typed(error) from error

    def release(self, request_id: int) -> None:
        """Pass on that a request is over."""
        try:
            self.inner.release(request_id)
        except PacelineError:
            raise
        except Exception as error:
            raise self._typed(error) from error

    def _typed(self, error: Exception) -> PacelineError:
        if isinstance(error, PacelineError):
            return error
        fault = DrafterError(f"drafter {self.inner.name} failed: {type(error).__name__}: {error}")
        fault.__cause__ = error
        return fault
