"""Acceptance estimates and the allocation of drafts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedule.adaptive import PRIOR_MEAN, Acceptance, Ask, allocate
from paceline.schedule.controller import MAX_DRAFTS, Candidate, Controller, FixedLengths
from paceline.schedule.cost import CostTable
from paceline.types import Proposal

FLAT = CostTable([1, 64], [0], [[10.0, 11.0]])  # further tokens almost free
STEEP = CostTable([1, 2], [0], [[10.0, 20.0]])  # each as dear as a step


def feed(acceptance: Acceptance, accepted: int, judged: int) -> None:
    for i in range(min(accepted + 1, judged)):
        acceptance.observe(i, i < accepted)


def test_estimates_approach_what_is_seen_at_each_position() -> None:
    """sglang#8228: one average over all positions hides that later drafts are worth less."""
    rng = np.random.default_rng(1)
    truth = [0.9, 0.5, 0.2]
    acceptance = Acceptance()
    for _ in range(4000):
        accepted = next((i for i, p in enumerate(truth) if rng.random() >= p), 3)
        feed(acceptance, accepted, 3)
    assert acceptance.expected(3) == pytest.approx(truth, abs=0.1)


def test_a_draft_behind_a_rejected_one_says_nothing() -> None:
    acceptance = Acceptance()
    before = acceptance.expected(1)[0]
    feed(acceptance, 0, 5)
    first = acceptance.expected(1)[0]
    assert first < before
    for _ in range(50):
        feed(acceptance, 0, 5)
    assert acceptance._seen[1:] == []


def test_full_acceptance_is_at_least() -> None:
    """A proposal that was kept whole tells nothing of the position behind it, but does not lower it either."""
    acceptance = Acceptance()
    for _ in range(30):
        feed(acceptance, 2, 2)
    assert acceptance.expected(1)[0] > 0.9
    assert acceptance.expected(3)[2] > 0.9, "what is not known yet follows what is known before it"


def test_estimates_forget() -> None:
    acceptance = Acceptance(memory=0.9)
    for _ in range(200):
        feed(acceptance, 1, 1)
    for _ in range(30):
        feed(acceptance, 0, 1)
    assert acceptance.expected(1)[0] < 0.15


def test_a_new_request_believes_what_others_saw_and_then_its_own() -> None:
    pool = Acceptance()
    for _ in range(100):
        feed(pool, 0, 1)
    mine = Acceptance(0.9, pool)
    assert mine.expected(1)[0] < 0.1
    assert Acceptance().expected(8) == [PRIOR_MEAN] * 8
    for _ in range(20):
        feed(mine, 1, 1)
    assert mine.expected(1)[0] > 0.6


def test_what_a_parent_saw_further_out_counts() -> None:
    pool = Acceptance()
    for _ in range(100):
        feed(pool, 3, 4)
    mine = Acceptance(0.9, pool)
    mine.observe(0, kept=False)
    first, *others = mine.expected(40)
    assert first < pool.expected(1)[0]
    assert others[:3] == pool.expected(4)[1:]
    assert others[2] < 0.2 < 0.9 < others[1]
    assert others[3:] == [others[2]] * 36, "and behind all that anybody saw, what the last of it was"
    assert mine.expected(0) == mine.expected(-1) == []


def test_sources_of_no_drafts_leave_nothing_behind() -> None:
    controller = Controller(STEEP)
    empty = tuple((f"source {i}", 0) for i in range(300))
    guess = Proposal((1, 2), (-1, 0), "point", sources=(*empty, ("lookup:3", 2)))
    controller.lengths([candidate(0, guess)], [])
    assert list(controller._pool) == [("lookup:3", False)]


def chances(*single: float) -> np.ndarray:
    return np.cumprod(single)


def test_free_tokens_are_taken_and_dear_ones_are_not() -> None:
    ask = Ask((1, 0), 1.0, chances(0.5, 0.5, 0.5, 0.5))
    assert allocate([ask], FLAT).drafts == [4]
    assert allocate([ask], STEEP).drafts == [0]
    assert allocate([Ask((1, 0))], FLAT).drafts == [0]
    assert allocate([], FLAT).drafts == []


def test_the_likelier_request_gets_them() -> None:
    costs = CostTable([1, 2, 3, 4, 5], [0], [[10, 10.5, 11, 30, 50]])  # a cliff behind three tokens
    plan = allocate([Ask((1, 0), 1.0, chances(0.2, 0.2)), Ask((1, 0), 1.0, chances(0.9, 0.9))], costs)
    assert plan.drafts == [0, 1]


