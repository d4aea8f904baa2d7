"""allowed_token_ids, bad_words and min_tokens against their definitions, and texts as runs of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.toy import ToyTokenizer
from paceline.errors import InvalidParams, InvalidPrompt
from paceline.params import SamplingParams
from paceline.sampling.masks import Masks, bad_word_sequences
from paceline.sampling.reference import constrained_row

V = 5
NONE: frozenset[int] = frozenset()


def masks(vocab_size: int = V, end_ids: frozenset[int] = NONE, runs=(), **options) -> Masks | None:
    return Masks.of(SamplingParams(**options), vocab_size, end_ids, runs)


def forbidden(of: Masks | None, output=(), drafts=(), prompt=(1, 2, 3)) -> set[int]:
    """The ids that are masked behind prompt + output + drafts."""
    row = np.arange(V, dtype=np.float64)
    assert of is not None
    masked = of.apply(row, [*prompt, *output], len(prompt), tuple(drafts))
    assert row.tolist() == [0, 1, 2, 3, 4]
    assert all(x == v or x == -math.inf for v, x in enumerate(masked))
    return {v for v, x in enumerate(masked) if x == -math.inf}


class TestAgainstTheDefinition:
    @given(data=st.data())
    @settings(max_examples=500, deadline=None, derandomize=True)
    def test_random_options_histories_and_drafts(self, data):
        """vllm#18902, vllm#22987: what a row after drafts may be is what it would be had they been committed."""
        ids = st.integers(0, V - 1)
        output = data.draw(st.lists(ids, max_size=10))
        split = data.draw(st.integers(0, len(output)))
        prompt = data.draw(st.lists(ids, min_size=1, max_size=4))
        runs = data.draw(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=5))
        end_ids = frozenset(data.draw(st.sets(ids, max_size=2)))
        params = SamplingParams(
            allowed_token_ids=data.draw(st.none() | st.lists(ids, min_size=1)),
            min_tokens=data.draw(st.integers(0, 12)),
        )
        row = np.array(data.draw(st.lists(st.floats(-9, 9, width=32), min_size=V, max_size=V)), dtype=np.float32)
        made = Masks.of(params, V, end_ids, runs)
        drafts = tuple(output[split:])
        got = row if made is None else made.apply(row, [*prompt, *output[:split]], len(prompt), drafts)
        assert got.dtype == np.float32
        expected = constrained_row(
            row.astype(np.float64), output, allowed=params.allowed_token_ids, bad_words=runs,
            early_ids=end_ids if len(output) < params.min_tokens else (),
        )  # fmt: skip
        assert got.tolist() == expected.tolist()

    def test_nothing_is_set(self):
        assert masks() is None
        assert masks(end_ids=frozenset({4})) is None
        assert masks(min_tokens=3) is None

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_row_that_loses_nothing_is_the_row_itself(self, dtype):
        row = np.zeros(V, dtype=dtype)
        made = masks(min_tokens=1, end_ids=frozenset({0}), runs=[(1, 2)])
        assert made is not None
        assert made.apply(row, [3, 1], 2, (0,)) is row
        masked = made.apply(row, [3, 1], 1, ())
        assert masked is not row
        assert masked.dtype == dtype
        assert masked.tolist() == [0, 0, -math.inf, 0, 0]


class TestAllowed:
    def test_nothing_else_may_come(self):
        assert forbidden(masks(allowed_token_ids=[3, 1, 3])) == {0, 2, 4}

    def test_end_ids_are_no_exception(self):
        """Forbidden like anything else where they are not allowed, and before min_tokens where they are."""
        assert forbidden(masks(allowed_token_ids=[1, 4], end_ids=frozenset({4}))) == {0, 2, 3}
        assert forbidden(masks(allowed_token_ids=[1, 4], end_ids=frozenset({4}), min_tokens=1)) == {0, 2, 3, 4}

    def test_bad_words_bind_within_it(self):
        assert forbidden(masks(allowed_token_ids=[1, 2, 3], runs=[(2,), (4, 3)]), output=[4]) == {0, 2, 3, 4}


