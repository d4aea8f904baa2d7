"""SamplingParams: every option of a request, validated where it is built."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import InvalidParams, UnsupportedOption

Verification = Literal["auto", "rejection", "block", "coupled"]
VERIFICATIONS: tuple[Verification, ...] = ("auto", "rejection", "block", "coupled")
LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")

MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Frozen; every error names field, value and allowed range.

    n, min_tokens, bad_words, allowed_token_ids, logprobs, prompt_logprobs, logits_processors, logprobs_mode,
    grammar and grammar_after are names of later versions: a request that sets one is refused when it is made.

    max_tokens: int >= 1, or None for "until the context is full". temperature: 0 is greedy.
    top_k: 0 or -1 is off. top_p in (0, 1]. min_p in [0, 1]. presence_penalty and frequency_penalty
    in [-2, 2] count output tokens; repetition_penalty > 0 counts prompt and output.
    logit_bias: token id -> [-100, 100], added to the logit. stop: strings that end the text, cut
    before them. stop_token_ids: further ids that end it. ignore_eos: end ids may be emitted and do
    not stop. seed: 0 .. 2**64 - 1, or None for one drawn from the operating system (and reported); requests with
    equal seeds share noise, so several samples of one prompt want a seed each.
    verification: which rule decides *sampled* drafts. draft_length: 0 is off, None the engine's choice.

    The transforms apply in this order, each to the renormalised result of the one before: logit_bias,
    repetition, presence and frequency penalties, temperature, top-k, top-p, min-p.
    """

    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    include_stop_str_in_output: bool = False
    logprobs_mode: str = "processed_logprobs"
    grammar: Mapping[str, Any] | None = None
    grammar_after: str | int | None = None
    verification: Verification = "auto"
    draft_length: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", integer("n", self.n, 1, MAX_TOKEN_ID))
        if self.max_tokens is not None:
            put("max_tokens", integer("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID))
        put("min_tokens", integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID))
        put("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        put("top_k", integer("top_k", self.top_k, -1, MAX_TOKEN_ID))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True),
        )
        put("logit_bias", _bias(self.logit_bias))
        put("stop", _strings("stop", self.stop))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        put("ignore_eos", _flag("ignore_eos", self.ignore_eos))
        put(
            "include_stop_str_in_output",
            _flag("include_stop_str_in_output", self.include_stop_str_in_output),
        )
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, MAX_SEED))
        if self.draft_length is not None:
            put("draft_length", integer("draft_length", self.draft_length, 0, MAX_TOKEN_ID))
        if not isinstance(self.verification, str) or self.verification not in VERIFICATIONS:
            raise InvalidParams(f"verification = {self.verification!r}; allowed: {', '.join(VERIFICATIONS)}")
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidParams(f"logprobs_mode = {self.logprobs_mode!r}; allowed: {', '.join(LOGPROBS_MODES)}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when None."""
        return tuple(self.stop or ())

    @property
    def has_penalties(self) -> bool:
        """Whether p depends on the tokens already generated through a penalty."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


# Options that exist in the public names but are not honoured yet. Refused by name, never ignored.
NOT_YET: tuple[str, ...] = (
    "n",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "logits_processors",
    "logprobs_mode",
    "grammar",
    "grammar_after",
)


def refuse_unsupported(params: SamplingParams) -> None:
    """Raise UnsupportedOption naming the first option this version does not honour."""
    defaults = {f.name: f.default for f in fields(SamplingParams)}
    for name in NOT_YET:
        value = getattr(params, name)
        if value is not None and (not isinstance(value, int | str) or value != defaults[name]):
            raise UnsupportedOption(
                f"{name} = {value!r} is not supported by this version of Paceline; leave it at {defaults[name]!r}"
            )


def integer(name: str, value: Any, low: int, high: int = MAX_TOKEN_ID) -> int:
    """`value` as an int from low to high (numpy integers are fine, bool is not), else InvalidParams naming it."""
    allowed = f"an integer from {low} to {high}"
    if isinstance(value, bool):
        raise InvalidParams(f"{name} = {value!r}; allowed: {allowed}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidParams(f"{name} = {value!r}; allowed: {allowed}") from None
    if not low <= number <= high:
        raise InvalidParams(f"{name} = {value!r}; allowed: {allowed}")
    return number


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    bracket = "(" if open_low else "["
    allowed = f"a finite number in {bracket}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, (bool, str, bytes)):
        raise InvalidParams(f"{name} = {value!r}; allowed: {allowed}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParams(f"{name} = {value!r}; allowed: {allowed}") from None
    inside = low < number <= high if open_low else low <= number <= high
    if not inside or not math.isfinite(number):
        raise InvalidParams(f"{name} = {value!r}; allowed: {allowed}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParams(f"{name} = {value!r}; allowed: True or False")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    try:
        items = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        raise InvalidParams(f"{name} = {value!r}; allowed: a non-empty string, or a list of them") from None
    for item in items:
        if not isinstance(item, str) or not item:
            raise InvalidParams(f"{name} = {value!r}; allowed: non-empty strings")
    return items


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise InvalidParams(f"{name} = {value!r}; allowed: a list of token ids")
    try:
        items = tuple(value)
    except TypeError:
        raise InvalidParams(f"{name} = {value!r}; allowed: a list of token ids") from None
    return tuple(integer(f"{name}[{i}]", item, 0, MAX_TOKEN_ID) for i, item in enumerate(items))


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidParams(f"logit_bias = {value!r}; allowed: a mapping from token id to a number")
    return {
        integer("logit_bias key", token, 0, MAX_TOKEN_ID): _number(f"logit_bias[{token!r}]", bias, -100.0, 100.0)
        for token, bias in value.items()
    }
