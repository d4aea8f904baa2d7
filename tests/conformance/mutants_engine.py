"""Mutants of sampling, drafting, KV memory, history and commit; and changes that must not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.admission import admit_proposal
from paceline.backend.toy import ToyBackend
from paceline.draft import ModelDrafter
from paceline.draft.lookup import _History
from paceline.draft.model import _Job
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.sampling import distribution
from paceline.sequence import Sequence as Running
from paceline.sequence import TargetRows
from paceline.types import Distribution, FloatArray, Proposal
from paceline.verify import verify_point, verify_rejection
from tests.drafters import PointDrafter, TableDrafter

from .mutants import edit, harmless, mutant
from .mutants_checks import SCENARIOS

Patch = pytest.MonkeyPatch

# --- sampling -----------------------------------------------------------------------------------------

Wrong = Callable[[FloatArray, SamplingParams, Any], Distribution]


def sample_wrongly(patch: Patch, wrong: Wrong) -> None:
    """Put `wrong` where target and drafter make their distributions."""
    patch.setattr("paceline.sequence.distribution", wrong)
    patch.setattr("paceline.draft.model.distribution", wrong)


def cut(logits: FloatArray, kept: Any) -> FloatArray:
    return np.where(kept, logits, -np.inf)


def softmax(logits: FloatArray) -> FloatArray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def nucleus(p: FloatArray, top_p: float) -> Any:
    """bool[V]: the likeliest tokens up to the one that reaches top_p."""
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(p.size, dtype=bool)
    kept[order[: 1 + int(np.searchsorted(np.cumsum(p[order]), top_p))]] = True
    return kept


@mutant("greedy ties go to the highest id", "the plain argmax takes the lowest", "law/greedy")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        if params.temperature > 0:
            return distribution(logits, params, counts)
        return Distribution.one_hot(logits.size - 1 - int(np.argmax(logits[::-1])), logits.size)

    sample_wrongly(patch, wrong)


@mutant("top-k keeps all ties", "more than k tokens survive", "law/ties")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        if 0 < params.top_k < logits.size:
            logits = cut(logits, logits >= np.sort(logits)[-params.top_k])
        return distribution(logits, replace(params, top_k=0), counts)

    sample_wrongly(patch, wrong)


@mutant("top-p before top-k", "the nucleus is measured on the row of another stage", "law/filters")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        kept = nucleus(softmax(logits / (params.temperature or 1.0)), params.top_p)
        return distribution(cut(logits, kept), replace(params, top_p=1.0), counts)

    sample_wrongly(patch, wrong)


@mutant("top-p without the token that reaches it", "the nucleus ends one token early", "law/top-p", "vllm#10198")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        p = distribution(logits, replace(params, top_p=1.0, min_p=0.0), counts).dense()
        kept = nucleus(p, params.top_p) & ((p > p[nucleus(p, params.top_p)].min()) | (p == p.max()))
        return distribution(cut(logits, kept), replace(params, top_p=1.0), counts)

    sample_wrongly(patch, wrong)


@mutant("min-p before temperature", "the cut is measured at temperature 1", "law/min-p")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        p = softmax(logits)
        return distribution(cut(logits, p >= params.min_p * p.max()), replace(params, min_p=0.0), counts)

    sample_wrongly(patch, wrong)


@mutant(
    "temperature 0 means unset", "greedy requests are sampled, at temperature 1", "law/greedy", "TensorRT-LLM PR #19390"
)
def _(patch: Patch) -> None:
    sample_wrongly(
        patch, lambda z, params, counts: distribution(z, replace(params, temperature=params.temperature or 1.0), counts)
    )


@mutant(
    "NaN rows give token 0", "an id is made up where the model gave none", "faults", "vllm#44744", "TensorRT-LLM#11125"
)
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        return Distribution.one_hot(0, logits.size) if np.isnan(logits).any() else distribution(logits, params, counts)

    sample_wrongly(patch, wrong)


@mutant(
    "verified rows skip the params",
    "only the first row of a step is processed",
    "law/bias",
    "vllm#18902",
    "sglang#21724",
)
def _(patch: Patch) -> None:
    edit(
        patch,
        TargetRows.__getitem__,
        ("sequence.request.params,", "sequence.request.params if i == 0 else plain,"),
        plain=SamplingParams(),
    )


@mutant("filters skipped on all target rows", "the draft is filtered, the target is not", "law/model", "vllm#10198")
def _(patch: Patch) -> None:
    edit(patch, TargetRows.__getitem__, ("sequence.request.params,", "plain,"), plain=SamplingParams())


# --- history ------------------------------------------------------------------------------------------


@mutant(
    "penalties without this step's drafts",
    "row i counts the committed tokens only",
    "law/penalties",
    "vllm#22987",
    "vllm#18902",
)
def _(patch: Patch) -> None:
    edit(patch, TargetRows.__getitem__, ("self._drafts[:i]", "()"))


@mutant("penalties count all of the step's drafts", "row i counts drafts that come after it", "law/penalties")
def _(patch: Patch) -> None:
    edit(patch, TargetRows.__getitem__, ("self._drafts[:i]", "self._drafts"))


@mutant(
    "only a step's last token is counted", "penalties weaken as acceptance rises", "law/penalties point", "sglang#33643"
)
def _(patch: Patch) -> None:
    edit(
        patch,
        Running.commit,
        ("if self.counts is not None", "if self.counts is not None and i == len(verdict.tokens) - 1"),
    )


@mutant(
    "a token counts once per step", "a repeat within the step is not counted", "law/penalties point", "sglang PR #22049"
)
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("if self.counts is not None", "if self.counts is not None and token not in taken"))


@mutant("repetition penalty without the prompt", "only the output counts", "law/penalties")
def _(patch: Patch) -> None:
    edit(patch, Running.__post_init__, ("TokenCounts(self.request.prompt_ids)", "TokenCounts(())"))


# --- drafters that lie about q ------------------------------------------------------------------------

PICK = "context.draws.pick(q.probs, position, context.role, ids=q.ids, node=node)"


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
        plain=SamplingParams(),
    )


@mutant("drafts drawn before temperature and filters", "the other way round", "law/model block", "vllm#10198")
def _(patch: Patch) -> None:
    raw = "distribution(logits, plain, None)"
    edit(
        patch,
        ModelDrafter._draft,
        (PICK, PICK.replace("q.probs", f"{raw}.probs").replace("ids=q.ids, ", "")),
        plain=SamplingParams(),
    )


@mutant(
    "assistant at temperature 1", "exact, but it accepts less than it could", "self-draft", "transformers PR #40976"
)
def _(patch: Patch) -> None:
    def hot(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        return distribution(logits, replace(params, temperature=1.0), counts)

    patch.setattr("paceline.draft.model.distribution", hot)


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
    edit(
        patch, ModelDrafter._draft, (PICK, PICK.replace("position", "job.num_committed").replace("node=node", "node=0"))
    )


@mutant("an unsure draft is dropped", "whether it is verified depends on the token itself", "law/model")
def _(patch: Patch) -> None:
    unsure = "if q.prob(token) < 0.5:\n        job.finish()\n        return\n    job.drafts.append(token)"
    edit(patch, ModelDrafter._draft, ("job.drafts.append(token)", unsure))


@mutant("the draft length looks at the last draft", "an even token at the end is cut off", "law/rejection")
def _(patch: Patch) -> None:
    early = (
        "if answer.tokens and answer.tokens[-1] == 0:\n        return answer.first(len(answer) - 1)\n    return answer"
    )
    edit(patch, admit_proposal, ("\n    return answer\n", f"\n    {early}\n"))


@mutant("hopeless drafts are dropped before verifying", "whether x is judged depends on p(x)", "law/block")
def _(patch: Patch) -> None:
    hopeful = "w.proposal.first(next((i for i, x in enumerate(w.proposal.tokens) if rows[i].prob(x) < 0.3), 99))"
    rows = "rows = TargetRows(w.sequence, w.proposal.tokens, w.logits)"
    edit(patch, Engine._verify, (rows, f"{rows}\n    w.proposal = {hopeful}\n    {rows}"))


@mutant("a draft that ends the request is dropped", "stop ids come out too rarely", "law/stop")
def _(patch: Patch) -> None:
    edit(patch, admit_proposal, ("answer.first(i + 1)", "answer.first(i)"))


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


# --- KV memory and the batch --------------------------------------------------------------------------


@mutant("no rollback", "rejected drafts stay in the KV memory", "memory")
def _(patch: Patch) -> None:
    edit(patch, Engine._verify_and_commit, ("self.backend.truncate(sequence.slot, sequence.cached)", "pass"))


@mutant("a rollback that does nothing", "it reports success and keeps the cells", "path", "mlx-lm#846")
def _(patch: Patch) -> None:
    edit(patch, ToyBackend.truncate, ('if self._rollback == "works":', "if False:"))


@mutant("a rollback one short", "one rejected draft stays visible", "path", "transformers#30042", "transformers#30413")
def _(patch: Patch) -> None:
    edit(patch, ToyBackend.truncate, ("self._written[slot] = length", "self._written[slot] = length + 1"))


@mutant("a rollback one too far", "the last committed token's predecessor is lost", "memory", "transformers#30042")
def _(patch: Patch) -> None:
    edit(patch, Engine._verify_and_commit, ("len(sequence.tokens) - 1", "len(sequence.tokens) - 2"))


@mutant("a rollback that keeps the newest token", "it is taken for cached before it was forwarded", "memory")
def _(patch: Patch) -> None:
    edit(patch, Engine._verify_and_commit, ("len(sequence.tokens) - 1", "len(sequence.tokens)"))


@mutant(
    "a stale draft cache", "drafts of a step that was then skipped are read as text", "draft memory", "vllm PR #38711"
)
def _(patch: Patch) -> None:
    edit(patch, ModelDrafter._rewind, (" and cached[keep] == tokens[keep]", ""))


@mutant("rows of a neighbour", "logits are handed out one request too late", "law/company", "TensorRT-LLM PR #3456")
def _(patch: Patch) -> None:
    edit(
        patch,
        Engine._score,
        ("self.backend.forward(batch), strict", "turned(self.backend.forward(batch)), strict"),
        turned=turned,
    )


def turned(rows: list[Any]) -> list[Any]:
    """Each request's rows go to the one before it, among those with equally many."""
    answers = list(rows)
    for count in {len(r) for r in rows}:
        group = [i for i, r in enumerate(rows) if len(r) == count]
        for i, j in zip(group, group[1:] + group[:1], strict=True):
            answers[i] = rows[j]
    return answers


