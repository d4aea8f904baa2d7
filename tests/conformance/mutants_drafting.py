"""Mutants of drafters and of the choice of a rule; and drafters so bad that they must not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.admission import admit_proposal
from paceline.draft import ModelDrafter
from paceline.draft.lookup import _History
from paceline.draft.model import _Job
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.sampling import History, distribution
from paceline.types import Distribution, DraftContext, FloatArray, Proposal
from paceline.verify import verify_block, verify_point, verify_rejection
from tests.draft.test_forced_exact import forced_law_error, forced_scene
from tests.drafters import PointDrafter, TableDrafter

from .enumerator import TOLERANCE
from .mutants import edit, harmless, mutant
from .mutants_checks import check
from .mutants_laws import SCENARIOS

Patch = pytest.MonkeyPatch

# --- drafters that lie about q ------------------------------------------------------------------------

Q = "context.history.distribution(self._fit(logits), job.drafts)"
PICK = "q.pick(context.draws, position, context.role, node)"


def draw_under(patch: Patch, change: Callable[[SamplingParams], SamplingParams]) -> None:
    """A draft model that draws, and answers for it, under other params than the request's."""

    def q_of(logits: FloatArray, context: DraftContext, drafts: list[int]) -> Distribution:
        changed = change(context.params)
        return History(changed, context.tokens, context.prompt_length, logits.size).distribution(logits, drafts)

    edit(patch, ModelDrafter._draft, (Q, "q_of(self._fit(logits), context, job.drafts)"), q_of=q_of)


@mutant(
    "argmax draft said to be sampled",
    "q is dense, the draft was not drawn from it",
    "law/model",
)
def _(patch: Patch) -> None:
    edit(patch, ModelDrafter._draft, (PICK, "int(q.dense().argmax())"))


@mutant(
    "q before temperature and filters",
    "drawn from the filtered q, answered for with the raw one",
    "law/model",
    "vllm#10198",
)
def _(patch: Patch) -> None:
    edit(
        patch,
        ModelDrafter._draft,
        ("job.q.append(q)", "job.q.append(distribution(logits, plain, None))"),
        distribution=distribution,
        plain=SamplingParams(),
    )


@mutant("drafts drawn before temperature and filters", "the other way round", "law/model block", "vllm#10198")
def _(patch: Patch) -> None:
    raw = "distribution(logits, plain, None)"
    edit(
        patch,
        ModelDrafter._draft,
        (PICK, PICK.replace("q.pick", f"{raw}.pick")),
        distribution=distribution,
        plain=SamplingParams(),
    )


@mutant(
    "assistant at temperature 1", "exact, but it accepts less than it could", "self-draft", "transformers PR #40976"
)
def _(patch: Patch) -> None:
    draw_under(patch, lambda params: replace(params, temperature=1.0))


@mutant(
    "exact match instead of the ratio",
    "sampled drafts are judged by a fresh draw of the target",
    "self-draft",
    "vllm#40551",
)
def _(patch: Patch) -> None:
    patch.setattr("paceline.engine.verify_rejection", verify_point)


@mutant("q of a neighbour", "the batch's q rows are handed out in another order", "law/company model")
def _(patch: Patch) -> None:
    def swap(jobs: list[_Job]) -> list[Any]:
        answers = [job.answer for job in jobs]
        rows = [answer.q for answer in answers]
        return [replace(answer, q=q) if q else answer for answer, q in zip(answers, rows[1:] + rows[:1], strict=True)]

    edit(
        patch,
        ModelDrafter.propose,
        ("[job.answer for job in jobs if job.answer is not None]", "swap(jobs)"),
        swap=swap,
    )


@mutant("one q buffer for the chain", "the rows of all drafts are the last one's", "law/model")
def _(patch: Patch) -> None:
    edit(patch, ModelDrafter._draft, ("job.q.append(q)", "job.q[:] = [q] * (len(job.q) + 1)"))


@mutant("drafts of a step share their noise", "one key for all draws of the chain", "law/model")
def _(patch: Patch) -> None:
    edit(patch, ModelDrafter._draft, (PICK, PICK.replace("position", "job.num_committed").replace(", node)", ", 0)")))


@mutant("an unsure draft is dropped", "whether it is verified depends on the token itself", "law/model")
def _(patch: Patch) -> None:
    unsure = "if q.prob(token) < 0.5:\n        job.finish()\n        return\n    job.drafts.append(token)"
    edit(patch, ModelDrafter._draft, ("job.drafts.append(token)", unsure))


@mutant("the draft length looks at the last draft", "an even token at the end is cut off", "law/rejection")
def _(patch: Patch) -> None:
    early = "answer = answer.first(len(answer) - (answer.tokens[-1:] == (0,)))\n    return answer.first("
    edit(patch, admit_proposal, ("return answer.first(", early))


@mutant("hopeless drafts are dropped before verifying", "whether x is judged depends on p(x)", "law/block")
def _(patch: Patch) -> None:
    hopeful = "w.proposal.first(next((i for i, x in enumerate(w.proposal.tokens) if rows[i].prob(x) < 0.3), 99))"
    rows = "rows = TargetRows(sequence, w.proposal.tokens, w.logits)"
    edit(patch, Engine._verify_and_commit, (rows, f"{rows}; w.proposal = {hopeful}; {rows}"))


