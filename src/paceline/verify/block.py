"""Block verification: the whole chain is judged together. Same distribution, never fewer tokens."""

from __future__ import annotations

from ..types import Draws, Proposal, Verdict
from .inputs import RowSource, chain_rows, draft_rows, ratio
from .last_token import bonus, recovered, residual


def verify_block(target_probs: RowSource, proposal: Proposal, draws: Draws, position: int) -> Verdict:
    """Keep the longest prefix of the chain that its own coin allows; coins are tossed from the end.

    target_probs: float64[K + 1, V], or anything whose [i] is a row or a Distribution; row 0 follows the
    last committed token, row i + 1 follows draft i. Rows behind an impossible draft are not asked for.
    proposal: a sampled chain of K tokens with its q. position: the committed length.

    With b_0 = 1 and b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i)), the prefix of length i is kept with
    probability h_i, independently of the others, and tau is the longest that is:

        h_K = b_K,   h_i = r_i / (r_i + (1 - b_i)),   r_i = sum_v (b_i p_{i+1}(v) - q_{i+1}(v))+

    Then one token from p_{K+1} when tau = K, else from the normalised (b_tau p_{tau+1} - q_{tau+1})+.
    P(tau >= i | x_1..i) = b_i, while token-by-token rejection has the product of the min(1, p/q): a draft
    that p likes more than q does lends its surplus to the next one. No rule for a chain keeps more.
    Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2.

    Raises as verify_rejection does.
    """
    p = chain_rows("verify_block", target_probs, proposal, position)
    q = draft_rows("verify_block", proposal, p.vocab_size)
    x = proposal.tokens
    K = len(x)

    b = [1.0]
    while len(b) <= K and b[-1] > 0.0:  # behind an impossible draft every b, and so every h, is 0
        i = len(b) - 1
        b.append(min(1.0, b[i] * ratio(p[i], q[i], x[i], i)))

    if K == 0 or (len(b) > K and draws.accept(b[K], position + K - 1, node=K - 1)):
        return bonus(x, p[K], draws, position)
    # The sums over whole rows are the dear part: they are taken from the end, up to the first success.
    tau = len(b) - 2
    weights = residual(p[tau], q[tau], b[tau])
    while tau > 0 and not draws.accept(keep_prefix(b[tau], weights.sum()), position + tau - 1, node=tau - 1):
        tau -= 1
        weights = residual(p[tau], q[tau], b[tau])
    return recovered(x[:tau], p[tau], weights, draws, position)


def keep_prefix(b: float, r: float) -> float:
    """h = r / (r + (1 - b)), with 0/0 = 1.

    b = 1 gives exactly 1 whatever r is. Without the inner brackets, (r + 1) - b loses the low digits of r
    and h falls below 1: a draft with p = q would then be thrown away now and then.
    """
    return 1.0 if b == 1.0 else float(r / (r + (1.0 - b)))
