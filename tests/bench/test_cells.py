"""From runs to cells: pairing, ratios, means, and warnings."""

from __future__ import annotations

import pytest

from paceline.bench.cells import MEAN, Comparison, steps
from paceline.bench.runs import Run
from paceline.errors import InvalidParams
from paceline.types import SpeculationStats

from .fakes import loaded, result, run


def cell(made: Comparison, contender: str, category: str = "a", temperature: float = 0.0):  # type: ignore[no-untyped-def]
    (found,) = [c for c in made.cells if (c.contender, c.category, c.temperature) == (contender, category, temperature)]
    return found


def test_ratios_are_paired_by_unit_and_repeat() -> None:
    """Catches ratios of sums or of the wrong partners: here each pair is exactly twice as fast, whatever the prompt."""
    runs: list[Run] = []
    for unit, seconds in enumerate((1.0, 5.0, 30.0)):
        for repeat in range(2):
            runs.append(run("plain", seconds * (1 + repeat), unit=unit, repeat=repeat))
            runs.append(run("fast", seconds * (1 + repeat) / 2, unit=unit, repeat=repeat, steps=2))
    made = Comparison(list(reversed(runs)), ["plain", "fast"], "plain")
    fast = cell(made, "fast")
    assert fast.ratio == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0, "n": 3})
    assert fast.decode_ratio == pytest.approx(fast.ratio)
    assert cell(made, "plain").ratio is None
    assert fast.tokens_per_second == pytest.approx(60 / 54)
    assert (fast.runs, fast.tokens, fast.tokens_per_step, fast.same_text) == (6, 60, 5.0, 6)
    assert fast.acceptance_at == ()
    assert made.warnings == []


def test_a_pair_without_a_partner_has_no_ratio() -> None:
    """Catches ratios made of a prompt that only one side answered, and a peer's failure that is hidden."""
    runs = [run("plain", 2.0, unit=0), run("plain", 2.0, unit=1)]
    runs += [run("peer", 1.0, unit=0), run("peer", 0.0, unit=1, results=(), error="peer peer fell over")]
    made = Comparison(runs, ["plain", "peer"], "plain")
    assert cell(made, "peer").ratio == {"ratio": 2.0, "low": None, "high": None, "n": 1}
    assert cell(made, "peer").error == "peer peer fell over"
    assert any("peer peer fell over" in warning for warning in made.warnings)


def test_a_category_counts_once_everybody_had_a_turn() -> None:
    """Catches means of different categories, and cells without a partner, after Ctrl-C; and a failed peer dropped."""
    runs = [run(name, 1.0, category=category) for category in "ab" for name in ("plain", "fast")]
    runs += [run("plain", 1.0, category="c"), run("fast", 1.0, temperature=1.0)]
    made = Comparison(runs, ["plain", "fast"], "plain")
    assert [(c.category, c.contender) for c in made.cells] == [
        (c, n) for n in ("plain", "fast") for c in ("a", "b", MEAN)
    ]
    gone = [run("plain", 1.0), run("peer", 0.0, results=(), error="gone"), run("plain", 1.0, category="b")]
    named = [(c.category, c.error) for c in Comparison(gone, ["plain", "peer"], "plain").cells if c.contender == "peer"]
    assert named == [("a", "gone"), ("b", "no runs"), (MEAN, "gone")]
    refused = [run("plain", 1.0, temperature=1.0), run("peer", 0.0, results=(), error="no", temperature=1.0)]
    refused += [run("plain", 1.0), run("peer", 1.0), run("plain", 1.0, category="b")]  # and then Ctrl-C
    found = [(c.temperature, c.category) for c in Comparison(refused, ["plain", "peer"], "plain").cells]
    assert found == [(1.0, "a")] * 2 + [(0.0, "a")] * 2


def test_an_answer_without_tokens_counts_nowhere() -> None:
    """Catches the logarithm of zero."""
    runs = [run("plain", 1.0), run("fast", 1.0, results=(result(0, 1.0, 1),))]
    assert cell(Comparison(runs, ["plain", "fast"], "plain"), "fast").ratio is None


