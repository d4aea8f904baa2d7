"""Text to ids and back: against tokenizers' own decoder, against llama.cpp on the same file, and by hand."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("gguf")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors  # noqa: E402

from paceline.backend.hf.gguf_vocabulary import SPLITS, gguf_tokenizer  # noqa: E402
from paceline.backend.hf.tokenizer import HFTokenizer, NoTokenizer, byte_of_character, folder_tokenizer  # noqa: E402
from paceline.backend.llamacpp.gguf import validate_gguf  # noqa: E402
from paceline.errors import InvalidInput, InvalidPrompt, UnsupportedOption  # noqa: E402
from paceline.types import Tokenizer as Protocol  # noqa: E402

from .. import gguf_files  # noqa: E402

TEXTS = st.text(max_size=40)
CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ unk_token }}"
AWKWARD = [
    "",
    " ",
    "\n\n \t",
    "it's 3.14",
    "naïve café",
    "中文字",
    "🙂👩‍👩‍👧",
    "½²Ⅷ٣",
    "a\u00a0b\u3000c",
    "\r\n",
    "<|im_end|>",
    "x\x00y",
]


def byte_level() -> Any:
    """A byte-level pipeline with a few merges, control tokens 256 and 257, and one added word, 258."""
    letters = sorted(byte_of_character(), key=byte_of_character().__getitem__)
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "<|im_end|>")])
    fast.add_tokens([AddedToken("<té>", normalized=False)])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 256), ("<|im_end|>", 257)]
    )
    return fast


def sentencepiece() -> Any:
    """A pipeline as Llama 2's: bytes as tokens, a space in front, spaces spelled as bars."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "▁")]
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return fast


def opened(fast: Any = None, vocab_size: int = 262, **more: Any) -> HFTokenizer:
    return HFTokenizer(fast or byte_level(), **{"name": "tiny", "vocab_size": vocab_size, "begin": [256], **more})


def spelled(tokenizer: Protocol, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in ids)


def test_the_protocol() -> None:
    assert isinstance(opened(), Protocol)
    assert isinstance(NoTokenizer("tiny", 5), Protocol)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    """Catches any byte that a table, an added word or a space marker would get wrong."""
    assert spelled(BYTE_LEVEL, BYTE_LEVEL.encode(text)) == text.encode()
    assert spelled(SPM, SPM.encode(text)) == (f" {text}".encode() if text else b"")


def test_every_token_decodes_as_tokenizers_does() -> None:
    """One by one, where a single token is whole characters."""
    fast = byte_level()
    for token in range(128):
        assert BYTE_LEVEL.token_bytes(token).decode() == fast.decode([token])
    assert [BYTE_LEVEL.token_bytes(token) for token in range(256)] == [bytes([b]) for b in range(256)]
    assert SPM.token_bytes(3 + 0xE2) == b"\xe2"
    assert SPM.token_bytes(SPM_IDS["▁▁"]) == b"  "


def test_control_tokens_and_padding_have_no_bytes() -> None:
    tokenizer = opened()
    assert [tokenizer.token_bytes(token) for token in (256, 257, 258, 259, 261)] == [
        b"",
        b"",
        "<té>".encode(),
        b"",
        b"",
    ]
    assert tokenizer.token_text(257) == b"<|im_end|>"
    assert len({tokenizer.token_text(token) for token in range(262)}) == 262
    for token in (-1, 262):
        with pytest.raises(InvalidInput, match=f"token id {token} is outside"):
            tokenizer.token_bytes(token)
        with pytest.raises(InvalidInput, match=f"token id {token} is outside"):
            tokenizer.token_text(token)


def test_the_text_of_a_control_token_is_text_unless_asked_otherwise() -> None:
    """Catches a user's text that ends the turn of the model."""
    tokenizer = opened()
    plain = tokenizer.encode("a<|im_end|>", add_special=False)
    assert 257 not in plain
    assert spelled(tokenizer, plain) == b"a<|im_end|>"
    assert tokenizer.encode("a<|im_end|>", add_special=False, parse_special=True)[-1] == 257
    assert 257 not in tokenizer.encode("a<|im_end|>")  # the setting did not stay


