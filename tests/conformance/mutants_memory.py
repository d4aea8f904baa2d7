"""Mutants of shared memory: pages, the prefix cache, admission and preemption; and the check that must see them."""

from __future__ import annotations

import pytest

from paceline.cache.pages import PageBook
from paceline.cache.prefix import PrefixCache
from paceline.engine import Engine
from paceline.schedule import Scheduler

from .mutants import edit, mutant
from .mutants_checks import check
from .test_company import Totals, run_schedule

Patch = pytest.MonkeyPatch


@check("company")
def random_schedules_change_no_token() -> None:
    totals = Totals()
    for seed in range(30):
        run_schedule("toy", seed, totals)
    assert totals.preemptions > 3
    assert totals.shared > 100


@mutant("a prefix hit is not believed", "the engine forwards again what the slot already holds", "company")
def _(patch: Patch) -> None:
    edit(patch, Scheduler._enter, ("request.cached = self.backend.length(request.slot)", "request.cached = 0"))


@mutant("a prefix hit covers the whole prompt", "nobody computes the row behind its last token", "company")
def _(patch: Patch) -> None:
    edit(patch, PageBook.open, ("(len(tokens) - 1) // self.page_size", "len(tokens) // self.page_size"))


@mutant(
    "pages are shared by their own tokens alone",
    "the same words behind another beginning have other keys and values",
    "company",
    "sglang PR #10846",
)
def _(patch: Patch) -> None:
    edit(
        patch,
        PrefixCache.find,
        (
            "return self._page_of.get((before, tokens))",
            "return next((p for (_, known), p in self._page_of.items() if known == tokens), None)",
        ),
    )


@mutant("drafts have no memory set aside", "a forward finds none left", "company", "vllm#42971")
def _(patch: Patch) -> None:
    edit(patch, Scheduler._room_for_drafts, ("len(request.tokens) + n", "len(request.tokens)"))


@mutant("a drafter keeps what was preempted", "it is told of the same tokens twice", "company", "sglang PR #18984")
def _(patch: Patch) -> None:
    edit(patch, Engine._introduce, ("self._release_drafter(sequence)", "pass"))


@mutant("a preempted request waits behind all others", "order of arrival is lost, and with it the bound", "company")
def _(patch: Patch) -> None:
    edit(patch, Scheduler._preempt, ("self.waiting.appendleft(request)", "self.waiting.append(request)"))