@mutant("a draft that ends the request is dropped", "stop ids come out too rarely", "law/stop")
def _(patch: Patch) -> None:
    edit(patch, History.num_useful, ("(i + 1 for", "(i for"))


@mutant("a draft with p = 0 is dropped", "legal drafts are verified, illegal ones vanish", "law/zeros")
def _(patch: Patch) -> None:
    draft = TableDrafter._draft

    def legal_only(self: TableDrafter, context: Any, budget: int) -> Proposal:
        proposal, seen = draft(self, context, budget), tuple(context.tokens)
        for i, token in enumerate(proposal.tokens):
            if SCENARIOS["law/zeros"].model.p((*seen, *proposal.tokens[:i]))[token] == 0.0:
                return proposal.first(i)
        return proposal

    patch.setattr(TableDrafter, "_draft", legal_only)


# --- forced tokens --------------------------------------------------------------------------------------


@check("law/forced")
def forced_tokens_leave_the_law() -> None:
    for inner in ("model", "ignorant"):
        off = forced_law_error(forced_scene(inner, "plain", budget=2), verify_block)
        assert off <= TOLERANCE, f"forced+{inner}: the law is off by {off:.2g}"


@mutant("forced tokens are found by comparing", "sampled drafts count as forced where they are equal", "law/forced")
def _(patch: Patch) -> None:
    patch.setattr("paceline.draft.forced._begins_with", lambda answer, start: answer.tokens[: len(start)] == start)


@mutant("forced tokens with the q of the draft model", "they were not drawn from it", "law/forced")
def _(patch: Patch) -> None:
    flat = "[Distribution.of(np.full(self._vocab_size, 1 / self._vocab_size)) for _ in start]"
    edit(
        patch,
        ModelDrafter._job,
        ("[Distribution.one_hot(token, self._vocab_size) for token in start]", flat),
        np=np,
    )
    patch.setattr("paceline.draft.forced._begins_with", lambda answer, start: True)


# --- which rule ---------------------------------------------------------------------------------------


@mutant(
    "guesses said to be sampled from a flat q",
    "a point draft has no q to answer for",
    "law/point",
    "openvino.genai PR #2331",
)
def _(patch: Patch) -> None:
    judge_by_ratio(patch, lambda token, size: np.full(size, 1.0 / size))


@mutant("guesses judged by a one-hot q", "exact, but the text of a seed depends on the drafter", "path")
def _(patch: Patch) -> None:
    judge_by_ratio(patch, lambda token, size: np.eye(size)[token])


def judge_by_ratio(patch: Patch, q_of: Callable[[int, int], FloatArray]) -> None:
    def rule(rows: Any, proposal: Proposal, draws: Any, position: int) -> Any:
        if proposal.kind == "sampled" or not len(proposal):
            return verify_point(rows, proposal, draws, position)
        q = [q_of(token, rows[0].vocab_size) for token in proposal.tokens]
        return verify_rejection(rows, Proposal.sampled(proposal.tokens, q), draws, position)

    patch.setattr("paceline.engine.verify_point", rule)


# --- what must not matter -----------------------------------------------------------------------------


def wrong_guesses(seen: tuple[int, ...], budget: int) -> list[int]:
    return [(17 * len(seen) + 5 * i + seen[-1]) % 3 for i in range(budget)]


@harmless("a corrupted lookup index", "a guess is a guess", "path")
def _(patch: Patch) -> None:
    def continuation(self: _History, start: tuple[int, ...], count: int) -> tuple[int, list[int]]:
        return 2, [(7 * len(self.tokens) + i) % 11 for i in range(count)]

    patch.setattr(_History, "continuation", continuation)


@harmless("random guesses", "with a length of their own, in every step", "law/point")
def _(patch: Patch) -> None:
    def propose(self: PointDrafter, contexts: Sequence[Any], budgets: Sequence[int]) -> list[Proposal]:
        return [
            Proposal.point(wrong_guesses(tuple(c.tokens), len(c.tokens) % (k + 1)))
            for c, k in zip(contexts, budgets, strict=True)
        ]

    patch.setattr(PointDrafter, "propose", propose)


@harmless("a length that looks at *earlier* drafts", "stopping behind an unsure token anticipates nothing", "law/model")
def _(patch: Patch) -> None:
    edit(patch, ModelDrafter._draft, ("if ends or", "if ends or q.prob(token) < 0.5 or"))


@harmless("a draft model read backwards", "q is what was drawn from, whatever it is worth", "law/model")
def _(patch: Patch) -> None:
    patch.setattr(ModelDrafter, "_fit", lambda self, logits: logits[::-1].copy())


@harmless("an assistant at temperature 1", "slower, and still exact", "law/model", "transformers PR #40976")
def _(patch: Patch) -> None:
    draw_under(patch, lambda params: replace(params, temperature=1.0, top_k=0))


@harmless("penalties missing from q", "slower, and still exact", "law/penalties")
def _(patch: Patch) -> None:
    draw_under(patch, lambda params: SamplingParams(temperature=params.temperature))


@harmless("forced tokens missing from the history of q", "a worse guess, drawn from the q it answers for", "law/forced")
def _(patch: Patch) -> None:
    edit(
        patch, ModelDrafter._draft, ("self._fit(logits), job.drafts", "self._fit(logits), job.drafts[job.num_settled:]")
    )