def test_threads_do_not_change_what_others_read() -> None:
    """Catches one pipeline whose setting is switched to and fro."""
    tokenizer = opened()
    wrong: list[bool] = []

    def work(parse: bool) -> None:
        for _ in range(300):
            if (257 in tokenizer.encode("a<|im_end|>" * 20, parse_special=parse)) != parse:
                wrong.append(parse)

    threads = [threading.Thread(target=work, args=(parse,)) for parse in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_begin_of_sequence_comes_once_and_nothing_behind() -> None:
    tokenizer = opened()
    assert tokenizer.encode("a") == [256, *tokenizer.encode("a", add_special=False)]
    assert tokenizer.encode("<s>a", parse_special=True) == tokenizer.encode("a")
    assert tokenizer.encode("") == [256]
    assert opened(begin=[]).encode("") == []


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match=r"lone surrogate \(U\+D800\) at character 2"):
        opened().encode("ab\ud800")


def test_what_a_file_says_of_truncation_is_not_done() -> None:
    """Catches a prompt that is cut without a word, or padded."""
    fast = byte_level()
    fast.enable_truncation(3)
    fast.enable_padding(length=50)
    assert spelled(opened(fast), opened(fast).encode("a long text")) == b"a long text"


def test_chat_template() -> None:
    texts = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "?"}
    assert opened(template=TEMPLATE, variables=texts).apply_chat_template(CHAT) == "<s>hi</s>?"
    with pytest.raises(UnsupportedOption, match="tiny has no chat template"):
        opened().apply_chat_template(CHAT)


def test_a_decoder_that_is_not_known_is_refused() -> None:
    fast = byte_level()
    fast.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedOption, match=r"its decoder \(WordPiece\)"):
        opened(fast)


def test_no_tokenizer_refuses_text_and_takes_ids() -> None:
    none = NoTokenizer("tiny", 5, "it lost it")
    for ask in (lambda: none.encode("a"), lambda: none.apply_chat_template(CHAT)):
        with pytest.raises(UnsupportedOption, match="tiny takes no text: it lost it; give token ids"):
            ask()
    assert none.token_bytes(4) == b""
    assert none.token_text(3) != none.token_text(4)
    with pytest.raises(InvalidInput):
        none.token_bytes(5)


BYTE_LEVEL = opened(begin=[])
SPM = opened(sentencepiece(), begin=[], vocab_size=264)
SPM_IDS = sentencepiece().get_vocab()


# --- folders ----------------------------------------------------------------------------------------


def saved(folder: Path, fast: Any, **more: Any) -> Path:
    from transformers import PreTrainedTokenizerFast

    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    PreTrainedTokenizerFast(tokenizer_object=fast, **more).save_pretrained(folder)
    return folder


def test_a_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level(), bos_token="<s>", eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer = folder_tokenizer(str(folder), "tiny", 300)
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.vocab_size == 300
    assert tokenizer.stop_ids == {257}
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.encode("a")[1:] == BYTE_LEVEL.encode("a")  # and no end behind it
    assert tokenizer.apply_chat_template(CHAT) == "<s>hi<|im_end|>"


