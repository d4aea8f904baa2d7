"""The constraints that are lists of tokens: allowed_token_ids, bad_words and min_tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidParams, InvalidPrompt
from ..params import SamplingParams
from ..types import IntArray, Tokenizer
from .rows import Row
from .spelling import spelled

__all__ = ["Masks", "bad_word_sequences"]

Run = tuple[int, ...]


def bad_word_sequences(words: Iterable[str | Sequence[int]], tokenizer: Tokenizer) -> tuple[Run, ...]:
    """The runs of token ids that `SamplingParams.bad_words` forbid, each once, in order.

    Token ids stand for themselves. A text stands for the tokens it has alone and those it has behind a space; one that
    begins with a space already stands for itself only. Runs, not texts, are forbidden: the same text spelled with
    other tokens may still come.

    Raises InvalidParams for a text that this vocabulary cannot spell, or spells with control tokens only.
    """
    runs: dict[Run, None] = {}
    for i, word in enumerate(words):
        if isinstance(word, str):
            runs.update(dict.fromkeys(_spellings(word, f"bad_words[{i}] = {word!r}", tokenizer)))
        else:
            runs[tuple(word)] = None
    return tuple(runs)


def _spellings(word: str, name: str, tokenizer: Tokenizer) -> list[Run]:
    """The runs whose text is exactly `word`, or `word` behind one space."""
    texts = [word] if word[0].isspace() else [word, f" {word}"]
    exact = [tuple(run) for run in (spelled(tokenizer, text) for text in texts) if run]
    if exact:
        return exact
    fault = "its tokens have no text"
    try:
        plain = tuple(tokenizer.encode(word, add_special=False))
    except InvalidPrompt as error:
        plain, fault = (), str(error)
    if plain and all(map(tokenizer.token_bytes, plain)):
        return [plain]  # a tokenizer that reads another text than was written, say in lower case
    raise InvalidParams(f"{name}; this vocabulary cannot spell it ({fault})")


@dataclass(frozen=True, eq=False, slots=True)
class Masks:
    """Which tokens allowed_token_ids, bad_words and min_tokens forbid, for every row of one request.

    allowed: int64[n] ascending, or None for all. never: int64[n], the bad words of one token. runs: longer bad words,
    by their last token but one. early: int64[n], the ids that end the request, forbidden before min_tokens.
    """

    allowed: IntArray | None
    never: IntArray
    runs: dict[int, list[Run]]
    early: IntArray
    min_tokens: int

    @classmethod
    def of(
        cls, params: SamplingParams, vocab_size: int, end_ids: frozenset[int], bad_words: Sequence[Run]
    ) -> Masks | None:
        """The masks of a request, or None where it has none.

        end_ids: ids that end this request. bad_words: what `bad_word_sequences` made of params.bad_words.
        Raises InvalidParams naming a token that is not one of the vocabulary's 0 .. vocab_size - 1.
        """
        allowed = None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, np.int64))
        early = _ids(end_ids if params.min_tokens else ())
        if allowed is None and not bad_words and not early.size:
            return None
        _check("allowed_token_ids", () if allowed is None else allowed.tolist(), vocab_size)
        _check("bad_words", (token for run in bad_words for token in run), vocab_size)
        _check("stop_token_ids", early.tolist(), vocab_size)
        runs: dict[int, list[Run]] = {}
        for run in bad_words:
            if len(run) > 1:
                runs.setdefault(run[-2], []).append(run)
        never = _ids(run[0] for run in bad_words if len(run) == 1)
        return cls(allowed, never, runs, early, params.min_tokens)

    def apply(self, row: Row, tokens: Sequence[int], prompt_length: int, drafts: Sequence[int]) -> Row:
        """`row` with -inf at every forbidden token: a new array of its dtype, or `row` itself where none is.

        row: float32[V] or float64[V], never written to. tokens: prompt and output, prompt_length of them prompt;
        drafts: what comes between them and this row. A bad word counts in output and drafts, not in the prompt.
        The cost does not grow with the history.
        """
        early = len(tokens) - prompt_length + len(drafts) < self.min_tokens
        forbidden = self._completed(tokens, prompt_length, drafts)
        if self.allowed is not None:
            masked = np.full_like(row, -math.inf)
            masked[self.allowed] = row[self.allowed]
        elif forbidden or self.never.size or (early and self.early.size):
            masked = row.copy()
        else:
            return row
        masked[self.never] = -math.inf
        masked[forbidden] = -math.inf
        if early:
            masked[self.early] = -math.inf
        return masked

    def _completed(self, tokens: Sequence[int], prompt_length: int, drafts: Sequence[int]) -> list[int]:
        """The tokens that would complete a bad word of two or more."""
        last = drafts[-1] if drafts else tokens[-1] if len(tokens) > prompt_length else None
        runs = self.runs.get(last, ()) if last is not None else ()
        if not runs:
            return []
        need = max(map(len, runs)) - 1
        output = tokens[max(prompt_length, len(tokens) - need) :]
        tail = (*output, *drafts)
        return [run[-1] for run in runs if tail[-len(run) + 1 :] == run[:-1]]


def _ids(tokens: Iterable[int]) -> IntArray:
    return np.array(sorted(tokens), dtype=np.int64)


def _check(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidParams(f"{name} names token {token}; allowed: 0 to {vocab_size - 1}")
