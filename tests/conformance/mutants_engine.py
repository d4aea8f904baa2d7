"""Mutants of KV memory, of the batch and of the commit."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.admission import admit_proposal
from paceline.backend.toy import ToyBackend
from paceline.draft import ModelDrafter
from paceline.engine import Engine
from paceline.schedule import Scheduler
from paceline.sequence import Sequence as Running

from .mutants import edit, mutant

Patch = pytest.MonkeyPatch

# --- KV memory and the batch --------------------------------------------------------------------------


@mutant("no rollback", "rejected drafts stay in the KV memory", "memory")
def _(patch: Patch) -> None:
    edit(patch, Engine._verify_and_commit, ("self.backend.truncate(sequence.slot, sequence.cached)", "pass"))


@mutant("a rollback that does nothing", "it reports success and keeps the cells", "path", "mlx-lm#846")
def _(patch: Patch) -> None:
    edit(patch, ToyBackend._forget, ('if self._rollback == "silent":', "if True:"))


@mutant("a rollback one short", "one rejected draft stays visible", "path", "transformers#30042", "transformers#30413")
def _(patch: Patch) -> None:
    edit(
        patch,
        ToyBackend._forget,
        ("self._book.keep(slot, length, nodes)", "self._book.truncate(slot, min(length + 1, claimed))"),
    )


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
        ("rows = self.backend.forward(batch)", "rows = turned(self.backend.forward(batch))"),
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
    edit(patch, Scheduler._release, ("self.backend.release(slot)", "pass"))


@mutant("draft slots leak", "the drafter is not told that a request is over", "memory", "sglang PR #18984")
def _(patch: Patch) -> None:
    edit(patch, Engine._release_drafter, ("self.drafter.release(sequence.request.request_id)", "pass"))


@mutant(
    "draft ids are not checked",
    "-1 reaches the model, and the whole batch fails",
    "faults",
    "TensorRT-LLM#15182",
    "vllm#46899",
)
def _(patch: Patch) -> None:
    edit(patch, admit_proposal, ("any(type(t) is not int or not 0 <= t < vocab_size for t in answer.tokens)", "False"))


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
            "if (token not in self.end_ids or i == len(verdict.tokens) - 1) and self._ends_at(token)",
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
            "if token in self.end_ids:",
            'if len(self.tokens) >= self.limit:\n        self.finish("length")\n    elif token in self.end_ids:',
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