def test_a_folder_without_a_usable_tokenizer(tmp_path: Path) -> None:
    """Catches the made-up vocabulary that transformers gives where there is none."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = folder_tokenizer(str(tmp_path), "tiny", 300)
    with pytest.raises(UnsupportedOption, match=r"no tokenizer\.json"):
        tokenizer.encode("a")
    fast = byte_level()
    fast.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedOption, match="WordPiece"):
        folder_tokenizer(str(saved(tmp_path, fast)), "tiny", 300).encode("a")


# --- GGUF files -------------------------------------------------------------------------------------


def random_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    pool = "abc XYZ 0123456789 \n\t  éü中文字🙂½²Ⅷ٣'\"!?#<|im_end|>_-.\u00a0\u200b\u3000\r\n"
    return AWKWARD + ["".join(draw.choice(pool) for _ in range(draw.randint(0, 60))) for _ in range(count)]


@pytest.mark.model
def test_smollm2_is_tokenised_as_llamacpp_does(model_path: Callable[[str], Path], spec_bench: list[str]) -> None:
    """Every token's bytes and name, and some thousand texts, control tokens read and not."""
    from paceline.backend.llamacpp import LlamaCppBackend

    path = model_path("smollm2:q4_1")
    backend = LlamaCppBackend(path, max_len=64, max_seqs=1, n_threads=1)
    theirs, ours = backend.tokenizer, gguf_tokenizer(validate_gguf(path), 49152)
    try:
        for token in range(49152):
            assert ours.token_bytes(token) == theirs.token_bytes(token)
            assert ours.token_text(token) == theirs.token_text(token)
        for text in random_texts(1500) + spec_bench[:100]:
            for special in (False, True):
                assert ours.encode(text, parse_special=special) == theirs.encode(text, parse_special=special), text
        assert ours.apply_chat_template(CHAT) == theirs.apply_chat_template(CHAT)
        assert isinstance(ours, HFTokenizer)
        assert {0, 2} <= ours.stop_ids <= backend.info.stop_ids
    finally:
        backend.close()


@pytest.mark.parametrize("pre", SPLITS)
def test_every_way_of_splitting_is_llamacpps(pre: str, tmp_path: Path) -> None:
    """Merges across every kind of border, so that a word cut elsewhere gives other ids."""
    pytest.importorskip("llama_cpp")
    from paceline.backend.llamacpp import LlamaCppBackend

    letters = gguf_files.byte_letters()
    words = [
        "".join(letters[b] for b in text.encode())
        for text in (
            "12",
            "123",
            "1234",
            " 1",
            "ab",
            " a",
            "'s",
            "'S",
            "  ",
            "\n\n",
            " \n",
            "!\n",
            "!!",
            "a1",
            "1a",
            "!a",
            "é",
            "é1",
        )
    ]
    vocabulary = gguf_files.bpe_vocabulary(**{"tokenizer.ggml.pre": pre})
    tokens, merges = list(vocabulary["tokenizer.ggml.tokens"]), []
    for word in words:
        for cut in range(1, len(word)):
            merges.append(f"{word[:cut]} {word[cut:]}")
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
    tokens.append("qzq")  # no merges lead there: taken whole, or not at all
    kinds = list(vocabulary["tokenizer.ggml.token_type"])
    vocabulary |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(dict.fromkeys([*vocabulary["tokenizer.ggml.merges"], *merges])),
        "tokenizer.ggml.token_type": kinds + [gguf_files.NORMAL] * (len(tokens) - len(kinds)),
    }
    path = gguf_files.write(tmp_path / "tiny.gguf", *gguf_files.llama(vocabulary=vocabulary))
    backend = LlamaCppBackend(path, max_len=64, max_seqs=1, n_threads=1)
    ours = gguf_tokenizer(validate_gguf(path), len(tokens))
    assert isinstance(ours, HFTokenizer)
    try:
        texts = ["qzq", "a12345b", "  12", "it's", "IT'S", " \n\n  x", "!!\n\n", "abab 1a1a é1é"]
        for text in texts + random_texts(400, seed=3):
            assert ours.encode(text) == backend.tokenizer.encode(text), text
            assert spelled(ours, ours.encode(text, add_special=False)) == text.encode()
    finally:
        backend.close()


def test_a_vocabulary_that_is_not_known_takes_no_text(tmp_path: Path) -> None:
    """Catches wrong tokens, which would look like a bad model."""
    odd = gguf_files.bpe_vocabulary(**{"tokenizer.ggml.pre": "odd"})
    for vocabulary, name in ((odd, "'odd'"), (gguf_files.spm_vocabulary(), "'llama'")):
        path = gguf_files.write(tmp_path / "tiny.gguf", *gguf_files.llama(vocabulary=vocabulary))
        with pytest.raises(UnsupportedOption, match=f"{name}.*splits text is not known to backend 'hf'"):
            gguf_tokenizer(validate_gguf(path), 300).encode("a")