def test_drafting_costs_too() -> None:
    ask = Ask((1, 0), 1.0, chances(0.9, 0.9, 0.9), np.array([9.0, 18.0, 27.0]))
    assert allocate([ask], FLAT).drafts == [0]
    ask.draft_seconds = np.array([0.5, 1.0, 1.5])
    assert allocate([ask], FLAT).drafts == [3]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.1, 5.0), min_size=13, max_size=13),
    st.floats(0, 5),
)
def test_nothing_better_exists(single: list[list[float]], increments: list[float], overhead: float) -> None:
    """Against all allocations, on curves with cliffs and with dents."""
    costs = CostTable(range(1, 14), [0], [np.maximum(np.cumsum(increments), 0.1)])
    asks = [Ask((1, 0), 1.0, np.cumprod(one)) for one in single]
    plan = allocate(asks, costs, overhead=overhead, margin=1.0)
    best = 0.0
    for drafts in itertools.product(*(range(len(one) + 1) for one in single)):
        tokens = len(asks) + sum(ask.chances[:n].sum() for ask, n in zip(asks, drafts, strict=True))
        seconds = costs.step_seconds([(1 + n, 0) for n in drafts]) + overhead
        best = max(best, tokens / seconds)
    assert plan.tokens / plan.seconds == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=3), min_size=1, max_size=3),
    st.floats(0.1, 20),
    st.floats(0.05, 5),
    st.integers(1, 2000),
)
def test_a_prompt_in_the_same_step_makes_no_draft_cheaper(
    single: list[list[float]], base: float, slope: float, prompt: int
) -> None:
    """Where a token costs the same at all widths, drafts are the same beside a prompt as without it.

    Sixteen requests at once lost 5 % (of answers to long prompts 14 %): a step in which somebody's prompt is read takes
    long in any case, and almost any draft seemed to make it more worth while.
    """
    costs = CostTable([1, 64], [0], [[base + slope, base + 64 * slope]])
    asks = [Ask((1, 0), 1.0, np.cumprod(one)) for one in single]
    alone, beside = allocate(asks, costs, margin=1.0), allocate(asks, costs, [(prompt, 0)], margin=1.0)
    assert beside.rate == pytest.approx(alone.rate, rel=1e-6)


def test_what_is_free_beside_a_prompt_is_taken() -> None:
    """And the other way round: what a draft adds is what it adds to the forward as it is, not as it would be alone."""
    costs = CostTable([1, 8, 64, 65, 80], [0], [[1.0, 8.0, 64.0, 64.0, 64.0]])
    ask = Ask((1, 0), 1.0, chances(0.3, 0.3))
    assert allocate([ask], costs).drafts == [0]
    assert allocate([ask], costs, [(64, 0)]).drafts == [2]


def test_a_crowd_whose_drafts_are_dearer_than_measured_does_not_lose() -> None:
    """The real engine's figures (docs/decisions/0012): it believed 2.4 ms a draft where it was 4.1, and would have
    verified up to 80 of them in every step at a loss of 6 %."""
    costs = CostTable([1, 16, 64], [0], [[10, 71, 71 + 48 * 2.4]])
    controller = Controller(costs)
    rng = np.random.default_rng(0)
    chosen: list[tuple[int, float]] = []  # drafts, and speed over plain
    for _ in range(300):
        # A lookup has now more, now less. Where all steps had as many, nothing could be learned of what they cost.
        asks = [Ask((1, 0), 1.0, chances(*[0.95] * int(rng.integers(4, 9)))) for _ in range(16)]
        drafts = allocate(asks, costs).drafts
        tokens = 16 + sum(sum(ask.chances[:n]) for ask, n in zip(asks, drafts, strict=True))
        seconds = 71.0 + 4.1 * sum(drafts)
        controller.observe_forward([(1 + n, 0) for n in drafts], [], seconds)
        chosen.append((sum(drafts), tokens / seconds / (16 / 71.0)))
    assert chosen[0][0] > 48
    assert chosen[0][1] < 0.96
    assert np.mean([speed for _, speed in chosen[-100:]]) > 0.995


def test_prompts_and_forwards_of_nothing_teach_no_prices() -> None:
    """A prompt's last tokens beside others that decode were taken for drafts, and made those look cheap."""
    costs = CostTable([1, 2, 5, 8, 64], [0], [[10, 11, 14, 17, 70]])
    controller, before = Controller(costs), costs.curve([(1, 0)] * 15, 20)
    for _ in range(100):
        controller.observe_forward([(1, 0)] * 15, [(40, 0)], 25.0)
        controller.observe_forward([], [(5, 0)], 5.0)
        controller.observe_forward([], [], 1e-9)
    assert costs.curve([(1, 0)] * 15, 20) == before
    assert costs.seconds(5, 0) == 14


