"""What the controller learns of times and acceptance, in steps that show it alone."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.schedule.adaptive import Ask, allocate
from paceline.schedule.controller import Candidate, Controller
from paceline.schedule.cost import CostTable
from paceline.types import Proposal

ROUND = CostTable([1, 2, 8], [0], [[1.0, 1.1, 1.7]])


def bare(request_id: int, cached: int = 10) -> Candidate:
    """A request for which nothing was drafted."""
    return Candidate(request_id, (1, cached), 8, False, Proposal.point([]))


def drawn(n: int) -> Proposal:
    return Proposal.sampled([7] * n, np.full((n, 10), 0.1))


def known_drafter(controller: Controller, each: float, *, good: bool = False) -> None:
    """What "model" costs for a draft and how good it is, from a request that goes again."""
    for step in range(40):
        one = Candidate(99, (1, 5 * step), 8, False, drawn(4), "model")
        controller.observe_drafting("model", [one], [4], 4 * each)
        controller.observe(one, 5 * step, [7] * 5 if good else [3], 4 if good else 0, 4)
    controller.forget(99)


def test_what_promises_hardly_more_is_not_drafted() -> None:
    """Estimates are noisy, plain steps are not: a gain of 1 % is none."""
    costs = CostTable([1, 2], [0], [[1.0, 1.5]])
    assert allocate([Ask((1, 0), 1.0, [0.515])], costs).drafts == [0]
    assert allocate([Ask((1, 0), 1.0, [0.54])], costs).drafts == [1]


def test_sampled_drafts_behind_the_first_rejected_one_are_not_counted() -> None:
    """Censoring: nobody drew for them."""
    controller = Controller(ROUND)
    for accepted in (1, 3, 0, 4):
        controller.observe(Candidate(0, (1, 9), 8, False, drawn(4), "model"), 10, [7] * (accepted + 1), accepted, 4)
    estimate = controller._standings[0].estimates["model"]
    assert estimate._seen == pytest.approx([4, 3, 2, 2], rel=0.2)
    assert estimate._kept == pytest.approx([3, 2, 2, 1], rel=0.25)


def test_one_interrupted_step_makes_no_rest_dear() -> None:
    controller = Controller(ROUND)
    for _ in range(20):
        controller.observe_step(0.1)
    controller.observe_step(1e6)
    assert controller._rest == pytest.approx(0.11, rel=0.05)


def test_plain_steps_show_how_fast_the_machine_is_now_but_seldom() -> None:
    """Each would let fade what drafts of a crowd cost; none would leave the times of a slower machine unknown."""
    controller = Controller(CostTable([1, 2, 8], [0], [[1.0, 1.1, 1.7]]))
    seen: list[float] = []
    observe = controller.costs.observe
    controller.costs.observe = lambda shares, seconds: (seen.append(seconds), observe(shares, seconds))[1]  # type: ignore[method-assign]
    for _ in range(40):
        controller.observe_forward([(1, 0)], [], 2.0)
    assert len(seen) == 10
    assert controller.costs.step_seconds([(1, 0)]) > 1.5
    for _ in range(10):
        controller.observe_forward([(2, 0)], [], 2.2)
    assert len(seen) == 20, "steps with drafts all count"


def test_a_dear_drafter_is_not_asked_for_what_is_forced_anyway() -> None:
    """Its own drafts come behind the forced ones; where only those pay, there is nothing to ask it for."""
    controller = Controller(ROUND)
    known_drafter(controller, 0.1, good=True)
    forced = Candidate(0, (1, 10), 8, False, Proposal.point([5, 6], sources=(("forced", 2),)), "forced")
    for step in range(30):
        controller.observe(Candidate(0, (1, 9), 8, False, drawn(1), "model"), step, [3], 0, 1)
        controller.observe(Candidate(1, (1, 9), 8, False, drawn(8), "model"), step, [7] * 9, 8, 8)
    assert controller.budgets("model", [forced], []) == [0]
    alone, other = controller.budgets("model", [forced, bare(1)], [])
    assert (alone, other > 0) == (0, True)


def test_whoever_has_drafts_in_any_case_has_them_on_both_sides() -> None:
    """Else what one request is given by number makes another's dear drafts look better than those that it has."""
    controller = Controller(CostTable([1, 64], [0], [[1.0, 1.05]]))
    known_drafter(controller, 0.04, good=True)
    settled = Candidate(0, (1, 10), 8, True, Proposal.point([]))
    found = Proposal.point([5] * 8, sources=(("lookup:12", 8),))
    assert controller.budgets("model", [settled, Candidate(1, (1, 10), 8, False, found, "lookup")], []) == [8, 0]
    assert controller.budgets("model", [settled, bare(1)], [])[1] > 0