class TestMinTokens:
    """vllm#26317, vllm#21987, vllm#32642: end ids at draft offsets that were still before min_tokens ended requests."""

    @pytest.mark.parametrize("committed", range(7))
    @pytest.mark.parametrize("drafts", range(5))
    def test_end_ids_wait_for_it_at_every_offset(self, committed, drafts):
        made = masks(min_tokens=4, end_ids=frozenset({0, 4}))
        early = committed + drafts < 4
        assert forbidden(made, [1] * committed, [2] * drafts) == ({0, 4} if early else set())

    def test_the_prompt_does_not_count(self):
        assert forbidden(masks(min_tokens=1, end_ids=frozenset({4})), prompt=(1,) * 50) == {4}


class TestBadWords:
    def test_one_token_never_comes(self):
        made = masks(runs=[(2,), (4,)])
        assert forbidden(made) == forbidden(made, [2], [4]) == {2, 4}

    @pytest.mark.parametrize("split", range(4))
    def test_a_run_may_span_step_borders_and_drafts(self, split):
        """Only its last token is masked, and only where the ones before really stand."""
        made = masks(runs=[(1, 2, 1, 3)])
        before = [1, 2, 1]
        assert forbidden(made, before[:split], before[split:]) == {3}
        assert forbidden(made, [*before[:split]], [*before[split:], 0]) == set()
        assert forbidden(made, [2, 1]) == set()

    def test_what_stands_in_the_prompt_is_not_output(self):
        made = masks(runs=[(3, 0), (2, 3, 0, 4)])
        assert forbidden(made, prompt=(1, 2, 3)) == set()
        assert forbidden(made, [3], prompt=(1, 2, 3)) == {0}
        assert forbidden(made, [0], prompt=(1, 2, 3)) == set()

    def test_runs_that_overlap_and_share_ends(self):
        made = masks(runs=[(1, 1), (1, 1, 1), (0, 1, 2), (1, 4)])
        assert forbidden(made, [0], [1]) == {1, 2, 4}
        assert forbidden(made, [1]) == {1, 4}

    def test_the_cost_does_not_grow_with_the_history(self):
        class Tokens(list[int]):
            read = 0

            def __getitem__(self, i):
                found = super().__getitem__(i)
                Tokens.read += len(found) if isinstance(found, list) else 1
                return found

        made = masks(runs=[(1, 2, 3), (0, 2, 4)])
        assert made is not None
        tokens = Tokens([0, 1, 2] * 10_000)
        assert made.apply(np.zeros(V), tokens, 1, ()).tolist() == [0, 0, 0, -math.inf, 0]
        assert Tokens.read <= 4


@pytest.mark.parametrize("made, said", [
    (lambda: masks(allowed_token_ids=[1, 5]), "allowed_token_ids names token 5; allowed: 0 to 4"),
    (lambda: masks(runs=[(1, 7)]), "bad_words names token 7; allowed: 0 to 4"),
    (lambda: masks(end_ids=frozenset({9}), min_tokens=1), "stop_token_ids names token 9; allowed: 0 to 4"),
])  # fmt: skip
def test_tokens_outside_the_vocabulary_are_named(made, said):
    with pytest.raises(InvalidParams, match=said):
        made()


# --- texts ----------------------------------------------------------------------------------------------


