"""Whether two models speak of the same tokens."""

from __future__ import annotations

from ..errors import VocabularyMismatch
from ..types import Tokenizer

__all__ = ["check_same_vocabulary"]


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise VocabularyMismatch naming the first id whose text differs between target and draft.

    Texts are compared id by id: equal sizes prove nothing, a permuted vocabulary has them too. Where one
    vocabulary is longer, its further ids have no counterpart (padding rows, in practice) and are not
    compared: a drafter gives target ids that it does not know probability 0, and never draws ids that
    the target does not know.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    if shared < 1:
        raise VocabularyMismatch(
            f"the target has {target.vocab_size} tokens and the drafter {draft.vocab_size}; none to share"
        )
    for token in range(shared):
        ours, theirs = target.token_text(token), draft.token_text(token)
        if ours != theirs:
            raise VocabularyMismatch(
                f"token {token} is {ours!r} for the target but {theirs!r} for the drafter; "
                "draft with a model of the same vocabulary, or with drafter='lookup'"
            )
