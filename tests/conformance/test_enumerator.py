"""The enumerator itself: laws it must get right, and faults it must not overlook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.params import SamplingParams
from paceline.sampling import History
from paceline.types import DraftContext, Proposal, Role

from .enumerator import Branches, EveryDraft, enumerate_outcomes

COIN = np.array([0.25, 0.75])


def test_law_of_two_coins() -> None:
    def run(branches: Branches) -> tuple[bool, int]:
        draws = branches(3, 10)
        return draws.accept(0.125, 10), draws.pick(COIN, 10, Role.DRAFT)

    assert enumerate_outcomes(run) == {
        (True, 0): 0.03125,
        (True, 1): 0.09375,
        (False, 0): 0.21875,
        (False, 1): 0.65625,
    }


def test_weights_may_have_any_sum_and_ids_name_tokens() -> None:
    def run(branches: Branches) -> int:
        return branches().pick(np.array([1.0, 0.0, 3.0]), 0, Role.TARGET, ids=np.array([5, 6, 9]))

    assert enumerate_outcomes(run) == {5: 0.25, 9: 0.75}


def test_impossible_branches_are_not_followed() -> None:
    runs = []

    def run(branches: Branches) -> tuple[bool, bool, int]:
        runs.append(1)
        draws = branches()
        return draws.accept(0.0, 0), draws.accept(1.0, 1), draws.pick(np.array([0.0, 2.0]), 0, Role.DRAFT)

    assert enumerate_outcomes(run) == {(False, True, 1): 1.0}
    assert len(runs) == 1


def test_the_number_of_draws_may_depend_on_what_was_drawn() -> None:
    def run(branches: Branches) -> int:  # a geometric law, cut at 5
        return next((i for i in range(5) if branches().accept(0.5, i)), 5)

    assert enumerate_outcomes(run) == {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.0625, 4: 0.03125, 5: 0.03125}


def test_one_key_is_one_draw() -> None:
    def run(branches: Branches) -> tuple[int, int]:
        draws = branches()
        return draws.pick(COIN, 4, Role.RECOVER, node=1), draws.pick(2.0 * COIN, 4, Role.RECOVER, node=1)

    assert enumerate_outcomes(run) == {(0, 0): 0.25, (1, 1): 0.75}


def test_target_noise_ignores_step_and_node_and_other_noise_does_not() -> None:
    def run(role: Role, branches: Branches) -> tuple[int, int]:
        return branches(0, 1).pick(COIN, 4, role, node=1), branches(0, 2).pick(COIN, 4, role, node=0)

    assert len(enumerate_outcomes(lambda b: run(Role.TARGET, b))) == 2
    assert len(enumerate_outcomes(lambda b: run(Role.DRAFT, b))) == 4


def test_requests_with_different_seeds_are_independent() -> None:
    def run(branches: Branches) -> tuple[int, int]:
        return branches(1, 0).pick(COIN, 0, Role.TARGET), branches(2, 0).pick(COIN, 0, Role.TARGET)

    assert enumerate_outcomes(run) == {(0, 0): 0.0625, (0, 1): 0.1875, (1, 0): 0.1875, (1, 1): 0.5625}


@pytest.mark.parametrize("second", ["weights", "support", "accept"])
def test_one_key_with_two_meanings_is_found(second: str) -> None:
    def run(branches: Branches) -> int:
        draws = branches()
        if second == "accept":
            return draws.accept(0.5, 0) + draws.accept(0.25, 0)
        draws.pick(COIN, 0, Role.TARGET)
        other = np.array([0.5, 0.5]) if second == "weights" else np.array([0.25, 0.0, 0.75])
        return draws.pick(other, 0, Role.TARGET)

    with pytest.raises(AssertionError, match="twice with different meaning"):
        enumerate_outcomes(run)


def test_a_run_that_is_no_function_of_its_draws_is_found() -> None:
    calls = []

    def run(branches: Branches) -> int:
        calls.append(1)
        weights = COIN if len(calls) == 1 else np.array([0.0, 0.5, 0.5])
        return branches().pick(weights, 0, Role.TARGET)

    with pytest.raises(AssertionError, match="not a function of its draws"):
        enumerate_outcomes(run)


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: d.accept(float("nan"), 0),
        lambda d: d.accept(1.0 + 1e-9, 0),
        lambda d: d.pick(np.array([0.5, -0.5]), 0, Role.TARGET),
        lambda d: d.pick(np.array([float("nan"), 1.0]), 0, Role.TARGET),
        lambda d: d.pick(np.zeros(2), 0, Role.TARGET),
        lambda d: d.pick(COIN, 0, Role.ACCEPT),
    ],
)
def test_draws_that_mean_nothing_are_found(draw: Any) -> None:
    with pytest.raises(AssertionError):
        enumerate_outcomes(lambda branches: draw(branches()))


def test_too_many_leaves_are_reported() -> None:
    def run(branches: Branches) -> tuple[bool, ...]:
        return tuple(branches().accept(0.5, i) for i in range(8))

    assert len(enumerate_outcomes(run, max_leaves=256)) == 256
    with pytest.raises(AssertionError, match="more than 255 leaves"):
        enumerate_outcomes(run, max_leaves=255)


# --- every draft: the coupled case -----------------------------------------------------------------------


def test_every_draft_is_followed_without_a_probability() -> None:
    drafts = set()

    def run(branches: Branches) -> int:
        drafts.add(branches.every_draft().pick(np.array([0.9, 0.0, 0.1]), 0, Role.TARGET))
        return branches().pick(COIN, 0, Role.TARGET)

    assert enumerate_outcomes(run) == {0: 0.25, 1: 0.75}
    assert drafts == {0, 2}


def test_a_law_that_depends_on_the_draft_is_found() -> None:
    def run(branches: Branches) -> int:
        x = branches.every_draft().pick(COIN, 0, Role.TARGET)
        return x if branches().accept(0.5, 0) else branches().pick(COIN, 0, Role.TARGET)

    with pytest.raises(AssertionError, match="the law depends on the draft"):
        enumerate_outcomes(run)


def test_a_dependence_in_a_later_step_is_found() -> None:
    def run(branches: Branches) -> tuple[int, ...]:
        first = branches(0, 0).pick(COIN, 0, Role.TARGET)
        x = branches.every_draft(0, 1).pick(COIN, 1, Role.TARGET)
        return (first, x) if first == 1 else (first, branches(0, 1).pick(COIN, 1, Role.TARGET))

    with pytest.raises(AssertionError, match="the law depends on the draft"):
        enumerate_outcomes(run)


def test_a_coupled_drafter_may_meet_its_noise_again_in_the_next_step() -> None:
    def run(branches: Branches) -> int:
        branches.every_draft(0, 0).pick(COIN, 1, Role.TARGET, node=1)
        branches.every_draft(0, 1).pick(np.array([0.5, 0.5]), 1, Role.TARGET)
        return branches().pick(COIN, 1, Role.TARGET)

    assert enumerate_outcomes(run) == {0: 0.25, 1: 0.75}


def test_target_draws_leave_the_drafts_out() -> None:
    def run(branches: Branches) -> bool:
        branches.every_draft(7).pick(COIN, 0, Role.TARGET)
        branches(7).pick(COIN, 1, Role.DRAFT)
        branches(8).pick(COIN, 2, Role.TARGET)
        token = branches(7).pick(COIN, 3, Role.TARGET)
        return branches.target_draws(7) == {3: token}

    assert enumerate_outcomes(run) == {True: 1.0}


class CoinDrafter:
    """Proposes one token, drawn with whatever draws and role its context carries."""

    name = "coin"

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        return [Proposal.sampled([c.draws.pick(COIN, len(c.tokens), c.role)], [COIN]) for c in contexts]

    def observe(self, request_id: int, committed: Sequence[int], hidden: Any | None = None) -> None:
        pass

    def release(self, request_id: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_every_draft_replaces_the_draws_of_each_context() -> None:
    def run(branches: Branches) -> tuple[int, int]:
        drafter = EveryDraft(CoinDrafter(), branches)
        params = SamplingParams()
        history = History(params, [0, 0], 2, len(COIN))
        contexts = [DraftContext(i, [0, 0], 2, params, branches(i, 2), Role.TARGET, history) for i in range(2)]
        proposed.add(tuple(p.tokens for p in drafter.propose(contexts, [1, 1])))
        return branches(0, 2).pick(COIN, 2, Role.TARGET), branches(1, 2).pick(COIN, 2, Role.TARGET)

    proposed: set[Any] = set()
    law = enumerate_outcomes(run)
    assert law == pytest.approx({(0, 0): 0.0625, (0, 1): 0.1875, (1, 0): 0.1875, (1, 1): 0.5625})
    assert len(proposed) == 4