def roofline(tokens: int) -> float:
    return max(tokens, 280) / 280 * 0.01


def test_under_load_drafting_goes_to_zero_and_comes_back() -> None:
    """vllm#27379, vllm#19254, sglang#12411: speculation that makes a loaded server slower. A knee at 280 tokens."""
    widths = list(range(1, 600))
    costs = CostTable(widths, [0], [[roofline(w) for w in widths]])
    ask = Ask((1, 0), 1.0, chances(*[0.7] * 8))
    drafts = {n: sum(allocate([ask] * n, costs).drafts) / n for n in (1, 8, 32, 64, 128, 200, 270, 300, 400)}
    assert drafts[1] == drafts[8] == 8
    assert drafts[64] > drafts[128] > drafts[200] > drafts[270] >= drafts[300] == drafts[400] == 0
    assert sum(allocate([ask] * 8, costs).drafts) == 64


def candidate(request_id: int, proposal: Proposal | None = None, *, most: int = 8, fixed: bool = False) -> Candidate:
    return Candidate(request_id, (1, 0), most, fixed, proposal, "lookup")


def test_good_guesses_are_verified_and_bad_ones_are_not() -> None:
    """Without ever trying the bad ones out: the text shows what they would have been."""
    costs = CostTable([1, 2, 4, 8, 16], [0], [[10, 14, 18, 24, 34]])
    controller = Controller(costs)
    lengths: dict[int, list[int]] = {0: [], 1: []}
    for step in range(60):
        for request_id, good in ((0, True), (1, False)):
            guess = Proposal.point([7] * 8)
            one = candidate(request_id, guess)
            (n,) = controller.lengths([one], [])
            lengths[request_id].append(n)
            taken = [7] * (n + 1) if good else [3]
            controller.observe(one, 100 * step, taken, n if good else 0, n)
    assert lengths[0][-1] == 8
    assert sum(lengths[1][20:]) == 0
    # Whoever was bad and becomes good is noticed without a single draft verified in between.
    for step in range(60, 90):
        one = candidate(1, Proposal.point([7] * 8))
        (n,) = controller.lengths([one], [])
        controller.observe(one, 100 * step, [7] * (n + 1), n, n)
    assert n > 2


def test_proposals_are_judged_over_several_steps() -> None:
    controller = Controller(STEEP)
    one = candidate(0, Proposal.point([1, 2, 3, 4]))
    controller.observe(one, 10, [1], 0, 0)
    nothing = candidate(0, Proposal.point([]))
    controller.observe(nothing, 11, [2, 3], 0, 0)
    controller.observe(nothing, 13, [9], 0, 0)
    estimate = controller._standings[0].estimates["lookup"]
    assert estimate._seen == pytest.approx([1, 1, 1, 1])
    assert estimate._kept == pytest.approx([1, 1, 1, 0])
    assert controller._standings[0].watched == []


def test_sampled_drafts_are_settled_before_they_are_drawn() -> None:
    """Non-anticipation: a sampled proposal is never cut, whatever the estimates say."""
    controller = Controller(STEEP)
    q = np.full((5, 10), 0.1)
    for step in range(30):
        one = candidate(0, most=5)
        (budget,) = controller.budgets("lookup", [one], [])
        one.proposal = Proposal.sampled([1] * budget, q[:budget]) if budget else Proposal.point([])
        controller.observe_drafting("lookup", [one], [budget], 2.0 * budget)
        assert controller.lengths([one], []) == [budget]
        controller.observe(one, step, [2], 0, budget)
    assert budget == 0


def test_a_drafter_that_costs_time_is_probed_now_and_then() -> None:
    controller = Controller(CostTable([1, 2, 8], [0], [[10, 11, 12]]))
    asked = []
    good = False
    for step in range(400):
        good = step > 200
        one = candidate(0, most=4)
        (budget,) = controller.budgets("lookup", [one], [])
        asked.append(budget)
        controller.observe_forward([(1 + budget, 0)], [], 10.0)
        one.proposal = Proposal.sampled([1] * budget, np.full((budget, 10), 0.1)) if budget else Proposal.point([])
        controller.observe_drafting("lookup", [one], [budget], 2.0 * budget)
        controller.observe(one, step, [2], budget if good else 0, budget)
    quiet = asked[50:200]
    assert 0 < sum(quiet) <= 6
    assert asked[-1] == 4, "it was not noticed that drafts became good"