@mutant("slots leak", "whoever finishes keeps its KV slot", "memory", "sglang PR #13826")
def _(patch: Patch) -> None:
    edit(patch, Engine._emit, ("self.backend.release(sequence.slot)", "pass"))


@mutant("draft slots leak", "the drafter is not told that a request is over", "memory", "sglang PR #18984")
def _(patch: Patch) -> None:
    edit(patch, Engine._emit, ("self.drafter.release(sequence.request.request_id)", "pass"))


@mutant(
    "draft ids are not checked",
    "-1 reaches the model, and the whole batch fails",
    "faults",
    "TensorRT-LLM#15182",
    "vllm#46899",
)
def _(patch: Patch) -> None:
    edit(patch, admit_proposal, ("any(not 0 <= t < vocab_size for t in answer.tokens)", "False"))


# --- commit -------------------------------------------------------------------------------------------


@mutant("a stop inside a block is not seen", "only a step's last token is looked at", "stops", "transformers PR #31301")
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("if self._ends_at(token)", "if i == len(verdict.tokens) - 1 and self._ends_at(token)"))


@mutant("stop ids inside a block are not seen", "stop strings are, ids only at its end", "stops", "transformers#47912")
def _(patch: Patch) -> None:
    edit(
        patch,
        Running.commit,
        (
            "if self._ends_at(token)",
            "if (token not in self.stop_ids or i == len(verdict.tokens) - 1) and self._ends_at(token)",
        ),
    )


