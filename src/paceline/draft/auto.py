"""Two drafters, of which every request uses one in each step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from numpy.typing import NDArray

from ..errors import InvalidParams, PacelineError
from ..types import DraftContext, Drafter, Proposal
from .guarded import GuardedDrafter

__all__ = ["AutoDrafter"]


class AutoDrafter:
    """`cheap` costs next to nothing and often has no draft; `dear` always has one, and it costs time.

    The engine takes the two apart (`stages`): it asks `cheap`, and then `dear` for those requests alone for which that
    promises more (schedule/controller.py). Whoever else calls it gets what `dear` drafts where `cheap` has nothing but
    what is forced. Proposals of `cheap` must be points: so the choice hangs on the committed text and on earlier
    steps, never on a draft that was drawn.

    Raises InvalidParams where both have one name: acceptance is kept by name.
    """

    def __init__(self, cheap: Drafter, dear: Drafter, name: str) -> None:
        if cheap.name == dear.name:
            raise InvalidParams(
                f"two drafters named {cheap.name!r}; acceptance is kept by name, so give them two names"
            )
        self.stages = (cheap, dear)
        self.name = name

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """Up to budgets[i] drafts for contexts[i]."""
        cheap, dear = (GuardedDrafter(stage) for stage in self.stages)
        answers = cheap.propose(contexts, budgets)
        asked = [i for i, answer in enumerate(answers) if isinstance(answer, Proposal) and not answer.num_guessed]
        drafted = dear.propose([contexts[i] for i in asked], [budgets[i] for i in asked]) if asked else []
        for i, answer in zip(asked, drafted, strict=True):
            answers[i] = answer
        return answers

    def observe(self, request_id: int, committed: Sequence[int], hidden: NDArray[Any] | None = None) -> None:
        """Pass on newly committed tokens to both."""
        for stage in self.stages:
            stage.observe(request_id, committed, hidden)

    def release(self, request_id: int) -> None:
        """Tell both that a request is over, the second even where the first fails."""
        with ExitStack() as both:
            for stage in reversed(self.stages):
                both.callback(stage.release, request_id)

    def close(self) -> None:
        """Close both."""
        with ExitStack() as both:
            for stage in reversed(self.stages):
                both.callback(stage.close)

    def check(self, contexts: Sequence[DraftContext] = ()) -> None:
        """Raise what the check() of either raises, where it has one."""
        for stage in self.stages:
            check = getattr(stage, "check", None)
            if check is not None:
                check(contexts)