def test_whoever_says_how_many_gets_them() -> None:
    controller = Controller(STEEP)
    fixed, free = candidate(0, Proposal.point([1, 2, 3]), fixed=True), candidate(1, Proposal.point([1, 2, 3]))
    assert controller.lengths([fixed, free], []) == [3, 0]
    unknown = candidate(0, fixed=True), candidate(1)
    assert controller.budgets("lookup", unknown, []) == [8, 1], "the first call says nothing of what drafts cost"
    controller.observe_drafting("lookup", [free], [3], 30.0)
    assert controller.budgets("lookup", unknown, []) == [8, 4], "what drafts cost is not known yet"
    controller.observe_drafting("lookup", [free], [3], 30.0)  # a drafter that costs time
    assert controller.budgets("lookup", [candidate(0, most=3, fixed=True), candidate(1)], []) == [3, 0]
    assert MAX_DRAFTS >= 8


def test_sources_are_kept_apart() -> None:
    controller = Controller(STEEP)
    guess = Proposal((1, 2, 3, 4), (-1, 0, 1, 2), "point", sources=(("forced", 2), ("lookup:3", 2)))
    controller.observe(candidate(0, guess), 10, [1, 2, 9], 0, 0)
    estimates = controller._standings[0].estimates
    assert estimates["forced"]._kept == [1, 1]
    assert estimates["lookup:3"]._kept == [0]
    controller.forget(0)
    assert controller._standings == {}


def test_the_first_step_of_all_is_soon_forgotten() -> None:
    """It compiles and warms up; a second of that must not make lookup look dear."""
    controller = Controller(FLAT)
    one = candidate(0, Proposal.point([1, 2, 3, 4]))
    controller.observe_drafting("lookup", [one], [4], 9000.0)
    controller.observe_step(9000.0)
    for _ in range(25):
        controller.observe_drafting("lookup", [one], [4], 0.04)
        controller.observe_step(0.5)
    assert controller._per_depth["lookup"] < 2.0
    assert controller._rest < 2.0


def test_a_dear_drafter_is_judged_by_what_its_drafts_were() -> None:
    """Proposals name their sources; before they are drawn, the source of the last ones is what to expect."""
    controller = Controller(STEEP)
    for step in range(30):
        one = candidate(0)
        (budget,) = controller.budgets("lookup", [one], [])
        one.proposal = Proposal.point([1] * budget, sources=(("forced", 0), ("lookup:2", budget)))
        controller.observe_drafting("lookup", [one], [budget], 5.0 * budget)
        controller.observe(one, step, [2], 0, budget)
    assert budget == 0


@pytest.mark.parametrize("sources", [(), (("a", 1),), (("a", 0),), (("a", 9), ("b", 9))], ids=str)
def test_what_a_drafter_says_of_its_sources_cuts_nothing_that_was_sampled(sources: tuple[tuple[str, int], ...]) -> None:
    """Proposal.sources has no part in any rule: too few, none or too many of them must not shorten a sampled chain."""
    controller = Controller(STEEP)
    one = candidate(0, Proposal.sampled([1, 2, 3], np.full((3, 10), 0.1), sources=sources))
    assert controller.lengths([one], []) == [3]
    controller.observe(one, 10, [1, 2, 5], 2, 3)
    fixed = candidate(1, Proposal.point([1, 2, 3], sources=sources), fixed=True)
    assert controller.lengths([fixed], []) == [3]
    controller.observe(fixed, 10, [1, 2, 5], 2, 3)


def test_no_more_sources_are_named_than_there_are_drafts() -> None:
    """ "0 of 1 from lookup:4+lookup:5+..." stood there once a stop string had cut the rest."""
    said: list[str] = []
    controller = Controller(STEEP)
    controller.listener = said.append
    whole = Proposal.point([1] * 6, sources=(("a", 0), ("b", 1), ("c", 2), ("d", 1), ("e", 2)))
    for drafts in (6, 3, 1):
        controller.lengths([candidate(0, whole.first(drafts))], [])
    assert ["from b+c+..." in said[0], "from b+c," in said[1], "from b," in said[2]] == [True] * 3, said


