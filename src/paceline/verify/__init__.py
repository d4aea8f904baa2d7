"""Verification rules: (rows of p, a proposal, draws) -> Verdict. No model, no cache, no config.

Read in this order; each rule is one short file beside its proof's terms:

taught.py       `rejection_rule`, `speculative_step_verification`: one step as textbooks teach it
rejection.py    `verify_rejection`: token by token, for sampled chains
block.py        `verify_block`: the whole chain at once; same distribution, never fewer tokens
point.py        `verify_point`: for drafts without a q, and the coupled rule
last_token.py   the token after the accepted drafts: `residual`, recovered, bonus; `acceptance`
inputs.py       what may come in, and the errors for what may not

Which draw decides what (no two share a random key, and none is consumed by order):

==============================  =====================================================
draft i (node i) is kept        accept(..., position + i, node=i)
recovered after n drafts        pick(residual, position + n, RECOVER, node=n)
bonus, plain, point, coupled    pick(p, position + i, TARGET), node 0
==============================  =====================================================
"""

from .block import verify_block
from .last_token import acceptance, residual
from .point import verify_point
from .rejection import verify_rejection
from .taught import rejection_rule, speculative_step_verification

__all__ = [
    "acceptance",
    "rejection_rule",
    "residual",
    "speculative_step_verification",
    "verify_block",
    "verify_point",
    "verify_rejection",
]
