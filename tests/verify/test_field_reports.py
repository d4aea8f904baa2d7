"""What went wrong in other engines and concerns a pure rule; each test names the public thread."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from paceline.errors import DrafterError, InvalidDistribution, InvalidInput
from paceline.rng import KeyedDraws
from paceline.types import Distribution, Draws, Proposal, Role, Verdict
from paceline.verify import (
    acceptance,
    rejection_rule,
    residual,
    speculative_step_verification,
    verify_block,
    verify_point,
    verify_rejection,
)

from ..conformance.enumerator import Branches, Law, enumerate_outcomes
from .stubs import LARGEST_UNIFORM, FixedDraws
from .tables import POSITION, Constant, Rule, Tables, completed, dense, error, one_step, prefixes, probability, sparse

RATIO_RULES = pytest.mark.parametrize("rule", [verify_rejection, verify_block])
ALL_RULES = pytest.mark.parametrize("rule", [verify_rejection, verify_block, verify_point])


def g_test(counts: Counter[Any], law: dict[Any, float]) -> float:
    """p-value of the G-test of `counts` against the exact `law`; impossible outcomes give 0."""
    n = sum(counts.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    g = 2.0 * sum(c * math.log(c / (n * law[outcome])) for outcome, c in counts.items())
    return float(chi2.sf(g, sum(w > 0.0 for w in law.values()) - 1))


# Probability of a false alarm per G-test. Seeds are fixed, so a test that passes always passes.
ALPHA = 1e-4


class SharedNoise(KeyedDraws):
    """The recovered token is drawn with the noise that drew the draft: the fault that was reported."""

    def pick(self, weights: Any, position: int, role: Role, *, ids: Any = None, node: int = 0) -> int:
        role = Role.DRAFT if role is Role.RECOVER else role
        return super().pick(weights, position, role, ids=ids, node=node)


def sampled_counts(rule: Rule, model: Tables, K: int, n: int, draws: type[KeyedDraws]) -> Counter[Any]:
    """First tokens of n steps with real draws and the real draft sampler in the loop."""
    return Counter(one_step(rule, model, K, draws(seed, POSITION), dense).tokens[:1] for seed in range(n))


@RATIO_RULES
@pytest.mark.parametrize("K", [1, 3])
def test_draft_and_recovery_share_no_noise_vllm_54282(rule: Rule, K: int) -> None:
    # 3 cells, N = 6,000: a total variation of 0.05 is found with power > 0.99 at alpha = 1e-4. The fault
    # moves this p by 0.058 when K = 1.
    model = Constant([0.45, 0.45, 0.1], [0.1, 0.3, 0.6])
    law = {(v,): float(model.p(())[v]) for v in range(3)}
    assert g_test(sampled_counts(rule, model, K, 6_000, KeyedDraws), law) > ALPHA
    assert g_test(sampled_counts(rule, model, K, 6_000, SharedNoise), law) < ALPHA


@RATIO_RULES
def test_every_draw_has_its_own_key_flashinfer_424(rule: Rule) -> None:
    # flashinfer#424, #425: one uniform for accepting and resampling. The enumerator refuses a key that is
    # drawn twice; and here the recovered token must not depend on which uniform rejected.
    model = Tables("random", 3, seed=1)
    keys: list[tuple[Any, ...]] = []

    class Recording(KeyedDraws):
        def accept(self, probability: float, position: int, node: int = 0) -> bool:
            keys.append((Role.ACCEPT, position, node))
            return super().accept(probability, position, node)

        def pick(self, weights: Any, position: int, role: Role, *, ids: Any = None, node: int = 0) -> int:
            keys.append((role, position, node))
            return super().pick(weights, position, role, ids=ids, node=node)

    kinds = set()
    for seed in range(300):
        keys.clear()
        kinds.add(one_step(rule, model, 3, Recording(seed, POSITION), dense).kind)
        assert len(keys) == len(set(keys))
    assert kinds == {"recovered", "bonus"}


def test_recovered_tokens_follow_the_residual_vllm_ascend_16370() -> None:
    # There the accept uniform, which a rejection confines to (h, 1), was used again to invert the residual.
    p, q = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]
    rng = np.random.default_rng(0)
    emitted = [speculative_step_verification([2], [p], [q], rng)[0] for _ in range(20_000)]
    recovered = Counter(t for t in emitted if t != 2)
    assert g_test(recovered, dict(enumerate(rejection_rule(p, q, 2)[1]))) > ALPHA

    def run(branches: Branches) -> Any:
        verdict = verify_rejection(np.array([p, p]), Proposal.sampled([2], [q]), branches(), POSITION)
        return verdict.tokens[0] if verdict.kind == "recovered" else "accepted"

    law = enumerate_outcomes(run)
    rejected = 1.0 - law.pop("accepted")
    assert law == pytest.approx({0: rejected * 0.8, 1: rejected * 0.2}, abs=1e-12)


@RATIO_RULES
def test_not_every_draft_is_kept_vllm_ascend_13766(rule: Rule) -> None:
    # A fallback had u = 0 and kept everything. Nearly disjoint p and q, one draft: kept with sum min(p, q).
    p, q = np.array([0.0, 0.05, 0.95]), np.array([0.6, 0.35, 0.05])

    def run(branches: Branches) -> tuple[int, int]:
        draws = branches()
        x = draws.pick(q, POSITION, Role.DRAFT)
        verdict = rule(np.array([p, p]), Proposal.sampled([x], [q]), draws, POSITION)
        return verdict.num_accepted, verdict.tokens[0]

    law = enumerate_outcomes(run)
    kept = sum(weight for (accepted, _), weight in law.items() if accepted)
    assert kept == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
    assert kept == pytest.approx(acceptance(dense(p), dense(q)), abs=1e-12)
    assert all(token != 0 for _, token in law)


@ALL_RULES
def test_a_filtered_target_is_never_left_vllm_10198(rule: Rule) -> None:
    # There p came before top-p and q after it. Support of p is (1, 2); top_k = 1 must be greedy.
    p = sparse(np.array([0.0, 0.6, 0.4, 0.0]))
    q = np.array([0.4, 0.1, 0.1, 0.4])
    greedy = Distribution.one_hot(2, 4)
    for x, seed in itertools.product(range(4), range(200)):
        draws = KeyedDraws(seed, POSITION)
        assert set(rule([p, p], Proposal.sampled([x], [q]), draws, POSITION).tokens) <= {1, 2}
        verdict = rule([greedy, greedy], Proposal.sampled([x], [q]), draws, POSITION)
        assert verdict.tokens == ((2, 2) if x == 2 else (2,))


def test_one_hot_and_full_q_keep_what_the_closed_forms_say_vllm_40551() -> None:
    # vllm#40551, vllm#40651: an exact match where a ratio was meant. Full q keeps sum min(p, q), its
    # argmax as a point proposal keeps p(argmax q); a drafter that is right but unsure does better as a point.
    sure, unsure = np.array([0.9, 0.05, 0.05]), np.array([0.4, 0.3, 0.3])
    p = np.array([0.8, 0.1, 0.1])
    for q in (sure, unsure):

        def run(branches: Branches, q: Any = q) -> int:
            draws = branches()
            x = draws.pick(q, POSITION, Role.DRAFT)
            proposal = Proposal.sampled([x], [q])
            return verify_rejection(np.array([p, p]), proposal, draws, POSITION).num_accepted

        def run_point(branches: Branches, q: Any = q) -> int:
            proposal = Proposal.point([int(q.argmax())])
            return verify_point(np.array([p, p]), proposal, branches(), POSITION).num_accepted

        assert enumerate_outcomes(run)[1] == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
        assert enumerate_outcomes(run_point)[1] == pytest.approx(p[q.argmax()], abs=1e-12)
    assert np.minimum(p, unsure).sum() < p[0] < np.minimum(p, sure).sum()


@ALL_RULES
def test_a_step_emits_accepted_plus_one_vllm_8320(rule: Rule) -> None:
    # The claim was that a token is lost at the mismatch of a greedy request.
    best = [2, 0, 1]
    p = [Distribution.one_hot(t, 3) for t in best]
    for drafts in itertools.product(range(3), repeat=2):
        q = [Distribution.one_hot(t, 3) for t in drafts]
        verdict = rule(p, Proposal.sampled(drafts, q), FixedDraws(0.5), POSITION)
        same = next((i for i in range(2) if drafts[i] != best[i]), 2)
        assert verdict.tokens == tuple(best[: same + 1])


@ALL_RULES
def test_uniform_zero_keeps_nothing_impossible_sglang_35771(rule: Rule) -> None:
    # sglang#35771: coin <= sum, with coin 0 and a draft that the filters removed. Also a coin at each edge.
    p, q = np.array([[0.0, 0.75, 0.25]] * 2), np.array([[0.5, 0.25, 0.25]])
    for u in (0.0, 0.25, 0.75, LARGEST_UNIFORM):
        assert rule(p, Proposal.sampled([0], q), FixedDraws(u), POSITION).tokens[0] != 0
    half = np.array([[0.25, 0.75]] * 2)
    kept = {
        u: rule(half, Proposal.sampled([0], [[0.5, 0.5]]), FixedDraws(u), POSITION).num_accepted
        for u in (np.nextafter(0.5, 0.0), 0.5)
    }
    if rule is not verify_point:
        assert kept == {np.nextafter(0.5, 0.0): 1, 0.5: 0}  # strictly below: the edge itself is rejected


@RATIO_RULES
def test_the_residual_is_not_p_without_one_token_eagle_20(rule: Rule) -> None:
    # SafeAILab/EAGLE#20, #50: after a rejection only the rejected token was zeroed though it was sampled.
    model = Tables("random", 3, seed=1)

    def run(branches: Branches) -> tuple[int, ...]:
        return one_step(rule, model, 1, branches(), dense).tokens

    assert error(enumerate_outcomes(run), model, 2) <= 1e-12

    def zeroed(branches: Branches) -> tuple[int, ...]:
        draws = branches()
        p, q = model.p(()), model.q(())
        x = draws.pick(q, POSITION, Role.DRAFT)
        if draws.accept(min(1.0, p[x] / q[x]), POSITION):
            return (x,)
        return (draws.pick(np.where(np.arange(3) == x, 0.0, p), POSITION, Role.RECOVER),)

    assert error(enumerate_outcomes(zeroed), model, 1) > 1e-3  # the same comparison finds that fault


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@RATIO_RULES
def test_the_q_that_was_drawn_from_is_the_q_of_the_ratio_deepspec_31(rule: Rule, dtype: Any) -> None:
    # deepseek-ai/DeepSpec#31: drawn in a short float, divided by a longer one. A row in a short float is
    # taken as it is: the ratio uses exactly the numbers that were drawn from, ties included.
    q = np.array([0.25, 0.25, 0.5], dtype=dtype)
    p = np.array([0.1, 0.4, 0.5])
    draws = FixedDraws(0.5)
    rule(np.array([p, p]), Proposal.sampled([0], np.array([q])), draws, POSITION)
    assert draws.accepts == [(0.1 / float(q[0]), POSITION, 0)]


def test_one_draft_of_one_half_comes_out_half_the_time_medusa_56() -> None:
    # FasterDecoding/Medusa#56 (its nucleus path): the draw of a mismatch was thrown away and repeated, so
    # a draft with p = 0.5 came out with 0.75.
    p = np.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])

    def run(branches: Branches) -> int:
        return verify_point(p, Proposal.point([0]), branches(), POSITION).tokens[0]

    assert enumerate_outcomes(run) == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=1e-12)


def test_placeholders_are_no_tokens_tensorrt_llm_15182() -> None:
    # TensorRT-LLM#15182: the -1 of rejected slots was fed to the drafter.
    with pytest.raises(InvalidInput, match="draft token 1 is -1"):
        Proposal.point([0, -1])
    with pytest.raises(InvalidDistribution, match=r"draft_tokens\[1\] = -1"):
        speculative_step_verification([0, -1], [[0.5, 0.5]] * 2, [[0.5, 0.5]] * 2)


@ALL_RULES
def test_a_step_that_keeps_nothing_vllm_50021(rule: Rule) -> None:
    # vllm#50021: "accepted - 1" as an index, with zero accepted. Nothing is padded, nothing is negative.
    p = np.array([[0.0, 1.0, 0.0]] * 4)
    q = np.array([[0.5, 0.0, 0.5]] * 3)
    for drafts in itertools.product((0, 2), repeat=3):
        for u in (0.0, 0.5, LARGEST_UNIFORM):
            verdict = rule(p, Proposal.sampled(drafts, q), FixedDraws(u), POSITION)
            assert verdict == Verdict((1,), 0, (), "recovered")


@RATIO_RULES
def test_the_recovered_token_comes_from_the_rejected_row_openvino_genai_4190(rule: Rule) -> None:
    # openvinotoolkit/openvino.genai#4190: a rejection was handled one row late and without a residual.
    # Row 0 can only give 0, row 1 only 1, row 2 only 2; the drafter is wrong at the second token.
    p = np.eye(3)
    q = np.full((2, 3), 1 / 3)
    verdict = rule(p, Proposal.sampled([0, 2], q), FixedDraws(0.5), POSITION)
    assert verdict == Verdict((0, 1), 1, (0,), "recovered")
    model = Tables("random", 2, seed=2)

    def run(branches: Branches) -> tuple[int, ...]:
        return one_step(rule, model, 2, branches(), dense).tokens

    assert error(enumerate_outcomes(run), model, 3) <= 1e-12


def test_an_impossible_point_draft_is_never_emitted_openvino_genai_2331() -> None:
    # openvinotoolkit/openvino.genai#2331: lookup drafts carried a made-up probability 1 and always passed.
    p = np.array([[0.0, 0.5, 0.5]] * 4)
    for drafts in itertools.product(range(3), repeat=3):

        def run(branches: Branches, drafts: tuple[int, ...] = drafts) -> tuple[int, ...]:
            return verify_point(p, Proposal.point(drafts), branches(), POSITION).tokens

        law = enumerate_outcomes(run)
        assert all(0 not in tokens for tokens in law)
        first = {v: sum(w for tokens, w in law.items() if tokens[0] == v) for v in (1, 2)}
        assert first == pytest.approx({1: 0.5, 2: 0.5}, abs=1e-12)


@RATIO_RULES
@pytest.mark.parametrize("pair", ["one-hot p", "one-hot q", "one-hot both"])
def test_greedy_on_one_side_only_llama_cpp_5657(rule: Rule, pair: str) -> None:
    # ggml-org/llama.cpp#5657: at temperature 0 a sampler left the draft no probabilities.
    for seed in range(4):
        model = Tables(pair, 3, seed)

        def run(branches: Branches, model: Tables = model) -> tuple[int, ...]:
            return one_step(rule, model, 2, branches(), sparse).tokens

        assert error(enumerate_outcomes(run), model, 3) <= 1e-12


@ALL_RULES
@pytest.mark.parametrize("V", [1, 3, 7, 127, 129])
def test_emitted_ids_stay_below_the_vocabulary_vllm_44744(rule: Rule, V: int) -> None:
    # vllm#44744, #53029, #21876: padded lanes won the argmax when a row was all zero, NaN or -inf.
    rng = np.random.default_rng(V)
    p = rng.dirichlet(np.ones(V), size=3)
    for q in (p[:2], rng.dirichlet(np.ones(V), size=2)):
        for seed in range(50):
            drafts = [int(rng.choice(V, p=row)) for row in q]
            verdict = rule(p, Proposal.sampled(drafts, q), KeyedDraws(seed, POSITION), POSITION)
            assert all(0 <= t < V for t in verdict.tokens)
    for bad in (0.0, math.nan, -math.inf):
        with pytest.raises(InvalidDistribution):
            rule(np.full((3, V), bad), Proposal.sampled([0, 0], p), KeyedDraws(0, POSITION), POSITION)
    with pytest.raises(DrafterError, match=f"token {V}"):
        rule(p, Proposal.sampled([V, 0], np.full((2, V + 1), 1 / (V + 1))), FixedDraws(0.5), POSITION)


def test_a_step_without_drafts_uses_the_noise_of_its_position_vllm_ascend_13608() -> None:
    # vllm-ascend#13608: a seeded request changed when some steps had no draft, for a discarded draw had
    # moved the generator on. Here the same positions give the same tokens however the steps are cut.
    model = Tables("random", 4, seed=3)

    def decode(lengths: list[int]) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for K in itertools.cycle(lengths):
            x = tuple((len(tokens) + i) % 4 for i in range(K))
            rows = [model.p((*tokens, *x[:i])[-3:]) for i in range(K + 1)]
            draws: Draws = KeyedDraws(7, len(tokens))
            tokens += verify_point(np.array(rows), Proposal.point(x), draws, len(tokens)).tokens
            if len(tokens) >= 40:
                return tokens[:40]
        raise AssertionError("unreachable")

    plain = decode([0])
    assert all(decode(lengths) == plain for lengths in ([3], [0, 4], [2, 0, 0, 1]))


@RATIO_RULES
def test_recovered_mass_is_added_back_vllm_14464(rule: Rule) -> None:
    # vllm#14464, #14649: too few tokens were kept while the residual was not added. Every token's two
    # paths must give p: kept as a draft, or recovered.
    model = Tables("zeros in q", 3, seed=2)

    def run(branches: Branches) -> tuple[int, str]:
        verdict = one_step(rule, model, 1, branches(), dense)
        return verdict.tokens[0], "kept" if verdict.num_accepted else "recovered"

    law: Law = enumerate_outcomes(run)
    p, q = model.p(()), model.q(())
    left = residual(dense(p), dense(q))
    for v in range(3):
        assert law.get((v, "kept"), 0.0) == pytest.approx(min(p[v], q[v]), abs=1e-12)
        assert law.get((v, "recovered"), 0.0) == pytest.approx(left[v], abs=1e-12)


def test_full_acceptance_of_a_perfect_drafter_openvino_genai_4425() -> None:
    # openvinotoolkit/openvino.genai#4425: a drafter equal to the target was sometimes accepted zero times.
    for rule, V, K in itertools.product((verify_rejection, verify_block), (2, 3), (1, 2, 3)):
        model = Tables("p = q", V, seed=1)

        def run(branches: Branches, rule: Rule = rule, model: Tables = model, K: int = K) -> tuple[int, ...]:
            return one_step(rule, model, K, branches(), dense).tokens

        law = enumerate_outcomes(run)
        assert {len(tokens) for tokens in law} == {K + 1}
        assert completed(law, model, K + 1) == pytest.approx(
            {z: probability(model.p, z) for z in prefixes(V, K + 1)}, abs=1e-12
        )