def test_drafts_that_were_cut_before_are_not_paid_for() -> None:
    """A grammar or a stop string shortens a proposal; its sources still tell the drafter's numbers."""
    whole = Proposal.point(range(1, 17), sources=(("good", 16),))
    controller = Controller(CostTable([1, 2, 3, 4, 5, 20], [0], [[10.0, 10.1, 10.2, 10.3, 99.0, 999.0]]))
    for step in range(40):
        controller.observe(candidate(0, whole), 100 * step, list(range(1, 17)), 16, 16)
    # Two more tokens are cheap. One draft is left of the good ones: the other request gets the second token.
    assert controller.lengths([candidate(0, whole.first(1)), candidate(1, Proposal.point([1]))], []) == [1, 1]


DEAR_TABLE = CostTable([1, 2, 4, 8, 17], [0], [[10.0, 10.5, 11.0, 12.0, 14.0]])


def sampled(n: int) -> Proposal:
    return Proposal.sampled([1] * n, np.full((n, 10), 0.1))


def learned(controller: Controller, *, lookup: bool, model: bool) -> None:
    """Lookup costs nothing and the model one a draft; each is right or wrong throughout."""
    for step in range(40):
        guess = candidate(9, Proposal.point([1, 2, 3, 4]))
        controller.observe_drafting("lookup", [guess], [4], 1e-3)
        controller.observe(guess, 100 * step, [1, 2, 3, 4] if lookup else [7], 0, 0)
        drawn = Candidate(9, (1, 0), 8, False, sampled(4), "model")
        controller.observe_drafting("model", [drawn], [4], 4.0)
        controller.observe(drawn, 100 * step + 50, [7], 4 if model else 0, 4)
    controller.forget(9)


@pytest.mark.parametrize(
    "lookup, model, found, asked", [
        (True, True, True, False),  # free drafts as good as dear ones
        (False, True, True, True),
        (False, True, False, True),
        (True, False, True, False),
        (False, False, False, False),
    ],
)  # fmt: skip
def test_the_better_of_two_drafters_is_asked(lookup: bool, model: bool, found: bool, asked: bool) -> None:
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=lookup, model=model)
    one = candidate(0)
    assert controller.budgets("lookup", [one], []) == [8], "who costs nothing is always asked"
    one.proposal = Proposal.point([5] * 8 if found else [])
    (budget,) = controller.budgets("model", [one], [])
    assert (budget > 0) == asked


def test_each_request_has_the_better_drafter_for_itself() -> None:
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=True, model=True)
    one, other = candidate(0, Proposal.point([5] * 8)), candidate(1, Proposal.point([]))
    assert controller.budgets("model", [one, other], []) == [0, 0], "both would wait for what one of them gains"
    controller._per_depth["model"] = 0.1
    budgets = controller.budgets("model", [one, other], [])
    assert budgets[0] == 0
    assert budgets[1] > 0
    other.proposal, other.drafter = sampled(budgets[1]), "model"
    assert controller.lengths([one, other], []) == [8, budgets[1]]


def test_without_a_controller_the_first_that_has_any_drafts() -> None:
    fixed = FixedLengths()
    forced = Proposal.point([4], sources=(("forced", 1),))
    three = [candidate(0, Proposal.point([5])), candidate(1, Proposal.point([])), candidate(2, forced)]
    assert fixed.budgets("model", three, []) == [0, 8, 8]


def test_who_says_how_many_gets_them_from_one_drafter() -> None:
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=True, model=False)
    three = [candidate(0, Proposal.point([5] * 8), fixed=True), candidate(1, Proposal.point([]), fixed=True)]
    assert controller.budgets("model", three, []) == [0, 8]


def test_what_reading_costs_is_not_taken_for_drafting() -> None:
    """A draft model reads the whole prompt before its first draft, and whatever passed while it was not asked."""
    controller = Controller(DEAR_TABLE)
    for cached, seconds in ((500, 100.0), (505, 4.0), (510, 4.0), (600, 50.0)):
        one = Candidate(0, (1, cached), 8, False, sampled(4), "model")
        controller.observe_drafting("model", [one], [4], seconds)
    assert controller._per_depth["model"] == 1.0


def test_a_probe_does_not_take_the_place_of_good_drafts() -> None:
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=True, model=False)
    one = candidate(0, Proposal.point([5] * 8))
    for _ in range(200):
        controller.observe_forward([(1, 0)], [], 10.0)
        assert controller.budgets("model", [one], []) == [0]
    bare = candidate(1, Proposal.point([]))
    asked = []
    for _ in range(320):
        controller.observe_forward([(1, 0)], [], 10.0)
        asked += controller.budgets("model", [bare], [])
    assert 8 < sum(asked) <= 10, "and not more often than every 32 steps"


