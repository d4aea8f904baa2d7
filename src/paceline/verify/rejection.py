"""Rejection, token by token: the rule of the first papers on speculative sampling."""

from __future__ import annotations

from ..types import Draws, Proposal, Verdict
from .inputs import RowSource, chain_rows, draft_rows, ratio
from .last_token import bonus, recovered, residual


def verify_rejection(target_probs: RowSource, proposal: Proposal, draws: Draws, position: int) -> Verdict:
    """Keep draft x_i with probability min(1, p_i(x_i) / q_i(x_i)); stop at the first that is not kept.

    target_probs: float64[K + 1, V], or anything whose [i] is a row or a Distribution; row 0 follows the
    last committed token, row i + 1 follows draft i. A row is asked for when the walk reaches it.
    proposal: a sampled chain of K tokens with its q. position: the committed length.

    At the first rejection the token is drawn from the normalised (p_i - q_i)+ and the rest dropped; when
    all are kept a bonus token is drawn from p_{K+1}. The emitted tokens follow p whatever q is.
    Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1; Chen et al. 2023 (arXiv 2302.01318), Algorithm 2.

    Raises InvalidInput (tree, point proposal, position), InvalidDistribution (rows that are no
    distributions or too few), DrafterError (token >= V, or q = 0 for a token said to be drawn from it).
    """
    p = chain_rows("verify_rejection", target_probs, proposal, position)
    q = draft_rows("verify_rejection", proposal, p.vocab_size)
    x = proposal.tokens
    for i in range(len(x)):
        keep = min(1.0, ratio(p[i], q[i], x[i], i))
        if not draws.accept(keep, position + i, node=i):
            return recovered(x[:i], p[i], residual(p[i], q[i]), draws, position)
    return bonus(x, p[len(x)], draws, position)