def test_probes_go_on_after_a_long_time() -> None:
    """What they took is remembered as long as the forwards that pay for it, not for ever."""
    controller = Controller(ROUND)
    known_drafter(controller, 2.0)
    probes = []
    for step in range(40_000):
        controller.observe_forward([(1, 0)], [], 1.0)
        one = bare(0)
        (budget,) = controller.budgets("model", [one], [])
        probes.append(budget)
        if budget:
            one.proposal, one.drafter = drawn(1), "model"
            controller.observe_drafting("model", [one], [1], 2.0)
            controller.observe(one, step, [3], 0, 1)
    assert sum(probes[-10_000:]) == pytest.approx(100, rel=0.2), "2 % of the time, at 2 forwards each"


def test_probes_of_several_requests_share_one_budget() -> None:
    controller = Controller(ROUND)
    known_drafter(controller, 2.0)
    crowd = [bare(i) for i in range(8)]
    for _ in range(160):
        controller.observe_forward([(1, 0)] * 8, [], 1.0)
        asked = controller.budgets("model", crowd, [])
        if any(asked):
            break
    assert sum(asked) == 1, "2 % of some hundred forwards pays for one probe of two"


def test_reading_costs_what_drafting_leaves_over() -> None:
    """A model that reads 100 tokens and then drafts has the time of both; its price of reading is of the first."""
    controller = Controller(ROUND)
    known_drafter(controller, 1.0)
    one = Candidate(0, (1, 100), 8, False, drawn(4), "model")
    controller.observe_drafting("model", [one], [4], 4.0 + 50.0)
    assert controller._per_read["model"] == pytest.approx(0.5)


def test_what_must_be_read_first_is_paid_for_by_the_steps_to_come() -> None:
    """100 tokens at half a forward each are worth reading for good drafts, 10,000 are not."""
    controller = Controller(ROUND)
    known_drafter(controller, 0.1, good=True)
    reader = Candidate(98, (1, 100), 8, False, drawn(4), "model")
    controller.observe_drafting("model", [reader], [4], 50.0)
    assert controller.budgets("model", [bare(0, 100)], [])[0] > 0
    assert controller.budgets("model", [bare(1, 10_000)], []) == [0]


def test_tokens_behind_a_wrong_one_are_not_compared() -> None:
    """The text went on elsewhere: that it meets the draft again says nothing."""
    controller = Controller(ROUND)
    guess = Candidate(0, (1, 9), 8, False, Proposal.point([1, 2, 3, 4]), "lookup")
    controller.observe(guess, 10, [1, 9, 3, 4], 1, 4)
    estimate = controller._standings[0].estimates["lookup"]
    assert (estimate._kept, estimate._seen) == ([1.0, 0.0], [1.0, 1.0])


def test_few_proposals_of_a_request_are_kept_for_comparison() -> None:
    controller = Controller(ROUND)
    for step in range(100):
        guess = Candidate(0, (1, 9), 8, False, Proposal.point([7] * 300), "lookup")
        controller.observe(guess, 10 + step, [7], 0, 0)
    assert len(controller._standings[0].watched) <= 4


def test_one_slow_call_for_nothing_makes_no_drafter_dear() -> None:
    """Lookup that found nothing while the machine did something else is as cheap as before, and no worse."""
    controller = Controller(CostTable([1, 2, 8], [0], [[10.0, 10.5, 12.0]]))
    judged = []
    for step, seconds in enumerate([0.01, 0.01, 0.01, 500.0, 0.01, 0.01]):
        one = bare(0, 5 + step)
        budgets = controller.budgets("lookup", [one], [])
        controller.observe_drafting("lookup", [one], budgets, seconds)
        controller.observe(one, 6 + step, [1], 0, 0)
        estimates = controller._standings[0].estimates
        judged.append(sum(estimates["lookup"]._seen) if "lookup" in estimates else 0)
    assert controller._asking("lookup", 1) == pytest.approx(0.01)
    assert judged[2:] == [judged[2]] * 4


def test_a_drafter_that_has_nothing_twice_is_as_good_as_wrong() -> None:
    controller = Controller(ROUND)
    for step in range(4):
        one = bare(0, 5 + step)
        controller.observe_drafting("dear", [one], [4], 3.0)
        controller.observe(one, 6 + step, [1], 0, 0)
    (chance,) = controller._standings[0].estimates["dear"].expected(1)
    assert chance < 0.5
    assert controller._asking("dear", 1) == pytest.approx(3.0)