def test_probes_take_a_small_share_of_the_time() -> None:
    """transformers#36337: a draft model reads what it was not asked about before it can draft, and that is dear too."""
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=False, model=False)
    spent = 0.0
    for step in range(2000):
        controller.observe_forward([(1, 0)], [], 10.0)
        one = Candidate(1, (1, 50 + step), 8, False, Proposal.point([]))
        (budget,) = controller.budgets("model", [one], [])
        if budget:
            assert budget == 1
            one.proposal, one.drafter = sampled(1), "model"
            seconds = 1.0 + 2.0 * controller._unread("model", one)
            controller.observe_drafting("model", [one], [1], seconds)
            controller.observe(one, 51 + step, [7], 0, 1)
            spent += seconds
    assert 0.005 < spent / (2000 * 10.0) < 0.03


def test_drafts_that_were_drawn_are_never_replaced() -> None:
    """How many there are may hang on what was drawn, and so would whether they are verified: 0.15 / 0.10 came of
    0.125 / 0.125."""
    controller = Controller(CostTable([1, 2, 8], [0], [[1.01, 1.02, 1.08]]))
    controller._per_step = {("dear", 1): 0.05}
    controller._per_depth = {"dear": 0.05}
    drawn = Candidate(0, (1, 1), 3, False, sampled(1), "other")
    for _ in range(100):
        controller.observe_forward([(1, 0)], [], 1.0)
        assert controller.budgets("dear", [drawn], []) == [0]


def test_what_is_forced_says_nothing_of_the_model_behind_it() -> None:
    """Neither of what its drafts cost, nor of how good they are."""
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=False, model=False)
    forced = Proposal.point([5, 6], sources=(("forced", 2), ("model", 0)))
    one = Candidate(0, (1, 10), 8, False, forced, "model")
    controller.observe_drafting("model", [one], [2], 1e-6)
    controller.observe(one, 11, [5, 6], 2, 2)
    assert controller._per_depth["model"] == 1.0
    assert "model" not in controller._standings[0].source


@pytest.mark.parametrize("good", [True, False])
def test_a_dear_drafter_goes_on_behind_what_is_forced(good: bool) -> None:
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=False, model=good)
    forced = Proposal.point([5, 6], sources=(("forced", 2),))
    for _ in range(30):
        controller.observe(Candidate(9, (1, 10), 8, False, forced, "forced"), 11, [5, 6], 2, 2)
    (budget,) = controller.budgets("model", [candidate(0, forced)], [])
    assert budget > 2 if good else budget == 0


def test_a_drafter_that_takes_its_time_and_has_nothing_is_given_up() -> None:
    controller = Controller(CostTable([1, 2, 8], [0], [[1.0, 1.1, 1.5]]))
    asked = 0
    for step in range(200):
        one = Candidate(0, (1, 5 + step), 8, False, Proposal.point([]))
        (budget,) = controller.budgets("dear", [one], [])
        controller.observe_forward([(1, 0)], [], 1.0)
        if budget:
            asked += 1
            controller.observe_drafting("dear", [one], [budget], 10.0)
        controller.observe(one, 6 + step, [1], 0, 0)
    assert asked < 6


def test_a_cold_first_call_for_nothing_makes_lookup_no_dear_drafter() -> None:
    controller = Controller(CostTable([1, 2, 8], [0], [[10.0, 10.5, 12.0]]))
    for step, seconds in enumerate([3.0, 0.01, 0.01, 0.02, 0.01]):
        one = Candidate(0, (1, 5 + step), 8, False, Proposal.point([]), "lookup")
        budgets = controller.budgets("lookup", [one], [])
        assert budgets[0] >= (4 if step else 1)
        controller.observe_drafting("lookup", [one], budgets, seconds)
        controller.observe(one, 6 + step, [1], 0, 0)
    assert controller.budgets("lookup", [one], []) == [8]


def test_forced_drafts_are_believed_from_the_first() -> None:
    """On steep machines a draft of the common prior does not pay; what a grammar forces does, also in short answers."""
    controller = Controller(CostTable([1, 2, 5], [0], [[10.0, 19.0, 30.0]]))
    forced = Proposal.point([1, 2, 3, 4], sources=(("forced", 4),))
    assert controller.lengths([candidate(0, forced)], []) == [4]
    assert controller.lengths([candidate(1, Proposal.point([1, 2, 3, 4]))], []) == [0]


