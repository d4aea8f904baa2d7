"""Mutants of the rules and of the random numbers behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.engine import Engine
from paceline.rng import KeyedDraws, counter_words
from paceline.types import Distribution, FloatArray, Proposal, Role, Verdict
from paceline.verify import (
    rejection_rule,
    residual,
    speculative_step_verification,
    verify_block,
    verify_point,
    verify_rejection,
)
from paceline.verify.block import keep_prefix
from paceline.verify.inputs import draft_rows, ratio
from paceline.verify.last_token import bonus, recovered
from paceline.verify.taught import _draw

from .mutants import edit, mutant
from .mutants_reference import noise

Patch = pytest.MonkeyPatch

# --- the residual -------------------------------------------------------------------------------------


@mutant("residual is p", "the recovered token is drawn from p, so what q over-proposes comes twice", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, verify_rejection, ("residual(p[i], q[i])", "p[i].probs.copy()"))


@mutant("residual is p, block", "as before, in the block rule", "rules/block")
def _(patch: Patch) -> None:
    patch.setattr("paceline.verify.block.residual", lambda p, q, scale=1.0: scale * p.probs)


@mutant("residual not clamped", "p - q keeps its negative entries", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, residual, ("np.maximum(owed, 0.0, out=owed)", "owed"))


@mutant("residual is |p - q|", "tokens that q over-proposes may be recovered", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, residual, ("np.maximum(owed, 0.0, out=owed)", "np.abs(owed)"))


@mutant(
    "residual zeroes the rejected token only",
    "right for a one-hot q, wrong for a sampled draft",
    "rules/rejection",
    "SafeAILab/EAGLE#20",
    "SafeAILab/EAGLE#50",
)
def _(patch: Patch) -> None:
    edit(patch, verify_rejection, ("residual(p[i], q[i])", "without(p[i], x[i])"), without=without)


def without(p: Distribution, token: int) -> FloatArray:
    tokens = np.arange(p.vocab_size) if p.ids is None else p.ids
    return np.where(tokens == token, 0.0, p.probs)


@mutant("block residual without its scale b", "(p - q)+ where (b p - q)+ is owed", "rules/block")
def _(patch: Patch) -> None:
    patch.setattr("paceline.verify.block.residual", lambda p, q, scale=1.0: residual(p, q))


@mutant(
    "recovered from the next row", "the rejection is noticed one row late", "rules/rejection", "openvino.genai#4190"
)
def _(patch: Patch) -> None:
    edit(
        patch,
        verify_rejection,
        ("recovered(x[:i], p[i], residual(p[i], q[i])", "recovered(x[:i], p[i + 1], p[i + 1].probs"),
    )


@mutant("taught residual is p", "the textbook step without (p - q)+", "taught")
def _(patch: Patch) -> None:
    edit(patch, rejection_rule, ("(owed / mass if mass > 0.0 else p)", "p"))


# --- accepting ----------------------------------------------------------------------------------------


@mutant("u <= probability", "u = 0 keeps a draft with p = 0", "coins", "sglang#35771", "sglang PR #35788")
def _(patch: Patch) -> None:
    edit(patch, KeyedDraws.accept, ("_key1) < probability", "_key1) <= probability"))


@mutant("taught u <= probability", "the same in the textbook step", "taught", "sglang#35771")
def _(patch: Patch) -> None:
    edit(patch, speculative_step_verification, ("not uniforms.random() < accept", "uniforms.random() > accept"))


@mutant(
    "taught draw on the wrong side",
    "a uniform at an edge of the CDF takes the token below it",
    "taught",
    "sglang#35771",
)
def _(patch: Patch) -> None:
    edit(patch, _draw, ('side="right"', 'side="left"'))


@mutant(
    "always accept", "every sampled draft is kept", "rules/rejection", "openvino.genai PR #2331", "vllm-ascend#13766"
)
def _(patch: Patch) -> None:
    edit(patch, verify_rejection, ("keep = min(1.0, ratio(p[i], q[i], x[i], i))", "keep = 1.0"))


@mutant("always accept, point", "lookup drafts count as certain", "rules/point", "openvino.genai PR #2331")
def _(patch: Patch) -> None:
    edit(patch, verify_point, ("t = p[i]", "t = x[i] if i < len(x) else p[i]"))


@mutant("q / p instead of p / q", "the letters are swapped", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, ratio, ("p.prob(token) / q.prob(token)", "q.prob(token) / max(p.prob(token), 1e-300)"))


@mutant("epsilon in the denominator", "p / (q + eps) rejects a little too often", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, ratio, ("/ q.prob(token)", "/ (q.prob(token) + 1e-8)"))


@mutant("ratio in float32", "drawn in one dtype, judged in another", "rules/rejection", "deepseek-ai/DeepSpec#31")
def _(patch: Patch) -> None:
    edit(patch, ratio, ("/ q.prob(token)", "/ float(single(q.prob(token)))"), single=np.float32)


@mutant(
    "p of the next row judges the draft",
    "the logits slice starts one row late",
    "rules/rejection",
    "TensorRT-LLM PR #15098",
)
def _(patch: Patch) -> None:
    edit(patch, verify_rejection, ("ratio(p[i], q[i]", "ratio(p[i + 1], q[i]"))


@mutant("q of the first row for all drafts", "one q row is kept for the whole chain", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, draft_rows, ("proposal.q[i], f", "proposal.q[0], f"))


@mutant("drafts behind the first rejection survive", "the rest of the chain is not dropped", "rules/rejection")
def _(patch: Patch) -> None:
    def keep_tail(verdict: Verdict, x: tuple[int, ...], i: int) -> Verdict:
        tokens = (*verdict.tokens, *x[i + 1 :])
        return Verdict(tokens, len(tokens) - 1, tuple(range(len(tokens) - 1)), "recovered")

    edit(
        patch,
        verify_rejection,
        ("return recovered(x[:i], p[i], residual(p[i], q[i]), draws, position)",
         "return keep_tail(recovered(x[:i], p[i], residual(p[i], q[i]), draws, position), x, i)"),
        keep_tail=keep_tail,
    )  # fmt: skip


@mutant("a second draw after a mismatch", "a draft with p = 0.5 is kept 75 % of the time", "rules/point", "Medusa#56")
def _(patch: Patch) -> None:
    again = "t = draws.pick(p[i].probs, position + i, Role.RECOVER, ids=p[i].ids, node=i)"
    edit(
        patch,
        verify_point,
        ("if i == len(x) or t", f"if i < len(x) and t != x[i]:\n            {again}\n        if i == len(x) or t"),
    )


# --- the bonus ----------------------------------------------------------------------------------------


@mutant("bonus from the row before", "row K - 1 instead of K", "rules/rejection", "TensorRT-LLM PR #15098")
def _(patch: Patch) -> None:
    edit(patch, verify_rejection, ("p[len(x)]", "p[max(len(x) - 1, 0)]"))


@mutant("bonus from row 0, block", "the row after the last committed token", "rules/block")
def _(patch: Patch) -> None:
    edit(patch, verify_block, ("bonus(x, p[K]", "bonus(x, p[0]"))


@mutant("no bonus", "exact, but a fully kept chain emits one token less than it could", "rules/rejection")
def _(patch: Patch) -> None:
    edit(patch, bonus, ("Verdict((*accepted, token), n", "Verdict(accepted or (token,), n"))


@mutant(
    "no token at a mismatch", "a step whose drafts end early emits one less than it could", "rules/block", "vllm#8320"
)
def _(patch: Patch) -> None:
    edit(patch, recovered, ("Verdict((*accepted, token), n", "Verdict(accepted or (token,), n"))


@mutant(
    "no fallback for an empty residual", "p = q and a coin at the very top: nothing is left to draw from", "rounding"
)
def _(patch: Patch) -> None:
    edit(patch, recovered, ("if weights.sum() == 0.0:", "if False:"))


# --- block --------------------------------------------------------------------------------------------


@mutant("h in the wrong bracket", "(r + 1) - b loses the low digits of r, so certain prefixes are dropped", "rounding")
def _(patch: Patch) -> None:
    edit(patch, keep_prefix, ("1.0 if b == 1.0 else float(r / (r + (1.0 - b)))", "float(r / max(r + 1.0 - b, 1e-300))"))


@mutant("h = b for inner prefixes", "the surplus of later rows is forgotten", "rules/block")
def _(patch: Patch) -> None:
    edit(patch, keep_prefix, ("float(r / (r + (1.0 - b)))", "b"))


@mutant("b without min(1, .)", "a lucky draft pays for later ones without limit", "rules/block")
def _(patch: Patch) -> None:
    edit(patch, verify_block, ("min(1.0, b[i] * ratio(p[i], q[i], x[i], i))", "b[i] * ratio(p[i], q[i], x[i], i)"))


@mutant("h_K = 1", "the whole chain is always kept", "rules/block")
def _(patch: Patch) -> None:
    edit(patch, verify_block, ("draws.accept(b[K],", "draws.accept(1.0,"))


@mutant("one coin for all prefixes", "eta_K decides every h_i", "rules/block")
def _(patch: Patch) -> None:
    edit(patch, verify_block, ("position + tau - 1, node=tau - 1", "position + K - 1, node=K - 1"))


# --- shared noise -------------------------------------------------------------------------------------


@mutant(
    "accept and recovery share a uniform",
    "given a rejection that uniform lies in (h, 1), and so does the recovered token's",
    "drawn/rejection",
    "vllm-ascend#16370",
    "flashinfer PR #424",
    "flashinfer PR #425",
)
def _(patch: Patch) -> None:
    race = KeyedDraws.pick

    def pick(
        self: KeyedDraws, weights: FloatArray, position: int, role: Role, *, ids: Any = None, node: int = 0
    ) -> int:
        if role != Role.RECOVER:
            return race(self, weights, position, role, ids=ids, node=node)
        u = noise(self.seed, position, Role.ACCEPT, self.step_start, node)
        i = int(np.searchsorted(np.cumsum(weights), u * float(np.sum(weights)), side="right"))
        return i if ids is None else int(ids[i])

    patch.setattr(KeyedDraws, "pick", pick)


@mutant(
    "draft and recovery share a Gumbel vector",
    "a rejected draft's noise is known to be large, and is used again",
    "drawn/rejection",
    "vllm#54282",
    "vllm#47386",
)
def _(patch: Patch) -> None:
    race = KeyedDraws.pick

    def pick(self: KeyedDraws, weights: FloatArray, position: int, role: Role, **where: Any) -> int:
        return race(self, weights, position, Role.DRAFT if role == Role.RECOVER else role, **where)

    patch.setattr(KeyedDraws, "pick", pick)


@mutant("draft and recovery share a key", "the same, seen by the enumerator", "rules/rejection", "vllm#54282")
def _(patch: Patch) -> None:
    edit(patch, recovered, ("Role.RECOVER", "Role.DRAFT"))


@mutant("keys without the role", "all draws at a position share their noise", "drawn/rejection", "flashinfer PR #424")
def _(patch: Patch) -> None:
    edit(patch, counter_words, ("role + 256 * int(node)", "256 * int(node)"))


@mutant("keys by position alone", "the next step meets noise that this one has selected", "drawn/block")
def _(patch: Patch) -> None:
    edit(patch, counter_words, ("int(position), step_start, role + 256 * int(node)", "int(position), 0, int(role)"))


@mutant("keys without the step start", "in a chain position - node says it too, in a tree nothing does", "keys")
def _(patch: Patch) -> None:
    edit(patch, counter_words, ("int(position), step_start,", "int(position), 0,"))


@mutant("keys without the node", "siblings of a tree share their noise", "keys")
def _(patch: Patch) -> None:
    edit(patch, counter_words, ("role + 256 * int(node)", "int(role)"))


@mutant("keys with half a seed", "seeds that differ in their upper half are one", "keys")
def _(patch: Patch) -> None:
    edit(patch, KeyedDraws.__init__, ("self.seed >> 32", "0"))


@mutant("target noise with the step start", "a seed's text depends on how the steps fell", "path")
def _(patch: Patch) -> None:
    edit(patch, counter_words, ("int(position), 0, int(role)", "int(position), step_start, int(role)"))


@mutant("noise by array index", "a filtered row races with other tokens' noise", "path")
def _(patch: Patch) -> None:
    edit(patch, KeyedDraws.pick, ("_race(w, names, c1", "_race(w, NO_IDS, c1"))


@mutant(
    "noise consumed by order",
    "one generator per request: drafts, skipped drafts and trimmed steps shift all that follows",
    "path",
    "vllm-ascend#13608",
    "vllm#6038",
    "sglang PR #30822",
)
def _(patch: Patch) -> None:
    generators: dict[int, np.random.Generator] = {}

    def pick(
        self: KeyedDraws, weights: FloatArray, position: int, role: Role, *, ids: Any = None, node: int = 0
    ) -> int:
        random = generators.setdefault(self.seed, np.random.default_rng(self.seed))
        i = int(random.choice(len(weights), p=weights / np.sum(weights)))
        return i if ids is None else int(ids[i])

    patch.setattr(KeyedDraws, "pick", pick)


@mutant("one noise for the whole batch", "a seed is broadcast, so requests are correlated", "law/joint", "vllm#50440")
def _(patch: Patch) -> None:
    edit(patch, Engine.step, ("self.make_draws(sequence.request.seed,", "self.make_draws(1,"))


@mutant("one step start for all steps", "the engine keys every step like the first", "draws")
def _(patch: Patch) -> None:
    edit(patch, Engine.step, ("seed, len(sequence.tokens)", "seed, len(sequence.request.prompt_ids)"))


@mutant(
    "coupled drafts judged by ratio and residual",
    "the residual is drawn with the noise that drew the draft",
    "law/coupled",
)
def _(patch: Patch) -> None:
    def rule(rows: Any, proposal: Proposal, draws: Any, position: int) -> Verdict:
        return (verify_rejection if len(proposal) else verify_point)(rows, proposal, draws, position)

    edit(patch, recovered, ("Role.RECOVER", "Role.TARGET"))
    patch.setattr("paceline.engine.verify_point", rule)
