"""How a certain text is written in tokens: exactly, as the tokenizer would, the same with both backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.sampling.constrain import GrammarCompiler

from .regexes import Pieces, counted

BYTES = [bytes([b]) for b in range(256)]


@pytest.mark.parametrize("space", [False, True])
def test_forced_tokens_write_exactly_the_forced_text(space: bool) -> None:
    """A tokenizer that puts a space in front must not put one into the text; one without a token must not raise."""
    pieces = [*BYTES, b" name", b"name", b'":', b' "', b"na", "é".encode(), b""]
    tokenizer = Pieces(pieces, space=space)
    compiler = GrammarCompiler(tokenizer, frozenset({len(pieces) - 1}))
    grammar = compiler.compile({"regex": 'name": (?:é|ê)é'}).start(frozenset())
    forced = grammar.forced(50)
    assert forced[0] == pieces.index(b"name")
    assert b"".join(pieces[t] for t in forced) == b'name": '
    assert grammar.num_legal([*forced, 0xC3, 0xA9]) == len(forced) + 2
    assert grammar.forced(2) == forced[:2]
    assert grammar.forced(0) == ()
    assert tokenizer.asked != []


def test_a_long_forced_text_is_not_tokenised_whole_for_each_step() -> None:
    tokenizer = Pieces([*BYTES, b"abab", b""])
    grammar = GrammarCompiler(tokenizer, frozenset({257})).compile({"regex": "(?:ab){5000}"}).start(frozenset({257}))
    spy = counted(grammar)
    assert grammar.forced(3) == (256, 256, 256)
    assert max(map(len, tokenizer.asked)) < 100
    assert spy.copies == 1, "what is certain was asked for again"


def test_a_tokenizer_with_a_space_in_front_still_writes_in_its_own_way() -> None:
    """Behind a line break it does; always taking the longest piece would be another way."""

    class Letters(Pieces):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            ids = list(b" " + text.encode())
            return [258, *ids[2:]] if text.startswith("n") else ids

    compiler = GrammarCompiler(Letters([*BYTES, b"na", b"name", b" n"]), frozenset())
    assert bytes(compiler.compile({"regex": "name(?:a|b)"}).start(frozenset()).forced(9)) == b"name"


def test_no_way_of_writing_is_a_dead_end_where_another_is_none() -> None:
    """The longest piece, ab, leaves a c that no token begins with."""
    grammar = GrammarCompiler(Pieces([b"ab", b"a", b"bc", b"d"]), frozenset()).compile({"regex": "abcd"})
    assert grammar.start(frozenset()).num_legal([1, 2, 3]) == 3


def test_a_vocabulary_that_cannot_write_it() -> None:
    """No token begins what must follow: nothing is legal, which is an answer; other drafts are not harmed by it."""
    compiler = GrammarCompiler(Pieces([b"a", b"b", b""]), frozenset({2}))
    grammar = compiler.compile({"regex": "b*a(?:c|ccc)|bba?"}).start(frozenset({2}))
    for _ in range(2):
        assert grammar.legal((0,)).tolist() == [False] * 3  # type: ignore[union-attr]
        assert grammar.legal((1, 1)).tolist() == [True, True, True]  # type: ignore[union-attr]
        assert not grammar.is_over((0,))
    grammar.commit(1)
    grammar.commit(0)
    assert not grammar.legal().any()  # type: ignore[union-attr]
    assert grammar.forced(4) == ()


@pytest.mark.model
def test_both_backends_tokenizers_give_the_same_grammar(model_path: Callable[[str], Path]) -> None:
    """SmolLM2's vocabulary as llama.cpp and as Hugging Face's pipeline have it: equal masks, equal forced tokens."""
    pytest.importorskip("tokenizers")
    from paceline.backend.hf.gguf_vocabulary import gguf_tokenizer
    from paceline.backend.llamacpp import LlamaCppBackend
    from paceline.backend.llamacpp.gguf import validate_gguf

    path = model_path("smollm2:q4_1")
    backend = LlamaCppBackend(path, max_len=64, max_seqs=1, n_threads=1)
    try:
        stops, V = backend.info.stop_ids, backend.info.vocab_size
        tokenizers = (backend.tokenizer, gguf_tokenizer(validate_gguf(path), V))
        compilers = [GrammarCompiler(one, stops) for one in tokenizers]
        schema = {"type": "object", "properties": {"naïve name": {"type": "string"}}, "required": ["naïve name"]}
        rng = np.random.default_rng(0)
        for spec in ({"regex": "[a-zé中]+ \\d{2,}"}, {"json_schema": schema, "whitespace": False}):
            one, two = (compiler.compile(spec).start(stops) for compiler in compilers)
            for _ in range(40):
                a, b = one.legal(), two.legal()
                assert a is not None
                assert b is not None
                assert np.array_equal(a, b)
                assert one.forced(8) == two.forced(8)
                if not a.any():
                    break
                token = (one.forced(1) or (int(rng.choice(np.flatnonzero(a))),))[0]
                if token in stops:
                    break
                for grammar in (one, two):
                    grammar.commit(token)
    finally:
        backend.close()
