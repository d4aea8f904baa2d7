"""Logits + params + history -> the distribution of the next token. The only road to one, for every row.

history.py      History: what one sample's rows depend on; `distribution(logits, drafts)` is what the engine calls
processors.py   the user's own transforms, which come first
masks.py        allowed_token_ids, bad_words, min_tokens
constrain.py    grammars
counts.py       what penalties count
fast.py         `distribution`: from a constrained row to p, compiled
softmax.py      p of a row that no filter cuts, which makes what it is asked for
kernels/        what is compiled; warm.py makes it ready before the first request
reference.py    what all of it means, in plain numpy
logprobs.py     the numbers that are reported

The same road serves plain, accepted, recovered and bonus rows of the target, and the drafter's q.
"""

from .constrain import CompiledGrammar, Grammar, GrammarCompiler
from .counts import TokenCounts
from .fast import distribution
from .history import History
from .logprobs import processed_logprobs, raw_logprobs
from .masks import bad_word_sequences
from .processors import cloned, run_processors
from .reference import reference_distribution
from .softmax import Softmax
from .spelling import spelled
from .warm import warm_up

__all__ = [
    "CompiledGrammar",
    "Grammar",
    "GrammarCompiler",
    "History",
    "Softmax",
    "TokenCounts",
    "bad_word_sequences",
    "cloned",
    "distribution",
    "processed_logprobs",
    "raw_logprobs",
    "reference_distribution",
    "run_processors",
    "spelled",
    "warm_up",
]
