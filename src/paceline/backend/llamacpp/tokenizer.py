"""Text to tokens and back with the vocabulary of a GGUF file."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ...errors import InvalidInput, InvalidPrompt, UnsupportedOption
from ...text.chat import render
from .native import NativeModel

__all__ = ["LlamaCppTokenizer"]

MAX_TEXT_BYTES = 2**22
# Many of llama.cpp's pre-tokenisers run std::regex, which recurses once per character of a match and measured
# under 400 bytes of stack each: 40,000 equal letters overflow an ordinary stack and end the process.
SMALL_TEXT_BYTES = 1024
STACK_PER_BYTE = 640
STACK_BASE = 2**20
_stack_size_lock = threading.Lock()


class LlamaCppTokenizer:
    """Tokenizer of types.py over llama.cpp's own tokeniser.

    vocab_size: V. bos, eos: their token ids, or None where the file names none.
    """

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._native = model.native
        vocab = model.vocab
        self.vocab_size = int(self._native.llama_vocab_n_tokens(vocab))
        self.bos = self._special(self._native.llama_vocab_bos(vocab))
        self.eos = self._special(self._native.llama_vocab_eos(vocab))
        self._adds_bos = self.bos is not None and bool(self._native.llama_vocab_get_add_bos(vocab))
        self._pieces: list[bytes | None] = [None] * self.vocab_size

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special puts begin-of-sequence in front if the file asks for it, once: where the text, as a chat
        template leaves it, already starts with that token (and parse_special reads it), none is added. Nothing is
        ever put behind a text: a prompt goes on.

        Raises InvalidPrompt for text that is not valid Unicode (a lone surrogate) or longer than 4 MiB.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidPrompt(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
            ) from None
        if len(raw) > MAX_TEXT_BYTES:
            raise InvalidPrompt(f"the text has {len(raw)} bytes; at most {MAX_TEXT_BYTES} can be tokenised")
        ids = _on_ample_stack(len(raw), lambda: self._tokenize(raw, parse_special))
        if add_special and self._adds_bos and not (parse_special and ids[:1] == [self.bos]):
            ids.insert(0, cast(int, self.bos))
        return ids

    def _tokenize(self, raw: bytes, parse_special: bool) -> list[int]:
        # A token covers at least one byte, but normalisation may add a few.
        capacity = len(raw) + 16
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            # add_special stays off: llama.cpp aborts where a file asks for a token that it does not name.
            count = self._native.llama_tokenize(
                self._model.vocab, raw, len(raw), buffer, capacity, False, parse_special
            )
            if count >= 0:
                return buffer[:count]
            if -count <= capacity:  # INT32_MIN, llama.cpp's word for "too many to count"
                raise InvalidPrompt(f"the text of {len(raw)} bytes has too many tokens to count")
            capacity = -count

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text; b"" for control tokens. May be part of a character.

        Where the vocabulary marks the start of words (SentencePiece), the first token of a text keeps the
        space in front, which a whole-text detokeniser would drop.
        """
        piece = self._pieces[self._known(token)]
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def token_text(self, token: int) -> bytes:
        """A token's entry in the vocabulary as the file spells it, control tokens included.

        For comparing vocabularies: token_bytes is b"" for every control token, so it cannot tell two apart.
        """
        return bytes(self._native.llama_vocab_get_text(self._model.vocab, self._known(token)) or b"")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation by the file's own template, with the assistant's turn opened.

        Encode it with add_special and parse_special on. Raises UnsupportedOption where the file has no
        template or one that cannot be used, InvalidInput where the template refuses the messages.
        """
        template = self._native.llama_model_chat_template(self._model.model, None)
        if not template:
            raise UnsupportedOption(
                f"{self._model.path.name} has no chat template; give it a prompt instead of messages"
            )
        return render(
            template.decode("utf-8", "replace"), messages, bos=self._spelled(self.bos), eos=self._spelled(self.eos)
        )

    def _spelled(self, token: int | None) -> str:
        return "" if token is None else self._piece(token, special=True).decode("utf-8", "replace")

    def _piece(self, token: int, special: bool) -> bytes:
        # A buffer of its own for every call: threads share the tokenizer, and ctypes lets go of the GIL in between.
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._native.llama_token_to_piece(self._model.vocab, token, buffer, room, 0, special)
            if size >= 0:
                return buffer.raw[:size]
            room = -size

    def _known(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise InvalidInput(f"token id {token} is outside the vocabulary (0 .. {self.vocab_size - 1})")
        return token

    def _special(self, token: int) -> int | None:
        return int(token) if 0 <= token < self.vocab_size else None


def _on_ample_stack(size: int, work: Callable[[], list[int]]) -> list[int]:
    """work(), in a thread whose stack is large enough to tokenise `size` bytes; long stacks cost only what is used."""
    if size <= SMALL_TEXT_BYTES:
        return work()
    outcome: list[list[int]] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="paceline-tokenise", daemon=True)
    page = 4096
    with _stack_size_lock:
        before = threading.stack_size(-(-(STACK_BASE + size * STACK_PER_BYTE) // page) * page)
        try:
            thread.start()
        except RuntimeError as error:
            raise InvalidPrompt(f"no memory for the stack to tokenise {size} bytes: {error}") from error
        finally:
            threading.stack_size(before)
    try:
        thread.join()
    except BaseException:  # an interrupt: the thread still reads the vocabulary, which must not go away under it
        thread.join()
        raise
    if raised:
        raise raised[0]
    return outcome[0]
