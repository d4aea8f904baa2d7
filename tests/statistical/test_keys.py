"""What must not share noise, shown by what happens when it does: these draws are caught, by these very tests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.verify.tables import Row, Tables

from .chains import DraftNoiseAgain, KeyedByPosition, KeyedDraws, MakeDraws, Model, sequences
from .gtest import ALPHA, GTest, detectable_tv, g_test, seeds


class Constant(Tables):
    """p and q that do not depend on the text."""

    def __init__(self, p: list[float], q: list[float]) -> None:
        super().__init__("random", len(p))
        self._pair = (np.array(p), np.array(q))

    def _both(self, prefix: tuple[int, ...]) -> tuple[Row, Row]:
        return self._pair


PAPER = Model(Constant([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
N = 8_000


def run(way: str, model: Model, K: int, length: int, make_draws: MakeDraws, n: int = N) -> tuple[GTest, dict]:
    counts = sequences(way, model, K, length, seeds(f"keys, {way}, {K}, {length}", n), make_draws)
    return g_test(counts, model.law(length)), counts


def share_of_zero(counts: dict, place: int) -> float:
    return sum(c for tokens, c in counts.items() if tokens[place] == 0) / sum(counts.values())


def test_block_needs_the_step_start_in_its_keys() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2. With keys of the position alone, the second token is 0 with probability
    7/18 instead of 1/3. N = 8,000: 7/18 is met within five standard errors (5.5e-3 each), 1/3 missed by ten.
    """
    good, counts = run("block", PAPER, 2, 4, KeyedDraws)
    bad, biased = run("block", PAPER, 2, 4, KeyedByPosition)
    error = math.sqrt(7 / 18 * 11 / 18 / N)
    assert good.p_value >= ALPHA
    assert abs(share_of_zero(counts, 1) - 1 / 3) < 5 * error
    assert bad.p_value < ALPHA
    assert abs(share_of_zero(biased, 1) - 7 / 18) < 5 * error
    assert abs(share_of_zero(biased, 0) - 1 / 3) < 5 * error  # within a step nothing is wrong


def test_rejection_does_not() -> None:
    """Token by token, a step looks at no noise of positions behind the one where it ends: keys of the position alone
    are exact there. The same setting, N = 8,000, 16 cells, sees TV 0.055 (alpha 1e-6, power 0.999), which is the
    error in the second token alone of the block rule, caught above under the very same keys.
    """
    assert detectable_tv(N, 16) < 0.055
    result, counts = run("rejection", PAPER, 2, 4, KeyedByPosition)
    assert result.p_value >= ALPHA
    assert abs(share_of_zero(counts, 1) - 1 / 3) < 5 * math.sqrt(2 / 9 / N)


def test_block_with_keys_of_the_position_on_random_tables() -> None:
    """K = 3, V = 2, p and q that depend on the text: N = 8,000 is enough to catch it there too."""
    model = Model(Tables("random", 2, seed=6))
    assert run("block", model, 3, 4, KeyedDraws)[0].p_value >= ALPHA
    assert run("block", model, 3, 4, KeyedByPosition)[0].p_value < ALPHA


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("way", ["rejection", "block"])
def test_draft_and_recovery_need_noise_of_their_own(way: str, K: int) -> None:
    """vllm#54282 (its fix's first try: #47386): a recovered token drawn with its draft's Gumbel noise.

    V = 3 (with two tokens the recovered one has no choice). N = 6,000.
    """
    model = Model(Tables("random", 3, seed=3))
    assert run(way, model, K, 3, KeyedDraws, 6_000)[0].p_value >= ALPHA
    assert run(way, model, K, 3, DraftNoiseAgain, 6_000)[0].p_value < ALPHA
