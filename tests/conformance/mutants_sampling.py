"""Mutants of the distribution: transforms, their order, and the history they look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.params import SamplingParams
from paceline.sampling import History, distribution
from paceline.sequence import Sequence as Running
from paceline.sequence import TargetRows
from paceline.types import Distribution, FloatArray

from .mutants import edit, mutant

Patch = pytest.MonkeyPatch

# --- sampling -----------------------------------------------------------------------------------------

P = "self._sequence.history.distribution(self._processed(i), drafts, borrow=True)"
COMMIT = "self.history.commit(token)"
Wrong = Callable[[FloatArray, SamplingParams, Any], Distribution]


def sample_wrongly(patch: Patch, wrong: Wrong) -> None:
    """Put `wrong` where target and drafter make their distributions."""
    patch.setattr("paceline.sampling.history.distribution", wrong)


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
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any, **_: Any) -> Distribution:
        if params.temperature > 0:
            return distribution(logits, params, counts)
        return Distribution.one_hot(logits.size - 1 - int(np.argmax(logits[::-1])), logits.size)

    sample_wrongly(patch, wrong)


@mutant("top-k keeps all ties", "more than k tokens survive", "law/ties")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any, **_: Any) -> Distribution:
        if 0 < params.top_k < logits.size:
            logits = cut(logits, logits >= np.sort(logits)[-params.top_k])
        return distribution(logits, replace(params, top_k=0), counts)

    sample_wrongly(patch, wrong)


@mutant("top-p before top-k", "the nucleus is measured on the row of another stage", "law/filters")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any, **_: Any) -> Distribution:
        kept = nucleus(softmax(logits / (params.temperature or 1.0)), params.top_p)
        return distribution(cut(logits, kept), replace(params, top_p=1.0), counts)

    sample_wrongly(patch, wrong)


@mutant("top-p without the token that reaches it", "the nucleus ends one token early", "law/top-p", "vllm#10198")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any, **_: Any) -> Distribution:
        p = distribution(logits, replace(params, top_p=1.0, min_p=0.0), counts).dense()
        kept = nucleus(p, params.top_p) & ((p > p[nucleus(p, params.top_p)].min()) | (p == p.max()))
        return distribution(cut(logits, kept), replace(params, top_p=1.0), counts)

    sample_wrongly(patch, wrong)


@mutant("min-p before temperature", "the cut is measured at temperature 1", "law/min-p")
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any, **_: Any) -> Distribution:
        p = softmax(logits)
        return distribution(cut(logits, p >= params.min_p * p.max()), replace(params, min_p=0.0), counts)

    sample_wrongly(patch, wrong)


@mutant(
    "temperature 0 means unset", "greedy requests are sampled, at temperature 1", "law/greedy", "TensorRT-LLM PR #19390"
)
def _(patch: Patch) -> None:
    sample_wrongly(
        patch,
        lambda z, params, counts, **_: distribution(z, replace(params, temperature=params.temperature or 1.0), counts),
    )


@mutant(
    "NaN rows give token 0", "an id is made up where the model gave none", "faults", "vllm#44744", "TensorRT-LLM#11125"
)
def _(patch: Patch) -> None:
    def wrong(logits: FloatArray, params: SamplingParams, counts: Any, **_: Any) -> Distribution:
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
        TargetRows._row,
        (P, f"{P} if i == 0 else distribution(self._logits[i], plain, None)"),
        distribution=distribution,
        plain=SamplingParams(),
    )


@mutant("filters skipped on all target rows", "the draft is filtered, the target is not", "law/model", "vllm#10198")
def _(patch: Patch) -> None:
    bare = "distribution(self._logits[i], plain, None)"
    edit(patch, TargetRows._row, (P, bare), distribution=distribution, plain=SamplingParams())


# --- history ------------------------------------------------------------------------------------------


@mutant(
    "penalties without this step's drafts",
    "row i counts the committed tokens only",
    "law/penalties",
    "vllm#22987",
    "vllm#18902",
)
def _(patch: Patch) -> None:
    edit(patch, History.distribution, ("self._counts.with_drafts(drafts)", "self._counts.with_drafts(())"))


@mutant("penalties count all of the step's drafts", "row i counts drafts that come after it", "law/penalties")
def _(patch: Patch) -> None:
    edit(patch, TargetRows._row, (P, P.replace(", drafts,", ", self._drafts,")))


@mutant(
    "only a step's last token is counted", "penalties weaken as acceptance rises", "law/penalties point", "sglang#33643"
)
def _(patch: Patch) -> None:
    edit(patch, Running.commit, (COMMIT, f"i < len(verdict.tokens) - 1 or {COMMIT}"))


@mutant(
    "a token counts once per step", "a repeat within the step is not counted", "law/penalties point", "sglang PR #22049"
)
def _(patch: Patch) -> None:
    edit(patch, Running.commit, (COMMIT, f"token in taken or {COMMIT}"))


@mutant("repetition penalty without the prompt", "only the output counts", "law/penalties")
def _(patch: Patch) -> None:
    edit(patch, History.__init__, ("TokenCounts(tokens[:prompt_length])", "TokenCounts(())"))
