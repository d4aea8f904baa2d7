"""Point and coupled: the target draws its own token and goes on while it equals the draft."""

from __future__ import annotations

from ..types import Draws, Proposal, Role, Verdict
from .inputs import RowSource, chain_rows


def verify_point(target_probs: RowSource, proposal: Proposal, draws: Draws, position: int) -> Verdict:
    """Draw t from p_i with the target's own noise, emit it, and go on while it equals draft i.

    target_probs: float64[K + 1, V], or anything whose [i] is a row or a Distribution; row 0 follows the
    last committed token, row i + 1 follows draft i. A row is asked for when the walk reaches it.
    proposal: a chain of K tokens, chosen in any way at all; a q that came with it is not looked at.
    position: the committed length.

    Every emitted token is the plain sampler's token for the same seed, so the text does not depend on the
    drafter. A fixed draft is kept with p_i(x_i), which no rule can better. The same code is the coupled
    rule: a drafter that draws with the same Gumbel noise G from its q agrees with t = argmax(log p + G)
    with probability (1 - TV) / (1 + TV) or more (Daliri et al. 2024, arXiv 2408.07978).

    Raises InvalidInput (tree, position), InvalidDistribution (rows), DrafterError (token >= V).
    """
    p = chain_rows("verify_point", target_probs, proposal, position)
    x = proposal.tokens
    emitted: tuple[int, ...] = ()
    for i in range(len(x) + 1):
        t = p[i].pick(draws, position + i, Role.TARGET)
        emitted = (*emitted, t)
        if i == len(x) or t != x[i]:
            break
    n = len(emitted) - 1
    return Verdict(emitted, n, tuple(range(n)), "bonus" if n == len(x) else "recovered")
