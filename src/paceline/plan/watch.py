"""Running prompts and writing down every step: its outcome for each request, and its time by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..bench.runs import Ask
from ..bench.target import Target, emitted_tokens
from ..llm import LLM
from ..schedule import MAX_DRAFTS, Candidate, Controller, CostTable, FixedLengths
from ..schedule.cost import Share
from .model import Record, Timed

PLAIN = "none"


@dataclass(slots=True)
class Log:
    """What was written down. records: request -> its steps in order. context: tokens cached before each of them.

    timed: steps in which everybody decoded, and nobody read a prompt. steps: of all. tokens: of all answers.
    """

    records: dict[int, list[Record]] = field(default_factory=dict)
    contexts: list[int] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0


class Watching(FixedLengths):
    """A controller that lets another one decide, and writes down what came of it.

    batch: requests that run together. asked: drafts that each asks for; None where `inner` decides.
    """

    def __init__(self, inner: FixedLengths, batch: int, asked: int | None) -> None:
        self.inner, self.batch, self.asked, self.log = inner, batch, asked, Log()
        self._forward = 0.0  # seconds, of the step that is being made
        self._drafting, self._depth = 0.0, 0  # seconds, and drafts behind one another, in it
        self._tokens: list[int] = []  # emitted in it, by each request that decoded

    def budgets(self, drafter: str, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """As the inner one says."""
        return self.inner.budgets(drafter, candidates, others)

    def lengths(self, candidates: Sequence[Candidate], others: Sequence[Share]) -> list[int]:
        """As the inner one says."""
        return self.inner.lengths(candidates, others)

    def observe_forward(self, shares: Sequence[Share], others: Sequence[Share], seconds: float) -> None:
        """Part of a step."""
        self._forward += seconds
        self.inner.observe_forward(shares, others, seconds)

    def observe(self, candidate: Candidate, position: int, taken: Sequence[int], accepted: int, verified: int) -> None:
        """One request's part of a step."""
        self.log.records.setdefault(candidate.request_id, []).append(Record(verified, accepted, len(taken)))
        self.log.contexts.append(position - 1)
        self._tokens.append(len(taken))
        self.inner.observe(candidate, position, taken, accepted, verified)

    def observe_drafting(
        self, drafter: str, candidates: Sequence[Candidate], budgets: Sequence[int], seconds: float
    ) -> None:
        """Part of a step."""
        self._drafting += seconds
        self._depth = max((len(candidate.proposal or ()) for candidate in candidates), default=0)
        self.inner.observe_drafting(drafter, candidates, budgets, seconds)

    def observe_step(self, rest: float) -> None:
        """The step is over."""
        if len(self._tokens) == self.batch:  # then nobody is left who could read a prompt
            tokens = sum(self._tokens)
            spent = self._forward, self._drafting, rest
            self.log.timed.append(Timed(self.batch, self.asked, self._depth, tokens, *spent))
        self.log.steps += bool(self._tokens)
        self._forward, self._drafting, self._depth, self._tokens = 0.0, 0.0, 0, []
        self.inner.observe_step(rest)

    def forget(self, request_id: int) -> None:
        """Pass it on."""
        self.inner.forget(request_id)


class Watch:
    """Runs requests on an open target with one drafter. costs: what the adaptive controller begins with.

    Its own LLMs, one for each batch size with and without the drafter; the target's are not used.
    """

    def __init__(self, target: Target, drafter: str, costs: CostTable) -> None:
        self._target, self._drafter, self._costs = target, drafter, costs
        self._llms: dict[tuple[str, int], LLM] = {}

    def run(self, asks: Sequence[Ask], length: int | None) -> Log:
        """All asks at once, with `length` drafts a step; None leaves it to the adaptive controller."""
        llm = self._llm(self._drafter if length != 0 else PLAIN, len(asks))
        inner = FixedLengths() if length is not None else Controller(CostTable.from_json(self._costs.to_json()))
        watching = Watching(inner, len(asks), length)
        llm.engine.controller, llm.engine.draft_length = watching, MAX_DRAFTS
        params = [replace(ask.params, draft_length=length) for ask in asks]
        outputs = llm.generate([ask.ids for ask in asks], params)
        watching.log.tokens = sum(emitted_tokens(output) for output in outputs)
        return watching.log

    def _llm(self, drafter: str, batch: int) -> LLM:
        if (drafter, batch) not in self._llms:
            made = LLM(self._target.backend, drafter=self._target.drafters[drafter], max_seqs=batch, measure=False)
            self._llms[drafter, batch] = made
        return self._llms[drafter, batch]

    def close(self) -> None:
        """Close its LLMs; target and drafters stay open."""
        for llm in self._llms.values():
            llm.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
