"""Text to tokens and back with a fast tokenizer of transformers, or with the vocabulary of a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput, InvalidPrompt, UnsupportedOption
from ...text.chat import render

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

__all__ = ["HFTokenizer", "NoTokenizer", "folder_tokenizer"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Parts of a decoder that change no bytes of a single token. Strip takes a space from the start of whole texts.
SILENT_DECODERS = frozenset({"ByteFallback", "Fuse", "Strip"})


class HFTokenizer:
    """Tokenizer of types.py over the `tokenizers` library. Threads may share it: nothing in it changes.

    fast: the pipeline; it is used up. vocab_size: V of the model, which may be more than the tokenizer knows.
    begin: what encode() puts in front of a text. stop_ids: end-of-text tokens. template: a chat template or None.
    variables: the texts of bos_token, eos_token and others, for the template.

    Raises UnsupportedOption where the bytes of a token cannot be told from the pipeline.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        name: str,
        vocab_size: int,
        begin: Sequence[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        template: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        fast.no_truncation()
        fast.no_padding()
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self._name, self._begin, self._template = name, list(begin), template
        self._variables = dict(variables or {})
        # Whether control tokens are read is a setting of the whole pipeline: two of them, so that nobody changes it.
        self._reading = fast
        self._plain = FastTokenizer.from_str(fast.to_str())
        self._reading.encode_special_tokens = False
        self._plain.encode_special_tokens = True
        added = fast.get_added_tokens_decoder()
        self._control = frozenset(token for token, entry in added.items() if entry.special)
        self._verbatim = frozenset(added) - self._control
        self._spelling = _Spelling.of(fast)
        self._bytes: list[bytes | None] = [None] * vocab_size

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special puts in front what the tokenizer itself would (begin-of-sequence, mostly), once: where the text, as
        a chat template leaves it, already starts with that (and parse_special reads it), nothing is added.
        Nothing is ever put behind a text: a prompt goes on. Without parse_special the text of a control
        token is text.

        Raises InvalidPrompt for text that is not valid Unicode (a lone surrogate).
        """
        _check_unicode(text)
        fast = self._reading if parse_special else self._plain
        ids: list[int] = fast.encode(text, add_special_tokens=False).ids
        if add_special and not (parse_special and ids[: len(self._begin)] == self._begin):
            return self._begin + ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to a text; b"" for control tokens and for ids that only pad the embeddings.

        May be part of a character. Where the vocabulary marks the start of words (SentencePiece), the first token of a
        text keeps the space in front, which a whole-text detokeniser would drop.
        """
        _check_token(token, self.vocab_size)
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._spelled(token)
        return known

    def _spelled(self, token: int) -> bytes:
        text = self._reading.id_to_token(token)
        if text is None or token in self._control:
            return b""
        return self._spelling.verbatim(text) if token in self._verbatim else self._spelling.bytes_of(text)

    def token_text(self, token: int) -> bytes:
        """A token's entry in the vocabulary, control tokens included; for comparing vocabularies."""
        _check_token(token, self.vocab_size)
        text = self._reading.id_to_token(token)
        return b"<padding %d>" % token if text is None else text.encode()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation by the model's own template, with the assistant's turn opened.

        Encode it with add_special and parse_special on. Raises UnsupportedOption where the model has no
        template or one that cannot be used, InvalidInput where the template refuses the messages.
        """
        if self._template is None:
            raise UnsupportedOption(f"{self._name} has no chat template; give it a prompt instead of messages")
        bos, eos = self._variables.get("bos_token", ""), self._variables.get("eos_token", "")
        return render(self._template, messages, bos=bos, eos=eos, extra=self._variables)


class NoTokenizer:
    """Stands in where a model comes without a usable tokenizer: token ids work, and text is refused.

    Every token's bytes are b"", so outputs hold ids and an empty text. why: the reason, for the refusal.
    """

    stop_ids: frozenset[int] = frozenset()

    def __init__(self, name: str, vocab_size: int, why: str = "it came without a tokenizer") -> None:
        self.vocab_size = vocab_size
        self._refusal = f"{name} takes no text: {why}; give token ids"

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Raises UnsupportedOption."""
        raise UnsupportedOption(self._refusal)

    def token_bytes(self, token: int) -> bytes:
        """Nothing: what a token means is not known."""
        _check_token(token, self.vocab_size)
        return b""

    def token_text(self, token: int) -> bytes:
        """Its number, so that two models without tokenizers are taken to share their vocabulary."""
        _check_token(token, self.vocab_size)
        return b"<%d>" % token

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Raises UnsupportedOption."""
        raise UnsupportedOption(self._refusal)


class _Spelling:
    """From a vocabulary's entries to bytes.

    byte_level: every character stands for one byte, by the table of GPT-2. Otherwise entries are UTF-8
    after `replacements`, and <0xNN> is a byte where `byte_tokens`.
    """

    def __init__(self, byte_level: bool, replacements: Sequence[tuple[str, str]] = (), byte_tokens: bool = False):
        self._byte_of = byte_of_character() if byte_level else None
        self._replacements, self._byte_tokens = replacements, byte_tokens

    @classmethod
    def of(cls, fast: FastTokenizer) -> _Spelling:
        """What a pipeline's decoder does to one token. Raises UnsupportedOption where that is not known here."""
        parts = _parts(fast.decoder)
        kinds = {str(part.get("type")) for part in parts}
        if kinds == {"ByteLevel"}:
            return cls(byte_level=True)
        replacements = []
        for part in parts:
            if part["type"] == "Metaspace":
                replacements.append((str(part["replacement"]), " "))
            elif part["type"] == "Replace" and "String" in part["pattern"]:
                replacements.append((str(part["pattern"]["String"]), str(part["content"])))
        if not replacements or kinds - SILENT_DECODERS - {"Metaspace", "Replace"}:
            raise UnsupportedOption(f"its decoder ({', '.join(sorted(kinds)) or 'none'}) is of a kind not known here")
        return cls(False, replacements, "ByteFallback" in kinds or bool(getattr(fast.model, "byte_fallback", False)))

    def bytes_of(self, text: str) -> bytes:
        """The bytes of an ordinary entry."""
        if self._byte_of is not None:
            spelled = [self._byte_of.get(character) for character in text]
            return text.encode() if None in spelled else bytes(b for b in spelled if b is not None)
        byte = BYTE_TOKEN.fullmatch(text) if self._byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else self.verbatim(text)

    def verbatim(self, text: str) -> bytes:
        """The bytes of an entry that was added to the vocabulary as plain text."""
        for old, new in self._replacements:
            text = text.replace(old, new)
        return text.encode()


def byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            table[chr(0x100 + len(table) - len(printable))] = byte
    return table


def folder_tokenizer(place: str, name: str, vocab_size: int) -> HFTokenizer | NoTokenizer:
    """The tokenizer of a folder or hub id, as transformers makes it from tokenizer.json.

    A NoTokenizer where there is no such file, or one that does not say what bytes its tokens are.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    if cached_file(place, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
        return NoTokenizer(name, vocab_size, "it has no tokenizer.json, the file of a fast tokenizer")
    opened = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    fast = getattr(opened, "backend_tokenizer", None)
    if fast is None:
        return NoTokenizer(name, vocab_size, f"{type(opened).__name__} is no fast tokenizer")
    templates = opened.chat_template
    variables = {key: str(text) for key, text in opened.special_tokens_map.items() if isinstance(text, str)}
    try:
        return HFTokenizer(
            fast,
            name=name,
            vocab_size=vocab_size,
            begin=_begin(fast),
            stop_ids=frozenset(() if opened.eos_token_id is None else (opened.eos_token_id,)),
            template=templates.get("default") if isinstance(templates, dict) else templates,
            variables=variables,
        )
    except UnsupportedOption as error:
        return NoTokenizer(name, vocab_size, str(error))


def _begin(fast: FastTokenizer) -> list[int]:
    """What the pipeline puts in front of a text by itself."""
    bare, whole = (fast.encode("a", add_special_tokens=special).ids for special in (False, True))
    for at in range(len(whole) - len(bare) + 1):
        if bare and whole[at : at + len(bare)] == bare:
            return list(whole[:at])
    return []


def _parts(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's settings, one by one where it is a sequence."""
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    parts: list[dict[str, Any]] = settings.get("decoders", [settings])
    return parts


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
        ) from None


def _check_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidInput(f"token id {token} is outside the vocabulary (0 .. {vocab_size - 1})")
