"""Mutants of grammar, masks, processors, logprobs, stops and samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.admission import admit_request
from paceline.backend.toy import ToyBackend
from paceline.sampling import History, run_processors
from paceline.sampling.constrain import Grammar
from paceline.sampling.masks import Masks
from paceline.schedule import Scheduler
from paceline.sequence import Sequence as Running
from paceline.sequence import TargetRows
from paceline.text import TextStream
from paceline.types import Distribution

from . import mutants_options_checks  # noqa: F401  (registers the checks)
from .matrix import STOP
from .mutants import edit, harmless, mutant

Patch = pytest.MonkeyPatch

# --- grammar ------------------------------------------------------------------------------------------

LEGAL = "self._grammar.legal(drafts)"


@mutant("the first row's mask is every row's", "drafts do not move the grammar", "law/grammar", "vllm#36138")
def _(patch: Patch) -> None:
    edit(patch, History.distribution, (LEGAL, "self._grammar.legal(())"))


@mutant("the mask counts drafts behind the row", "every row has the last row's grammar", "law/grammar")
def _(patch: Patch) -> None:
    edit(patch, TargetRows._row, ("self._processed(i), drafts,", "self._processed(i), self._drafts,"))


@mutant("the grammar is not rolled back", "rejected drafts stay in the matcher", "options/grammar, adversary")
def _(patch: Patch) -> None:
    edit(patch, Grammar._go, ("depth < self._depth and not self._matcher.rollback(self._depth - depth)", "False"))


@mutant("the grammar is rolled back one short", "the matcher keeps one draft", "options/grammar, adversary")
def _(patch: Patch) -> None:
    edit(patch, Grammar._go, ("rollback(self._depth - depth)", "rollback(max(1, self._depth - depth - 1))"))


@mutant("states outlive their path", "masks of rejected drafts are found again", "law/grammar states")
def _(patch: Patch) -> None:
    edit(patch, Grammar._forget, ("self._states.items() if at <= length", "self._states.items()"))


@mutant(
    "a token is committed to the grammar twice", "the matcher is one ahead", "options/grammar, model", "sglang#29110"
)
def _(patch: Patch) -> None:
    one = "self._grammar.commit(token)"
    edit(patch, History.commit, (one, f"{one}, {one}"))


@mutant(
    "accepted drafts are not committed to the grammar", "it only sees the step's last token", "options/grammar, model"
)
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("self.history.commit(token)", "accepted or self.history.commit(token)"))


@mutant("rows behind the end are asked for", "a mask of what is over", "processor calls", "openvino.genai#4081",
        "sglang#15373", "vllm#9423")  # fmt: skip
def _(patch: Patch) -> None:
    edit(patch, TargetRows._row, ("if i and i == len(self._drafts) and self._sequence.is_over(drafts)", "if False"))


@mutant("the grammar starts with the next step", "one flag for the whole window", "law/grammar start", "vllm#44006",
        "vllm#36138", "vllm#46118")  # fmt: skip
def _(patch: Patch) -> None:
    edit(patch, Grammar._start, ("self._trigger.find(drafts)", "None"))


@mutant("a marker in the window constrains all of it", "rows before the marker too", "law/grammar start", "vllm#44297")
def _(patch: Patch) -> None:
    edit(
        patch,
        TargetRows._row,
        (
            "self._processed(i), drafts,",
            "self._processed(i), drafts if 2 in drafts or 2 not in self._drafts else (2,),",
        ),
    )


@mutant("the grammar starts one token late", "the row right behind the marker is free", "options/grammar, model")
def _(patch: Patch) -> None:
    edit(patch, Grammar.legal, ("if start is None:", "if start is None or (start and start == len(drafts)):"))


@mutant("end ids are always legal", "the grammar may end anywhere", "options/grammar, model")
def _(patch: Patch) -> None:
    edit(patch, Grammar._look, ("if accepting and not over:", "if not over:"))


@mutant("end ids are never legal", "a grammar that may end or go on always goes on", "law/grammar block")
def _(patch: Patch) -> None:
    edit(patch, Grammar._look, ("if accepting and not over:", "if False:"))


@mutant(
    "a complete grammar does not end the request",
    "it dies for want of a token",
    "complete grammars",
    "sglang#9187",
)
def _(patch: Patch) -> None:
    edit(patch, Running._ends_at, ("elif self.history.is_over():", "elif False:"))


@mutant("length before the grammar's end", "a text that is complete is said to be cut", "complete grammars")
def _(patch: Patch) -> None:
    edit(
        patch,
        Running._ends_at,
        ("elif self.history.is_over():", "elif self.history.is_over() and len(self.tokens) < self.limit:"),
    )


@mutant("an illegal draft is dropped", "whether it is judged hangs on the draft itself", "law/grammar")
def _(patch: Patch) -> None:
    edit(patch, History.num_useful, ("else legal + 1)", "else legal)"))


@mutant("the grammar comes after top-p", "the nucleus is of tokens that cannot come", "law/grammar top-p")
def _(patch: Patch) -> None:
    edit(patch, History.distribution, ("legal = self._grammar.legal(drafts) if self._grammar is not None else None",
                                       "legal = None"),
         ("return distribution(constrained, self._params, counts, borrow=borrow or constrained is not row)",
          "return cut_down(distribution(constrained, self._params, counts), self._grammar, drafts)"),
         cut_down=cut_down)  # fmt: skip


def cut_down(p: Distribution, grammar: Any, drafts: Any) -> Distribution:
    """p of the legal tokens, renormalised; of any where none is left."""
    legal = grammar.legal(drafts) if grammar is not None else None
    if legal is None:
        return p
    row = np.where(legal, p.dense(), 0.0)
    return Distribution.of(row / row.sum()) if row.sum() else Distribution.one_hot(int(np.argmax(legal)), p.vocab_size)


@mutant("forced tokens are taken for verified", "other constraints do not see them", "law/forced and banned")
def _(patch: Patch) -> None:
    def trusting(rows: Any, i: int) -> Distribution | None:
        sequence = rows._sequence
        forced = sequence.history.forced(8)
        if i < len(forced) and rows._drafts[: i + 1] == forced[: i + 1]:
            return Distribution.one_hot(forced[i], rows._logits.shape[-1])
        return None

    row = "self._sequence.history.distribution(self._processed(i), drafts, borrow=True)"
    edit(patch, TargetRows._row, (row, f"trusting(self, i) or {row}"), trusting=trusting)


# --- masks --------------------------------------------------------------------------------------------


@mutant("bad words begin in the prompt", "a run across its end is forbidden", "law/bad words")
def _(patch: Patch) -> None:
    edit(patch, Masks._completed, ("len(tokens) > prompt_length", "tokens"), ("max(prompt_length, ", "max(0, "))


@mutant("bad words look at committed tokens only", "drafts can begin one", "law/bad words")
def _(patch: Patch) -> None:
    edit(
        patch,
        Masks.apply,
        ("self._completed(tokens, prompt_length, drafts)", "self._completed(tokens, prompt_length, ())"),
    )


@mutant("bad words look at drafts only", "those begun in an earlier step come out", "options/masks, adversary")
def _(patch: Patch) -> None:
    edit(patch, Masks.apply, ("self._completed(tokens, prompt_length, drafts)", "self._completed((), 0, drafts)"))


@mutant("min_tokens counts committed tokens", "all of a step's rows count alike", "law/min_tokens", "vllm#26317")
def _(patch: Patch) -> None:
    edit(patch, Masks.apply, (" + len(drafts) < self.min_tokens", " < self.min_tokens"))


@mutant("min_tokens counts from the step", "it starts anew with each", "law/min_tokens", "vllm#21987", "vllm#32642")
def _(patch: Patch) -> None:
    edit(patch, Masks.apply, ("len(tokens) - prompt_length + len(drafts)", "len(drafts)"))


@mutant("min_tokens counts the prompt", "and so ends early", "law/min_tokens")
def _(patch: Patch) -> None:
    edit(patch, Masks.apply, ("len(tokens) - prompt_length + len(drafts)", "len(tokens) + len(drafts)"))


@mutant("masks on the first row only", "drafts and bonus may be banned", "options/masks, model", "vllm#18902")
def _(patch: Patch) -> None:
    edit(patch, History.distribution, ("if self._masks is not None:", "if self._masks is not None and not drafts:"))


@mutant("stop strings before min_tokens", "they end the text too early", "stops before min_tokens")
def _(patch: Patch) -> None:
    edit(patch, TextStream.push, ("if len(self._pieces) > self._min_tokens:", "if True:"))


@mutant("tokens below min_tokens", "the stop string's own are cut away", "stops before min_tokens")
def _(patch: Patch) -> None:
    below = property(lambda self: self._detokenizer.tokens_covering(self._end) if self._match else len(self._pieces))
    patch.setattr(TextStream, "num_tokens", below)


# --- processors ---------------------------------------------------------------------------------------


@mutant("processors do not see the drafts", "every row has the committed history", "options/processors, adversary",
        "sglang#21724", "sglang#26330")  # fmt: skip
def _(patch: Patch) -> None:
    edit(patch, TargetRows._processed, ("(*self._sequence.tokens, *self._drafts[:i])", "tuple(self._sequence.tokens)"))


@mutant(
    "processors are skipped on rows of drafts",
    "only the first row has them",
    "options/processors, model",
    "sglang#21724",
)
def _(patch: Patch) -> None:
    edit(patch, TargetRows._processed, ("if self._sequence.processors:", "if self._sequence.processors and not i:"))


@mutant(
    "one state for all rows",
    "a stateful processor is not cloned",
    "law/stateful block",
    "mlx-engine PR #112",
)
def _(patch: Patch) -> None:
    edit(patch, TargetRows._processed, ("cloned(self.processors_after(i - 1))", "self.processors_after(i - 1)"))


@mutant("every row's state starts at the step", "a row does not see the rows before it", "options/processors, model")
def _(patch: Patch) -> None:
    edit(patch, TargetRows._processed, ("cloned(self.processors_after(i - 1))", "cloned(self._sequence.processors)"))


@mutant("the first row's state is adopted", "the step's other tokens are forgotten", "options/processors, model")
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("rows.processors_after(i)", "rows.processors_after(0)"))


@mutant("the last row's state is adopted", "rejected drafts stay in it", "law/stateful block")
def _(patch: Patch) -> None:
    last = "rows.processors_after(max(rows._processors, default=0))"
    edit(patch, Running.commit, ("rows.processors_after(i)", last))


@mutant("one object for all requests", "the caller's own is used", "options/processors twice")
def _(patch: Patch) -> None:
    edit(patch, admit_request, ("cloned(params.logits_processors or ())", "tuple(params.logits_processors or ())"))
    edit(patch, TargetRows._processed, ("cloned(self.processors_after(i - 1))", "self.processors_after(i - 1)"))


# --- logprobs -----------------------------------------------------------------------------------------


@mutant("logprobs of the first row", "every token of a step has the same row", "options/logprobs, model")
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("rows.logprobs(i, token)", "rows.logprobs(0, token)"))


@mutant("logprobs of the row behind", "one too late", "options/logprobs, adversary", "sglang#39826")
def _(patch: Patch) -> None:
    edit(patch, Running.commit, ("rows.logprobs(i, token)", "rows.logprobs(min(i + 1, len(rows) - 1), token)"))


@mutant("accepted tokens have logprob 0", "they count as certain", "options/logprobs, model", "llama.cpp#27972")
def _(patch: Patch) -> None:
    edit(
        patch,
        Running.commit,
        ("rows.logprobs(i, token)", "[(token, 0.0, 1)] if i < verdict.num_accepted else rows.logprobs(i, token)"),
    )


@mutant(
    "raw logprobs after a change in place",
    "a processor writes into the model's row",
    "raw and processed logprobs",
    "vllm PR #30846",
)
def _(patch: Patch) -> None:
    edit(patch, run_processors, ("np.array(logits, dtype=np.float64)", "np.asarray(logits, dtype=np.float64)"))


@mutant("processed means raw", "the mode is not looked at", "raw and processed logprobs")
def _(patch: Patch) -> None:
    edit(patch, TargetRows.logprobs, ('params.logprobs_mode == "raw_logprobs"', "True"))


@mutant(
    "logprobs behind the stop string", "they are not cut with the tokens", "options/logprobs and stop", "vllm#47616"
)
def _(patch: Patch) -> None:
    edit(patch, Running.completion, ("self._output_logprobs(0, kept)", "self._output_logprobs(0, None)"))


# --- samples ------------------------------------------------------------------------------------------


@mutant("all samples have the first one's seed", "n equal texts", "options/samples, model")
def _(patch: Patch) -> None:
    edit(patch, admit_request, ("derive_seed(seed, index)", "derive_seed(seed, 0)"))


@mutant(
    "a sample has its neighbour's seed", "sample 0 is no longer the request without n", "options/samples, adversary"
)
def _(patch: Patch) -> None:
    edit(patch, admit_request, ("derive_seed(seed, index)", "derive_seed(seed, index + 1)"))


@mutant("samples share their output", "a fork keeps what the other has said since", "sample memory")
def _(patch: Patch) -> None:
    edit(patch, Scheduler._fork, ("self.backend.truncate(request.slot, request.shared)", "pass"))


@mutant("a forked page is not copied", "both samples write into it", "sample memory")
def _(patch: Patch) -> None:
    edit(patch, ToyBackend.reserve, ("self._cells[destination] = self._cells[source]", "pass"))


@mutant("samples share one history", "penalties and grammar count the others' tokens", "options/shared history")
def _(patch: Patch) -> None:
    edit(patch, admit_request, ("tokens = list(ids)", "tokens = list(ids) if index == 0 else group.members[0].tokens"))


# --- ends ---------------------------------------------------------------------------------------------


@mutant("a stop id's text is always kept", "include_stop_str_in_output is not looked at", "options/ends, adversary")
def _(patch: Patch) -> None:
    edit(patch, Running._ends_at, ("if params.include_stop_str_in_output:", "if True:"))


@mutant("ignore_eos is ignored", "the model's end ids end it", "options/ends, model")
def _(patch: Patch) -> None:
    edit(patch, admit_request, ("if not params.ignore_eos:", "if True:"))


# --- what must not matter -----------------------------------------------------------------------------


@harmless("forced tokens are nonsense", "they are drafts like any other", "options/grammar, model")
def _(patch: Patch) -> None:
    patch.setattr(History, "forced", lambda self, limit: (STOP, 0, 1)[:limit])


@harmless("forced tokens are another's", "whatever was drawn", "law/forced and banned")
def _(patch: Patch) -> None:
    patch.setattr(History, "forced", lambda self, limit: (2, 1, 0)[:limit])


@harmless(
    "no draft is cut", "rows behind what ends it are computed for nothing", "options/grammar, adversary", "vllm#27969"
)
def _(patch: Patch) -> None:
    patch.setattr(Running, "num_useful", lambda self, drafts, sampled: len(drafts))