@mutant("tokens behind the stop leak", "the block is committed whole", "stops", "sglang#31599", "sglang PR #33758")
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("break", "pass"))


@mutant("length before stop", 'a stop at the last token is reported as "length"', "stops", "sglang#31599")
def _(patch: Patch) -> None:
    edit(
        patch,
        Running._ends_at,
        (
            "if token in self.stop_ids:",
            'if len(self.tokens) >= self.limit:\n        self.finish("length")\n    elif token in self.stop_ids:',
        ),
    )


@mutant("max_tokens overshoots", "drafts are not limited, the cut comes with the step", "stops")
def _(patch: Patch) -> None:
    edit(patch, Engine._drafts_wanted, (", room)", ", 99)"))
    edit(patch, Running._ends_at, ("len(self.tokens) >= self.limit", "len(self.tokens) >= self.limit + 4"))


@mutant("max_tokens undershoots", "the request ends where a whole block no longer fits", "stops")
def _(patch: Patch) -> None:
    edit(patch, Running._ends_at, ("len(self.tokens) >= self.limit", "len(self.tokens) >= self.limit - 1"))


@mutant("no drafts near the end", "the last tokens are decoded one by one", "counters")
def _(patch: Patch) -> None:
    edit(patch, Engine._drafts_wanted, (", room)", ", room if room > 4 else 0)"))