def test_who_is_quiet_is_asked_seldom_where_asking_is_not_for_nothing() -> None:
    """What it takes to ask and to weigh is a few per cent of a short step, however little it is."""
    for forward, asked in ((100.0, 40), (1.0, 8 + 8)):
        controller = Controller(CostTable([1, 2, 16], [0], [[forward, 2.5 * forward, 30 * forward]]))
        controller._per_step = {("lookup", 1): 0.01}
        calls = 0
        for step in range(40):
            one = Candidate(0, (1, 100 + step), 8, False, has_grammar=False)
            (budget,) = controller.budgets("lookup", [one], [])
            calls += budget > 0
            controller.observe(one, 101 + step, [1], 0, 0)
        assert calls == asked
        for candidate_ in (
            Candidate(0, (1, 141), 8, True),
            Candidate(0, (1, 141), 8, False, has_grammar=True),
            Candidate(1, (1, 141), 8, False),
        ):
            assert controller.budgets("lookup", [candidate_], []) == [8]
        # One draft that is verified, and it is asked about in every step again.
        controller.observe(Candidate(0, (1, 141), 8, False), 142, [1, 2], 1, 1)
        assert controller.budgets("lookup", [Candidate(0, (1, 141), 8, False)], []) == [8]


def test_what_it_took_to_ask_a_crowd_says_what_it_takes_to_ask_one() -> None:
    """Behind sixteen requests, lookup was a dear drafter to the seventeenth that came alone, and was not asked."""
    controller = Controller(CostTable([1, 2, 16], [0], [[5.8, 14.0, 40.0]]))
    crowd = [Candidate(i, (1, 0), 8, False, Proposal.point([1, 2, 3, 4]), "lookup") for i in range(16)]
    for _ in range(50):
        controller.observe_drafting("lookup", crowd, [4] * 16, 0.8)
    one = Candidate(20, (1, 0), 8, False, Proposal.point([1, 2, 3, 4]), "lookup")
    assert controller.budgets("lookup", [candidate(20)], []) == [4], "so many, and it has not been asked: a few"
    controller.observe_drafting("lookup", [one], [4], 0.02)
    assert controller.budgets("lookup", [candidate(20)], []) == [8]


def test_a_draft_model_that_takes_as_long_for_one_as_for_many_is_dear_to_one() -> None:
    """Its call divided among 64 requests was next to nothing, and the next one that came alone had sixteen drafts."""
    controller = Controller(CostTable([1, 2, 64], [0], [[30.0, 50.0, 300.0]]))
    for size in (1, 64, 1):
        crowd = [Candidate(i, (1, 0), 8, False, sampled(4), "model") for i in range(size)]
        for _ in range(20):
            controller.observe_drafting("model", crowd, [4] * size, 8.0)
    for _ in range(20):
        controller.observe(Candidate(0, (1, 0), 8, False, sampled(1), "model"), 1, [7], 0, 1)
    assert controller.budgets("model", [candidate(70)], []) == [0]


@pytest.mark.parametrize("prompt", [3, 60])
@pytest.mark.parametrize("slow", [500.0, 1e6])
def test_a_slow_first_call_does_not_switch_a_draft_model_off(prompt: int, slow: float) -> None:
    """One that compiles, or comes from a slow disk: by what it took, nothing was ever asked of that model again."""
    controller = Controller(DEAR_TABLE)
    drafted, cached, call = 0, prompt, 0
    for _ in range(20):
        one = Candidate(0, (1, cached), 8, False)
        (budget,) = controller.budgets("model", [one], [])
        if budget:
            call += 1
            one.proposal, one.drafter = sampled(budget), "model"
            controller.observe_drafting("model", [one], [budget], slow if call == 1 else 0.5 * budget)
        controller.observe_forward([(1 + budget, cached)], [], 10.0)
        controller.observe(one, cached + 1, [1] * (budget + 1), budget, budget)
        cached, drafted = cached + budget + 1, drafted + budget
    assert drafted > 60


def test_a_slow_first_call_for_a_crowd_is_not_believed_for_ever() -> None:
    """Afterwards only few are asked, and what it takes for all would never be seen again."""
    controller = Controller(CostTable([1, 2, 16], [0], [[10.0, 20.0, 200.0]]))
    crowd = [Candidate(i, (1, 0), 8, False, Proposal.point([1, 2, 3, 4]), "lookup") for i in range(16)]
    controller.observe_drafting("lookup", crowd, [4] * 16, 1.0)
    controller.observe_drafting("lookup", crowd, [4] * 16, 90.0)
    controller.observe_drafting("lookup", crowd, [1] + [0] * 15, 0.01)
    assert controller.budgets("lookup", [candidate(i) for i in range(16)], []) == [8] * 16


