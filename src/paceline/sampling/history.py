"""One sample's road from logits to p: its options, and everything before the row that they look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..errors import BadLogits, NoLegalToken
from ..params import SamplingParams
from ..types import Distribution
from .constrain import Grammar
from .counts import TokenCounts
from .fast import distribution
from .masks import Masks
from .rows import as_row, refuse_row

__all__ = ["History"]

CONSTRAINTS = ("allowed_token_ids", "bad_words", "min_tokens", "grammar")


class History:
    """Penalty counts, masks and grammar of one sample; `commit` moves them together, token by token.

    tokens: prompt + output, all committed; the live list of whoever commits. prompt_length: how many of them are
    prompt. end_ids: ids that end this sample. bad_words: runs of token ids (`masks.bad_word_sequences`). grammar: this
    sample's own, or None.

    A row that stands behind drafts of a step is asked for with those drafts; counts, masks and grammar then look as if
    they had been committed, and the order in which rows are asked for does not matter.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_length: int,
        vocab_size: int,
        *,
        end_ids: frozenset[int] = frozenset(),
        bad_words: Sequence[tuple[int, ...]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._params, self._tokens, self._prompt_length = params, tokens, prompt_length
        self._end_ids, self._grammar = end_ids, grammar
        self._masks = Masks.of(params, vocab_size, end_ids, bad_words)
        self._counts: TokenCounts | None = None
        if params.has_penalties:
            self._counts = TokenCounts(tokens[:prompt_length])
            self._counts.add(tokens[prompt_length:])

    def distribution(self, logits: ArrayLike, drafts: Sequence[int] = (), *, borrow: bool = False) -> Distribution:
        """Float[V] -> the distribution behind the committed tokens and `drafts`.

        Raises NoLegalToken where the constraints leave none of the tokens that the row itself allows, else as
        `sampling.distribution`, which says what borrow is. logits is never written to.
        """
        row = as_row(logits)
        constrained = row
        if self._masks is not None:
            constrained = self._masks.apply(constrained, self._tokens, self._prompt_length, drafts)
        legal = self._grammar.legal(drafts) if self._grammar is not None else None
        if legal is not None:
            constrained = np.where(legal, constrained, -np.inf).astype(row.dtype, copy=False)
        if constrained is not row and not np.isfinite(row.max()):
            refuse_row(row)  # a mask must not hide what is wrong with the model
        counts = self._counts.with_drafts(drafts) if self._counts is not None else None
        try:
            return distribution(constrained, self._params, counts, borrow=borrow or constrained is not row)
        except BadLogits:
            if constrained is row or constrained.max() > -np.inf:
                raise
            names = [name for name in CONSTRAINTS if getattr(self._params, name)]
            verb, which = ("leaves", "it") if len(names) == 1 else ("together leave", "one")
            raise NoLegalToken(f"{', '.join(names)} {verb} no token that may follow; loosen {which}") from None

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens, each the only one that the grammar leaves; () where it leaves a choice."""
        return self._grammar.forced(limit) if self._grammar is not None else ()

    def is_over(self, drafts: Sequence[int] = ()) -> bool:
        """Whether `drafts` end the sample: by an end id, or by completing the grammar. () asks for what is committed.

        A grammar that is complete before min_tokens does not end it; the next row then has no legal token.
        """
        if drafts and drafts[-1] in self._end_ids:
            return True
        length = len(self._tokens) - self._prompt_length + len(drafts)
        return self._grammar is not None and length >= self._params.min_tokens and self._grammar.is_over(drafts)

    def num_useful(self, drafts: Sequence[int], *, sampled: bool = True) -> int:
        """How many of the drafts, from the first, are worth a row: legal ones, up to one that ends the sample.

        sampled: whether q will judge them. Then the first illegal one stays, to be rejected by its own row: a sampled
        draft may be left out for what stands before it, never for what it is.
        """
        end = next((i + 1 for i, token in enumerate(drafts) if token in self._end_ids), len(drafts))
        if self._grammar is None:
            return end
        legal = self._grammar.num_legal(drafts[:end])
        return min(end, legal if not sampled or self._grammar.is_over(drafts[:legal]) else legal + 1)

    def commit(self, token: int) -> None:
        """`token` was appended to tokens."""
        if self._counts is not None:
            self._counts.add((token,))
        if self._grammar is not None and token not in self._end_ids:
            self._grammar.commit(token)
