"""Grammars: which tokens may follow, for every row of a step, drafts included. Parsing is llguidance's.

A grammar acts on *bytes*, those that the tokens add to the text: a token is legal if some text of the language goes on
with its bytes. Where only one text can follow, there is nothing to choose but how to cut it into tokens; that is then
done as the tokenizer does it. A model that is left with pieces of words it never saw writes worse, and tokens that are
certain are drafts that are never rejected.

One matcher per sample walks along the drafts and back. It is asked for each state once: masks are kept for the path
that it knows, so that drafter, scheduler and target share them.
"""

from __future__ import annotations

import codecs
import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidParams, InvariantError, NoLegalToken, UnsupportedOption
from ..types import Tokenizer
from .grammar_source import refusal, source_of
from .spelling import spelled

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["CompiledGrammar", "Grammar", "GrammarCompiler"]

MAX_COMPILED = 32  # grammars that a compiler remembers
MAX_WRITTEN = 96  # bytes of a certain text that are looked at to write its first token


class GrammarCompiler:
    """Compiles the `grammar` of SamplingParams for one tokenizer; the last MAX_COMPILED are remembered.

    stop_ids: the model's own end ids. The first grammar takes longer: llguidance needs all tokens of the vocabulary.
    Safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: Mapping[str, Any]) -> CompiledGrammar:
        """The grammar of `SamplingParams.grammar`. Warns (UserWarning) of what "lenient" dropped.

        Raises UnsupportedOption for a keyword, format or regex feature that llguidance lacks, InvalidParams for what
        does not parse or cannot be satisfied, both with llguidance's own message.
        """
        key = json.dumps(spec)  # not sorted: the order of properties is the order in which they are written
        with self._lock:
            compiled = self._compiled.pop(key, None)
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._stop_ids)
            vocabulary = self._vocabulary
        if compiled is None:  # without the lock: whoever asks for a known grammar does not wait for a new one
            compiled = vocabulary.compile(spec)
        with self._lock:
            self._compiled[key] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if compiled.dropped:
            warnings.warn(f"the grammar is looser than it was asked for: {'; '.join(compiled.dropped)}", stacklevel=2)
        return compiled


class CompiledGrammar:
    """A grammar at its start; `start` gives each sample a matcher of its own.

    dropped: what "lenient" dropped, or replaced by something looser, in llguidance's words.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher
        self.dropped: tuple[str, ...] = tuple(matcher.get_grammar_warnings())

    def start(self, end_ids: frozenset[int], after: str | int | None = None) -> Grammar:
        """The grammar of one sample. end_ids: what ends it. after: the token id, or text of the output, that starts it.

        end_ids are `stop_token_ids`, and the model's own end ids unless ignore_eos.
        """
        return Grammar(self._vocabulary, self._matcher.deep_copy, end_ids, after)

    def refuse_unusable(self, kind: str) -> None:
        """Raise InvalidParams where nothing can be written, UnsupportedOption where drafts could not be taken back."""
        legal = self.start(frozenset()).legal()
        assert legal is not None
        if not legal.any():
            allowed = "only the empty text" if self._matcher.deep_copy().is_accepting() else "no text at all"
            raise InvalidParams(
                f"grammar[{kind!r}] allows {allowed}, in the tokens of this model; nothing can follow it"
            )
        # Whether llguidance can go back does not depend on where it stands.
        walker = self._matcher.deep_copy()
        if walker.try_consume_tokens([int(legal.argmax())]) != 1 or not walker.rollback(1):
            said = walker.get_error().partition("\n")[0]
            raise UnsupportedOption(
                f"grammar[{kind!r}] is not supported, drafts must be taken back: llguidance says {said}"
            )


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of all tokens, and behind them one end token that nobody emits."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        self.size, self.stop_ids = tokenizer.vocab_size, stop_ids
        self.pieces = [tokenizer.token_bytes(token) for token in range(self.size)]
        if not any(self.pieces):
            raise UnsupportedOption("grammar: what text the tokens of this model stand for is not known")
        self._tokenizer = tokenizer
        self._ids = {piece: token for token, piece in reversed(list(enumerate(self.pieces))) if piece}
        self._longest = max(map(len, self._ids))
        self._written = lru_cache(maxsize=4096)(self._first_of)
        bare = [token for token, piece in enumerate(self.pieces) if not piece]
        # llguidance marks special tokens with 0xff. No text holds that byte, so a token with it is never legal, and
        # neither is an empty one.
        tokens = [b"" if b"\xff" in piece else piece for piece in self.pieces]
        for token in bare:
            tokens[token] = tokenizer.token_text(token) or b"<%d>" % token

        class Described:
            eos_token_id, bos_token_id = self.size, None
            special_token_ids = (*bare, self.size)
            __call__ = staticmethod(self.encode)

        Described.tokens = [*tokens, b"<|end of the grammar|>"]  # type: ignore[attr-defined]
        self._described: LLTokenizer = LLTokenizer(TokenizerWrapper(Described()), n_vocab=self.size + 1)

    def compile(self, spec: Mapping[str, Any]) -> CompiledGrammar:
        """See GrammarCompiler."""
        kind, source = source_of(spec, {token: self._tokenizer.token_text(token) for token in self.stop_ids})
        matcher = self._matcher(source)
        if matcher.is_error():
            lenient = self._matcher(source_of({**spec, "lenient": True})[1]) if kind == "json_schema" else matcher
            raise refusal(kind, matcher.get_error(), lenient.get_grammar_warnings())
        compiled = CompiledGrammar(self, matcher)
        compiled.refuse_unusable(kind)
        return compiled

    def _matcher(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        return LLMatcher(self._described, source, log_level=0, limits=limits)

    def encode(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes are exactly `text`, if possible as the tokenizer would write it.

        Where it would not, and for parts of characters, always the longest token that fits; the tokens end before a
        byte that no token begins with.
        """
        data = text.encode() if isinstance(text, str) else text
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(data)
        except UnicodeDecodeError:
            return self._greedy(data)
        tokens = spelled(self._tokenizer, whole) if whole else []
        return self._greedy(data) if tokens is None else tokens + self._greedy(data[len(whole.encode()) :])

    def first_of(self, text: bytes) -> tuple[int, bool] | None:
        """How `text` begins when it is written: the token, and whether that is all of it. None if it cannot be."""
        return self._written(text[:MAX_WRITTEN], len(text) <= MAX_WRITTEN)

    def _first_of(self, start: bytes, whole: bool) -> tuple[int, bool] | None:
        """first_of of a text that begins with `start`, or is it."""
        tokens = self.encode(start)
        if not tokens or tokens[0] in self.stop_ids or sum(len(self.pieces[t]) for t in tokens) < len(start):
            return None
        return tokens[0], whole and len(tokens) == 1

    def _greedy(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[data[at : at + size]])
            at += size
        return tokens


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """What may follow somewhere on the path. legal: bool[V], read-only. failure: why nobody can say, or None.

    dead: no matcher can stand there, as it does nothing but report an error.
    """

    legal: NDArray[np.bool_]
    accepting: bool = False
    over: bool = False
    dead: bool = False
    failure: str | None = None


class Grammar:
    """One sample's grammar. Committed tokens move it for good; drafts are walked along and back.

    An id in end_ids that is one of the model's end ids, or has no bytes, is legal exactly where the grammar may end;
    one that is ordinary text is legal where its text is. The model's end ids are otherwise never legal, and tokens
    without bytes only where a Lark grammar names them. Nothing is legal behind an end id, or where the grammar is over.

    For one thread at a time. `path` below are tokens that the matcher is known to take behind the committed ones;
    the matcher itself stands behind the first `depth` of them.
    """

    def __init__(
        self,
        vocabulary: _Vocabulary,
        fresh: Callable[[], LLMatcher],
        end_ids: frozenset[int],
        after: str | int | None = None,
    ) -> None:
        self._vocabulary, self._fresh, self._end_ids = vocabulary, fresh, end_ids
        self._matcher = fresh()
        self._trigger = None if after is None else _Trigger(after, vocabulary.pieces)
        bare = [t for t in end_ids if t < vocabulary.size and (t in vocabulary.stop_ids or not vocabulary.pieces[t])]
        self._bare_ends = np.array(sorted(bare), dtype=np.int64)
        self._never = np.array(sorted(t for t in vocabulary.stop_ids if t < vocabulary.size), dtype=np.int64)
        self._untaken = vocabulary.stop_ids | frozenset(bare)  # ids that the matcher is never shown
        self._bits = np.zeros(vocabulary.size // 32 + 1, dtype=np.uint32)  # V tokens and the end
        self._nothing = np.zeros(vocabulary.size, dtype=np.bool_)
        self._nothing.flags.writeable = False
        self._committed: list[int] = []
        self._path: list[int] = []
        self._depth = 0
        self._states: dict[int, _State] = {}  # by how many tokens of the path precede
        self._texts: dict[int, bytes] = {}  # likewise: the text that is certain to follow
        self._ended = False

    def legal(self, drafts: Sequence[int] = ()) -> NDArray[np.bool_] | None:
        """bool[V]: what may follow the committed tokens and `drafts`. None: anything, the grammar has not started.

        Read-only. All False behind drafts that are illegal, and where the sample is over. Raises NoLegalToken where the
        parser met one of its limits, so that nobody can say.
        """
        start = self._start(drafts)
        if start is None:
            return None
        rest = drafts[start:]
        if self._ended or not self._end_ids.isdisjoint(rest) or self._walk(rest) < len(rest):
            return self._nothing
        state = self._state(len(rest))
        if state.failure is not None:
            raise NoLegalToken(f"the grammar's parser gave up: {state.failure}; simplify the grammar")
        return state.legal

    def num_legal(self, drafts: Sequence[int]) -> int:
        """How many of the drafts, from the first, may follow one another; an end id is the last."""
        start = self._start(drafts)
        end = next((i for i, token in enumerate(drafts) if token in self._end_ids), None)
        if start is None:
            return len(drafts) if end is None else end + 1
        if end is not None and end < start:
            return end + 1
        if self._ended:
            return 0
        body = drafts[start:end]
        walked = self._walk(body)
        if end is None or walked < len(body):
            return start + walked
        token = drafts[end]
        if token in self._untaken:
            state = self._state(walked)
            return end + int(state.accepting and not state.over)
        return start + self._walk([*body, token])

    def is_over(self, drafts: Sequence[int] = ()) -> bool:
        """Whether the grammar is complete behind committed tokens and `drafts`: none is missing, none can follow."""
        start = self._start(drafts)
        if start is None or self._ended:
            return False
        rest = drafts[start:]
        if not self._end_ids.isdisjoint(rest) or self._walk(rest) < len(rest):
            return False
        return self._state(len(rest)).over

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens, each the only legal one; () where the first is not."""
        tokens: list[int] = []
        while len(tokens) < limit and self._trigger is None and not self._ended:
            if self._is_dead(len(tokens)) or not self._text(len(tokens)):
                break
            only = np.flatnonzero(self._state(len(tokens)).legal)
            if only.size != 1 or int(only[0]) in self._end_ids:
                break
            tokens.append(int(only[0]))
            if self._walk(tokens) < len(tokens):
                raise InvariantError(f"the grammar's matcher did not take {tokens}: {self._matcher.get_error()}")
        return tuple(tokens)

    def commit(self, token: int) -> None:
        """`token` was emitted. Raises InvariantError where it is illegal."""
        if self._trigger is not None:
            if self._trigger.push(token):
                self._trigger = None
            return
        if self.num_legal((token,)) != 1:
            raise InvariantError(
                f"token {token} was committed behind {len(self._committed)} others of the grammar, illegally"
            )
        self._ended = token in self._end_ids
        if token in self._untaken:
            return
        if self._depth == 0 and not self._is_dead(1):
            self._go(1)
        self._committed.append(self._path.pop(0))
        self._depth = max(self._depth - 1, 0)
        self._states = {at - 1: state for at, state in self._states.items() if at}
        self._texts = {at - 1: data for at, data in self._texts.items() if at}

    def _start(self, drafts: Sequence[int]) -> int | None:
        """How many of the drafts stand before the grammar; None where all of them do and it has not started then."""
        return 0 if self._trigger is None else self._trigger.find(drafts)

    def _walk(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the matcher takes; they are on the path then."""
        path = self._path
        same = 0
        while same < len(tokens) and same < len(path) and tokens[same] == path[same]:
            same += 1
        if same == len(tokens) or self._is_dead(same):
            return same
        self._go(same)
        for at in range(same, len(tokens)):
            taken = self._may_take(at, tokens[at]) and self._matcher.try_consume_tokens([tokens[at]]) == 1
            error = self._matcher.is_error()
            if not taken and not error:
                return at
            self._forget(at)
            path.append(tokens[at])
            if error:
                self._states[at + 1] = self._dead_end()
                self._renew(at)
                return at + 1
            self._depth = at + 1
            certain, size = self._texts[at], len(self._vocabulary.pieces[tokens[at]])
            if len(certain) > size:
                self._texts[at + 1] = certain[size:]
        return len(tokens)

    def _may_take(self, depth: int, token: int) -> bool:
        """Whether a token is not illegal for another reason than its bytes."""
        if not 0 <= token < self._vocabulary.size or token in self._untaken:
            return False
        certain = self._text(depth)
        first = self._vocabulary.first_of(certain) if certain else None
        if first is None:
            return True
        return self._vocabulary.pieces[token].startswith(certain) if first[1] else token == first[0]

    def _text(self, depth: int) -> bytes:
        """The text that must follow behind the first `depth` tokens of the path; b"" where there are several."""
        if depth not in self._texts:
            self._go(depth)
            # Of a copy: the call leaves a matcher behind that has gone on. 0xff marks a special token.
            self._texts[depth] = self._matcher.deep_copy().compute_ff_bytes().partition(b"\xff")[0]
        return self._texts[depth]

    def _is_dead(self, depth: int) -> bool:
        state = self._states.get(depth)
        return state is not None and state.dead

    def _forget(self, length: int) -> None:
        """Only the first `length` tokens of the path are still known."""
        del self._path[length:]
        self._states = {at: state for at, state in self._states.items() if at <= length}
        self._texts = {at: data for at, data in self._texts.items() if at <= length}

    def _go(self, depth: int) -> None:
        """Put the matcher behind the first `depth` tokens of the path."""
        if depth < self._depth and not self._matcher.rollback(self._depth - depth):
            raise InvariantError(f"the grammar's matcher did not go back: {self._matcher.get_error()}")
        rest = self._path[self._depth : depth]
        if rest and self._matcher.try_consume_tokens(rest) != len(rest):
            raise InvariantError(f"the grammar's matcher did not take {rest} again: {self._matcher.get_error()}")
        self._depth = depth

    def _renew(self, depth: int) -> None:
        """A matcher with an error never leaves it: another one goes the same way."""
        self._matcher = self._fresh()
        tokens = self._committed + self._path[:depth]
        if self._matcher.try_consume_tokens(tokens) != len(tokens):
            raise InvariantError(
                f"a fresh matcher did not take {len(tokens)} tokens again: {self._matcher.get_error()}"
            )
        self._depth = depth

    def _state(self, depth: int) -> _State:
        state = self._states.get(depth)
        if state is None:
            certain = self._text(depth)
            first = self._vocabulary.first_of(certain) if certain else None
            if first is not None and not first[1]:
                legal = np.zeros(self._vocabulary.size, dtype=np.bool_)
                legal[first[0]] = True
                legal.flags.writeable = False
                state = _State(legal)
            else:
                self._go(depth)
                state = self._look(certain if first is not None else b"")
            self._states[depth] = state
            if self._matcher.is_error():
                self._renew(depth)
        return state

    def _look(self, certain: bytes) -> _State:
        """What may follow where the matcher stands: tokens that begin with `certain`."""
        matcher, size = self._matcher, self._vocabulary.size
        accepting = matcher.is_accepting()
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if matcher.is_error():
            return self._dead_end()
        legal = np.unpackbits(self._bits.view(np.uint8), count=size, bitorder="little").view(np.bool_)
        legal[self._never] = False
        legal[self._bare_ends] = False
        for token in np.flatnonzero(legal) if certain else ():
            legal[token] = self._vocabulary.pieces[token].startswith(certain)
        over = accepting and not legal.any()
        if accepting and not over:
            legal[self._bare_ends] = True
        legal.flags.writeable = False
        return _State(legal, accepting, over)

    def _dead_end(self) -> _State:
        """The matcher has an error. One of them is an answer: bytes could follow, but no token begins with them."""
        reason = self._matcher.get_error().partition("\n")[0] or self._matcher.stop_reason()
        if reason == "NoExtensionBias":
            return _State(self._nothing, dead=True)
        return _State(self._nothing, dead=True, failure=reason)


class _Trigger:
    """Finds the token that completes what a grammar starts behind: a token id, or a text of the output."""

    def __init__(self, after: str | int, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._token = after if isinstance(after, int) else None
        self._text = after.encode() if isinstance(after, str) else b""
        self._tail = b""  # the end of what was committed; too short to hold the text

    def push(self, token: int) -> bool:
        """Commit a token. Whether it completed the trigger."""
        done, self._tail = self._next(self._tail, token)
        return done

    def find(self, drafts: Sequence[int]) -> int | None:
        """How many drafts there are up to the one that completes the trigger, or None."""
        tail = self._tail
        for i, token in enumerate(drafts):
            done, tail = self._next(tail, token)
            if done:
                return i + 1
        return None

    def _next(self, tail: bytes, token: int) -> tuple[bool, bytes]:
        if self._token is not None:
            return token == self._token, b""
        data = tail + (self._pieces[token] if 0 <= token < len(self._pieces) else b"")
        return self._text in data, data[max(0, len(data) - len(self._text) + 1) :]