def test_short_answers_one_after_the_other_are_probed_too() -> None:
    """A server whose answers have ten tokens never asked again for a drafter that was bad once."""
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=False, model=False)
    asked = 0
    for request_id in range(100, 164):
        for step in range(10):
            controller.observe_forward([(1, step)], [], 10.0)
            one = Candidate(request_id, (1, step), 8, False, Proposal.point([]))
            (budget,) = controller.budgets("model", [one], [])
            if budget:
                asked += budget
                one.proposal, one.drafter = sampled(budget), "model"
                controller.observe_drafting("model", [one], [budget], 1.0)
            controller.observe(one, step + 1, [1], 0, budget)
        controller.forget(request_id)
    assert 16 <= asked <= 20


def test_the_longest_idle_of_those_that_went_counts_on() -> None:
    """Whoever says how many drafts it wants was asked in every step, and has nothing to hand on."""
    controller = Controller(DEAR_TABLE)
    learned(controller, lookup=False, model=False)
    for _ in range(20):
        controller.budgets("model", [candidate(1), candidate(3, fixed=True)], [])
    controller.budgets("model", [candidate(2)], [])
    for request_id in (1, 2, 3):
        controller.forget(request_id)
    controller.budgets("model", [candidate(4), candidate(5)], [])
    assert [controller._standings[i].idle["model"] for i in (4, 5)] == [21, 1]


def test_a_drafter_may_say_anything_of_its_sources() -> None:
    """Names without end, and drafts that it never made: neither memory nor time may hang on them."""
    controller = Controller(STEEP)
    for step in range(1000):
        guess = Proposal.point([1, 2], sources=((f"at {step}", 10**12), ("x", 10**12)))
        one = candidate(step % 3, guess)
        controller.lengths([one], [])
        controller.observe(one, 10 * step, [1, 2, 3], 0, 0)
    assert len(controller._pool) <= 257
    assert all(len(standing.estimates) <= 257 for standing in controller._standings.values())
    (shared,), (known,) = (
        controller._estimate(controller._standings[0], source).expected(1) for source in ("another", "lookup:12")
    )
    assert shared > 0.9, "those share what they show"
    fresh = controller._estimate(controller._standing(candidate(7)), "at 0")
    assert fresh is not controller._estimate(controller._standing(candidate(7)), ""), "whoever was known stays known"
    assert known == 0.8, "but not what is known of others"


def test_many_drafts_by_number_are_priced_quickly() -> None:
    """draft_length = 5000 took a recursion as deep, and its square of calls."""
    controller = Controller(STEEP)
    long = Candidate(0, (1, 0), 5000, True, Proposal.point([1] * 5000), "lookup")
    assert controller.lengths([long], []) == [5000]
    controller.observe(long, 1, [1] * 5000, 5000, 5000)
    assert len(controller._standings[0].estimates["lookup"]._seen) == 16


def test_what_greedy_requests_saw_says_nothing_of_sampled_ones() -> None:
    """A copy that greedy decoding keeps is often left by a draw: 3 % were lost at temperature 1 for believing it."""
    controller = Controller(CostTable([1, 2, 4, 8, 16], [0], [[10, 14, 18, 24, 34]]))
    for step in range(100):
        controller.observe(
            Candidate(1, (1, 0), 8, False, Proposal.point([7] * 8), "x", greedy=True), 100 * step, [7] * 8, 8, 8
        )
        controller.observe(Candidate(2, (1, 0), 8, False, Proposal.point([7] * 8), "x"), 100 * step, [3], 0, 0)
    greedy = Candidate(3, (1, 0), 8, False, Proposal.point([7] * 8), "x", greedy=True)
    sampled_one = Candidate(4, (1, 0), 8, False, Proposal.point([7] * 8), "x")
    assert controller.lengths([greedy], []) == [8]
    assert controller.lengths([sampled_one], []) == [0]


def test_longer_matches_are_believed_more() -> None:
    controller = Controller(CostTable([1, 2, 3, 4, 5, 20], [0], [[10, 14, 16, 18, 20, 50]]))
    chances = []
    for size in (2, 4, 12):
        one = Candidate(size, (1, 0), 8, False, Proposal.point([7], sources=((f"lookup:{size}", 1),)))
        chances.append(controller._drafted(one).chances[0])
    assert chances == sorted(chances)
    assert chances[0] < 0.4 < 0.75 < chances[-1]
