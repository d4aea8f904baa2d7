"""A text's own tokens, without what tokenizers put in front of it."""

from __future__ import annotations

from ..errors import PacelineError
from ..types import Tokenizer

__all__ = ["spelled"]


def spelled(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The tokens that write exactly `text`, as the tokenizer would in the middle of a text; None where it cannot.

    Tokenizers that put a space in front of everything (SentencePiece) are asked for the text behind a line break.
    """
    data = text.encode("utf-8", "surrogatepass")
    for before in ("", "\n"):
        try:
            tokens = tokenizer.encode(before + text, add_special=False)
        except PacelineError:
            return None
        rest, at = len(data), len(tokens)
        while rest > 0 and at > 0:
            at -= 1
            rest -= len(tokenizer.token_bytes(tokens[at]))
        if b"".join(map(tokenizer.token_bytes, tokens[at:])) == data:
            return tokens[at:]
    return None