def test_the_mean_is_geometric_over_categories() -> None:
    """Catches a mean in which a category with more prompts weighs more."""
    runs = [run("plain", 1.0, category="a", unit=i) for i in range(4)] + [run("plain", 1.0, category="b")]
    runs += [run("fast", 1.0, category="a", unit=i) for i in range(4)] + [run("fast", 0.25, category="b", steps=1)]
    made = Comparison(runs, ["plain", "fast"], "plain")
    mean = cell(made, "fast", MEAN)
    assert mean.ratio is not None
    assert mean.ratio["ratio"] == pytest.approx(2.0)
    assert mean.tokens_per_second == pytest.approx(20.0)
    one_only = Comparison([r for r in runs if r.category == "a"], ["plain", "fast"], "plain")
    assert {c.category for c in one_only.cells} == {"a"}


def test_another_baseline_turns_the_ratio_over() -> None:
    """Catches a baseline that is ignored."""
    runs = [run("plain", 2.0), run("K = 4", 1.0)]
    turned = cell(Comparison(runs, ["plain", "K = 4"], "K = 4"), "plain")
    assert turned.ratio is not None
    assert turned.ratio["ratio"] == pytest.approx(0.5)
    with pytest.raises(InvalidParams, match="baseline = 'K = 8'; allowed: plain, K = 4"):
        Comparison(runs, ["plain", "K = 4"], "K = 8")


def test_faster_than_tokens_per_step_is_a_warning() -> None:
    """Catches a benchmark that believes a speedup which speculation cannot have given; and one that warns for noise."""

    def made(speedup: float, noise: float) -> Comparison:
        runs = []
        for unit in range(4):
            runs.append(run("plain", 6.0, unit=unit))
            runs.append(run("fast", 6.0 / speedup * (1 + noise * (unit % 2)), unit=unit, steps=5))
        return Comparison(runs, ["plain", "fast"], "plain")

    (warning,) = made(3.0, 0.01).warnings
    assert warning.startswith("fast, a, temperature 0, 1 at once: ")
    assert "at 2.00 tokens per step, which do not explain it" in warning
    assert made(1.9, 0.01).warnings == []
    assert made(2.1, 0.5).warnings == []


def test_runs_beside_other_load_are_counted() -> None:
    """Catches a contaminated cell that looks like any other."""
    runs = [run("plain", 1.0), run("fast", 1.0, load=loaded())]
    made = Comparison(runs, ["plain", "fast"], "plain")
    assert [cell(made, name).disturbed for name in ("plain", "fast")] == [0, 1]
    assert made.warnings == ["1 of 2 runs were beside other load; their cells are marked *"]


def test_many_at_once_have_no_speed_without_prompts() -> None:
    """Catches a decode speed that leaves out prompts which others had to wait for."""
    results = (result(), result())
    runs = [run(name, 1.0, concurrency=2, results=results) for name in ("plain", "fast")]
    fast = cell(Comparison(runs, ["plain", "fast"], "plain"), "fast")
    assert (fast.tokens, fast.tokens_per_second) == (20, 20.0)
    assert fast.decode_tokens_per_second is None
    assert fast.decode_ratio is None


def test_a_step_by_stage() -> None:
    """Catches sums in place of a step's own time, and shares that leave drafting out."""

    def one(repeat: int, forward: float) -> Run:
        stats = SpeculationStats(
            steps=10, drafted=30, accepted=5, emitted=15, drafted_at=[10, 10, 10], accepted_at=[3, 1, 1],
            draft_seconds=0.001, forward_seconds=forward, verify_seconds=0.002, other_seconds=0.001,
        )  # fmt: skip
        return run("K = 3", 1.0, repeat=repeat, results=(result(),)).__class__(
            "K = 3", "a", 0.0, 1, 0, repeat, 1.0, (result().__class__("q", 5, 15, "x", "length", 1.0, 15, stats),)
        )

    (row,) = steps([one(0, 0.016), one(1, 0.036), one(2, 0.036)], ["K = 3"])
    assert row["forward_us"] == pytest.approx(3600)
    assert (row["draft_us"], row["verify_us"], row["other_us"]) == pytest.approx((100, 200, 100))
    assert row["share_outside"] == pytest.approx(0.1)
    assert (row["share_outside_low"], row["share_outside_high"]) == pytest.approx((0.1, 0.2))
    assert (row["steps"], row["drafts_per_step"], row["tokens_per_step"]) == (30, 3.0, 1.5)
