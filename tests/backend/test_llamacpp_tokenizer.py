"""Text to tokens and back on byte-level and SentencePiece vocabularies, against llama.cpp's own detokeniser."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backend.llamacpp import LlamaCppBackend
from paceline.errors import InvalidInput, InvalidPrompt, UnsupportedOption

from . import gguf_files

Open = Callable[..., LlamaCppBackend]
TEXTS = [
    "",
    "hello",
    "hello hello  \n\thello",
    "na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f600",
    "nul \x00 inside",
    "a" * 5000,
    " leading and trailing ",
    "<|im_start|>user",
]


def detokenized(backend: LlamaCppBackend, ids: list[int]) -> bytes:
    """llama.cpp's own text of a whole sequence, control tokens left out."""
    native, size = backend._native, 64 * len(ids) + 64
    buffer = ctypes.create_string_buffer(size)
    array = (ctypes.c_int32 * len(ids))(*ids)
    count = native.llama_detokenize(backend._model.vocab, array, len(ids), buffer, size, False, False)
    assert count >= 0
    return buffer.raw[:count]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(tiny: Open, text: str) -> None:
    backend = tiny()
    ids = backend.tokenizer.encode(text)
    assert all(0 <= t < backend.tokenizer.vocab_size for t in ids)
    joined = b"".join(map(backend.tokenizer.token_bytes, ids))
    assert joined == text.encode()
    assert joined == detokenized(backend, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_round_trip_but_for_the_leading_space(tiny: Open, text: str) -> None:
    """The first word is marked with a space that the text does not have; a whole-text detokeniser drops it."""
    backend = tiny("spm")
    ids = backend.tokenizer.encode(text)
    assert ids[0] == backend.tokenizer.bos == 1
    joined = b"".join(map(backend.tokenizer.token_bytes, ids))
    assert joined == (b" " + text.encode() if text else b"")
    assert detokenized(backend, ids[1:]) == text.encode()


@pytest.mark.parametrize("name", ["llama", "spm"])
def test_pieces_of_any_tokens_join_to_llama_cpps_text(tiny: Open, name: str) -> None:
    backend = tiny(name)
    rng = np.random.default_rng(1)
    for _ in range(50):
        ids = [int(t) for t in rng.integers(3, backend.tokenizer.vocab_size, 12)]
        joined = b"".join(map(backend.tokenizer.token_bytes, ids))
        assert detokenized(backend, ids) in (joined, joined.removeprefix(b" "))


def test_control_tokens_add_no_text_but_have_a_name(tiny: Open) -> None:
    """sgl-project/sglang#24051, ggml-org/llama.cpp#3812: vocabularies are told apart by every token's spelling."""
    tokenizer = tiny().tokenizer
    assert [tokenizer.token_bytes(t) for t in range(3)] == [b"", b"", b""]
    assert [tokenizer.token_text(t) for t in range(3)] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert tokenizer.token_bytes(260) == tokenizer.token_text(260) == b"hel"
    spm = tiny("spm").tokenizer
    assert (spm.token_bytes(0), spm.token_text(0)) == (b"", b"<unk>")
    assert spm.token_bytes(3 + 0xE9) == b"\xe9"  # a byte token: part of a character


def test_special_text_is_a_token_only_when_asked_for(tiny: Open) -> None:
    tokenizer = tiny().tokenizer
    assert tokenizer.encode("<|im_start|>", parse_special=True) == [1]
    plain = tokenizer.encode("<|im_start|>")
    assert 1 not in plain
    assert b"".join(map(tokenizer.token_bytes, plain)) == b"<|im_start|>"


def test_begin_of_sequence_comes_once(tiny: Open) -> None:
    """huggingface/transformers#46936: BOS re-added. A chat template that wrote it must not get a second one."""
    tokenizer = tiny("spm").tokenizer
    assert tokenizer.encode("hello")[0] == 1
    assert 1 not in tokenizer.encode("hello", add_special=False)
    ids = tokenizer.encode("<s> hello", parse_special=True)
    assert (ids[0], ids.count(1)) == (1, 1)
    assert tokenizer.encode("<s>hello").count(1) == 1  # not parsed: the five characters, and the real one in front


def test_a_file_that_wants_special_tokens_it_does_not_name(tmp_path: Path, tiny: Open) -> None:
    """llama.cpp would abort; and an end-of-sequence behind a prompt would end it before it began."""
    pytest.importorskip("llama_cpp")
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    vocabulary = gguf_files.bpe_vocabulary(**changes)
    path = gguf_files.write(tmp_path / "eos.gguf", *gguf_files.llama(vocabulary=vocabulary))
    backend = LlamaCppBackend(path, max_seqs=1, n_threads=1)
    assert backend.tokenizer.encode("h") == [1, 3 + ord("h")]
    backend.close()
    for name in ("bos", "eos"):
        vocabulary[f"tokenizer.ggml.{name}_token_id"] = 2**32 - 1
    path = gguf_files.write(tmp_path / "none.gguf", *gguf_files.llama(vocabulary=vocabulary))
    backend = LlamaCppBackend(path, max_seqs=1, n_threads=1)
    assert backend.tokenizer.encode("hello", parse_special=True)
    backend.close()


def test_text_that_is_no_text(tiny: Open) -> None:
    tokenizer = tiny().tokenizer
    with pytest.raises(InvalidPrompt, match=r"a lone surrogate \(U\+D800\) at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(InvalidPrompt, match="the text has 4194305 bytes; at most 4194304"):
        tokenizer.encode("a" * (2**22 + 1))


def test_threads_do_not_read_each_others_pieces(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is cached, so one that another thread overwrote would stay wrong."""
    tokenizer = tiny().tokenizer
    expected = [tokenizer._piece(token, special=False) for token in range(tokenizer.vocab_size)]

    class Slow:
        """llama.cpp with a pause behind each piece, in which other threads write theirs."""

        native = tokenizer._native

        def llama_token_to_piece(self, *arguments: Any) -> int:
            size = int(self.native.llama_token_to_piece(*arguments))
            time.sleep(1e-4)
            return size

    monkeypatch.setattr(tokenizer, "_native", Slow())
    shares = [range(first, tokenizer.vocab_size, 4) for first in range(4)]
    threads = [threading.Thread(target=lambda ids=ids: [*map(tokenizer.token_bytes, ids)]) for ids in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer._pieces == expected


def test_a_piece_longer_than_most(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    vocabulary = gguf_files.bpe_vocabulary()
    tokens = [*vocabulary["tokenizer.ggml.tokens"][:-1], "h" * 1000]
    metadata = gguf_files.llama(vocabulary={**vocabulary, "tokenizer.ggml.tokens": tokens})
    backend = LlamaCppBackend(gguf_files.write(tmp_path / "long.gguf", *metadata), max_seqs=1, n_threads=1)
    assert backend.tokenizer.token_bytes(len(tokens) - 1) == b"h" * 1000
    backend.close()


def test_ids_outside_the_vocabulary(tiny: Open) -> None:
    tokenizer = tiny().tokenizer
    for bad in (-1, 261, 10**12):
        for ask in (tokenizer.token_bytes, tokenizer.token_text):
            with pytest.raises(InvalidInput, match=f"token id {bad} is outside the vocabulary"):
                ask(bad)


LONG = """
import sys
from paceline.backend.llamacpp import LlamaCppBackend
tokenizer = LlamaCppBackend(sys.argv[1], max_seqs=1, n_threads=1).tokenizer
for text in ("a" * 100_000, "7" * 100_000, " " * 100_000, "\\0" * 100_000, "\\u6f22" * 30_000):
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    print(len(ids))
"""


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", "gpt-2"])
def test_a_long_word_does_not_overflow_the_stack(tmp_path: Path, survives: Callable[..., str], pre: str) -> None:
    """Pre-tokenisers built on std::regex recurse once per character and end the process on an ordinary stack."""
    pytest.importorskip("llama_cpp")
    vocabulary = gguf_files.bpe_vocabulary(**{"tokenizer.ggml.pre": pre})
    path = gguf_files.write(tmp_path / "m.gguf", *gguf_files.llama(vocabulary=vocabulary))
    assert len(survives(LONG, path).split()) == 5


def test_an_interrupted_thread_reports_its_error(tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are tokenised in a thread of their own; what it raises arrives here."""
    tokenizer = tiny().tokenizer

    def fail(*_: object) -> list[int]:
        raise InvalidPrompt("from the thread")

    monkeypatch.setattr(tokenizer, "_tokenize", fail)
    with pytest.raises(InvalidPrompt, match="from the thread"):
        tokenizer.encode("a" * 5000)


def test_the_files_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    metadata, tensors = gguf_files.llama()
    path = gguf_files.write(tmp_path / "chat.gguf", {**metadata, "tokenizer.chat_template": gguf_files.CHATML}, tensors)
    backend = LlamaCppBackend(path, max_seqs=1, n_threads=1)
    text = backend.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = backend.tokenizer.encode(text, parse_special=True)
    assert (ids.count(1), ids.count(2)) == (2, 1)
    with pytest.raises(InvalidInput, match=r"messages = \[\]"):
        backend.tokenizer.apply_chat_template([])
    backend.close()


def test_the_template_sees_the_spelling_of_bos_and_eos(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    metadata, tensors = gguf_files.llama(vocabulary=gguf_files.spm_vocabulary())
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    path = gguf_files.write(tmp_path / "chat.gguf", {**metadata, "tokenizer.chat_template": template}, tensors)
    backend = LlamaCppBackend(path, max_seqs=1, n_threads=1)
    text = backend.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert text == "<s>hello</s>"
    ids = backend.tokenizer.encode(text, parse_special=True)
    assert (ids[0], ids[-1], ids.count(1)) == (1, 2, 1)
    backend.close()


def test_a_model_without_a_chat_template(tiny: Open) -> None:
    with pytest.raises(UnsupportedOption, match=r"llama\.gguf has no chat template; give it a prompt"):
        tiny().tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