@mutant("counters before the cut", "accepted counts what no stop let through", "counters", "sglang#39826", "vllm#47616")
def _(patch: Patch) -> None:
    edit(patch, Running.finish, ("self.draft_positions[:kept]", "self.draft_positions"))


@mutant("the bonus counts as accepted", "emitted is no longer accepted + steps", "counters", "sglang#8228")
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("accepted = i < verdict.num_accepted", "accepted = i <= verdict.num_accepted"))


@mutant("the drafter is told rejected tokens", "observe() gets the proposal, not the commit", "path")
def _(patch: Patch) -> None:
    edit(
        patch,
        Engine._verify_and_commit,
        ("(sequence.request.request_id, taken)", "(sequence.request.request_id, [*w.proposal.tokens, taken[-1]])"),
    )


@mutant("the drafter is told nothing", "its memory stays at the prompt", "path")
def _(patch: Patch) -> None:
    edit(patch, Engine._verify_and_commit, ("self.drafter.observe(sequence.request.request_id, taken)", "pass"))


# --- what must not matter -----------------------------------------------------------------------------


def wrong_guesses(seen: tuple[int, ...], budget: int) -> list[int]:
    return [(17 * len(seen) + 5 * i + seen[-1]) % 3 for i in range(budget)]


@harmless("a corrupted lookup index", "a guess is a guess", "path")
def _(patch: Patch) -> None:
    def continuation(self: _History, count: int) -> list[int]:
        return [(7 * len(self.tokens) + i) % 11 for i in range(count)]

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
    def hot(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        return distribution(logits, replace(params, temperature=1.0, top_k=0), counts)

    patch.setattr("paceline.draft.model.distribution", hot)


@harmless("penalties missing from q", "slower, and still exact", "law/penalties")
def _(patch: Patch) -> None:
    def bare(logits: FloatArray, params: SamplingParams, counts: Any) -> Distribution:
        return distribution(logits, SamplingParams(temperature=params.temperature), None)

    patch.setattr("paceline.draft.model.distribution", bare)