class Pieces:
    """Longest piece first. With `dummy` it writes a space in front of every text, as SentencePiece does."""

    def __init__(self, pieces: list[bytes], dummy: bool = False, lower: bool = False) -> None:
        self.pieces, self.dummy, self.lower = pieces, dummy, lower
        self.vocab_size = len(pieces)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special
        assert not parse_special
        data = (" " * self.dummy + (text.lower() if self.lower else text)).encode()
        ids = []
        while data:
            fits = [v for v, piece in enumerate(self.pieces) if piece and data.startswith(piece)]
            if not fits:
                raise InvalidPrompt(f"no token for {data!r}")
            ids.append(max(fits, key=lambda v: len(self.pieces[v])))
            data = data[len(self.pieces[ids[-1]]) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


WORDS = [b" ", b"f", b"o", b"foo", b" foo", b"bar", b" bar", b"\n", b"\xc3\xa9"]


class TestTexts:
    def test_a_word_stands_for_itself_alone_and_behind_a_space(self):
        assert bad_word_sequences(["foo"], Pieces(WORDS)) == ((3,), (4,))
        assert bad_word_sequences(["foobar", "fo"], Pieces(WORDS)) == ((3, 5), (4, 5), (1, 2), (0, 1, 2))

    def test_a_word_that_begins_with_a_space_stands_for_itself(self):
        assert bad_word_sequences([" foo", "\nfoo"], Pieces(WORDS)) == ((4,), (7, 3))

    def test_ids_stand_for_themselves_and_nothing_comes_twice(self):
        assert bad_word_sequences([[4, 5], "foo", (3,), "foo"], Pieces(WORDS)) == ((4, 5), (3,), (4,))

    def test_sentencepiece_puts_the_space_there_itself(self):
        """Not a run with two spaces, which never comes, and the word without a space as well."""
        tokenizer = Pieces(WORDS, dummy=True)
        assert tokenizer.encode("foo", add_special=False) == [4]
        assert set(bad_word_sequences(["foo"], tokenizer)) == {(4,), (3,)}
        assert bad_word_sequences([" foo"], tokenizer) == ((4,),)
        assert set(bad_word_sequences(["fo"], tokenizer)) == {(0, 1, 2), (1, 2)}

    def test_sentencepiece_without_a_line_break(self):
        assert bad_word_sequences(["foo"], Pieces(WORDS[:7], dummy=True)) == ((4,),)

    def test_a_real_sentencepiece_pipeline(self):
        pytest.importorskip("tokenizers")
        from tests.backend.hf.test_tokenizer import SPM

        def texts(word):
            return sorted([SPM.token_bytes(token) for token in run] for run in bad_word_sequences([word], SPM))

        assert texts("ab") == [[b" a", b"b"], [b"a", b"b"]]
        assert texts("é") == [[b" ", b"\xc3", b"\xa9"], [b"\xc3", b"\xa9"]]
        assert texts(" ab") == [[b" a", b"b"]]

    def test_a_real_byte_level_vocabulary(self, model_path):
        pytest.importorskip("llama_cpp")
        from paceline.backend.llamacpp import LlamaCppBackend

        backend = LlamaCppBackend(model_path("smollm2:q4_1"), max_seqs=1, max_len=32, n_threads=1)
        try:
            runs = bad_word_sequences(["hello world", " the"], backend.tokenizer)
            texts = [[backend.tokenizer.token_bytes(token) for token in run] for run in runs]
        finally:
            backend.close()
        assert texts == [[b"hello", b" world"], [b" hello", b" world"], [b" the"]]

    def test_a_tokenizer_that_reads_another_text(self):
        assert bad_word_sequences(["FOO"], Pieces(WORDS, lower=True)) == ((3,),)

    def test_characters_of_several_bytes(self):
        assert bad_word_sequences(["é"], Pieces(WORDS)) == ((8,), (0, 8))

    def test_a_space_that_does_not_exist_is_no_obstacle(self):
        tokenizer = ToyTokenizer(12, NONE)  # the ten digits, a and b
        assert bad_word_sequences(["10"], tokenizer) == ((1, 0),)

    @pytest.mark.parametrize("word, why", [
        ("x", "has no token for byte"), ("\ud800", "lone surrogate"),
    ])  # fmt: skip
    def test_what_cannot_be_spelled_is_refused(self, word, why):
        """A word that no token stands for would be forbidden without any effect."""
        with pytest.raises(InvalidParams, match=r"bad_words\[1\] = .*cannot spell it") as refused:
            bad_word_sequences(["1", word], ToyTokenizer(12, NONE))
        assert why in str(refused.value)

    def test_tokens_without_text_are_refused(self):
        """An empty tokenisation, or <unk>: forbidding <unk> would forbid something else."""

        class Unknown(Pieces):
            def encode(self, text, **kwargs):
                return [] if text.strip() == "empty" else [0]

        for word in ("empty", "unknown"):
            with pytest.raises(InvalidParams, match=rf"bad_words\[0\] = '{word}'; .*have no text"):
                bad_word_sequences([word], Unknown([b"", b"a"]))
