"""SamplingParams: every option of a request, validated where it is built."""

from __future__ import annotations

import difflib
import functools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any, Literal, TypeVar

from .errors import InvalidParams, UnsupportedOption, shown

Verification = Literal["auto", "rejection", "block", "coupled"]
VERIFICATIONS: tuple[Verification, ...] = ("auto", "rejection", "block", "coupled")
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")

MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_SAMPLES = 128
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark")

# What other engines' options are here, or why there is no such thing. Refused by name, never ignored.
_OTHERS: dict[str, tuple[str, ...]] = {
    "max_tokens is the name": (
        *("max_new_tokens", "max_completion_tokens", "max_gen_len", "max_length", "n_predict", "num_predict"),
    ),
    "min_tokens is the name": ("min_new_tokens", "min_length"),
    "repetition_penalty is the name": ("repeat_penalty", "penalty_repeat"),
    "penalties count the whole history": ("repeat_last_n", "penalty_last_n", "repetition_penalty_range"),
    "stop is the name": ("stop_strings", "stop_sequences", "stop_words"),
    "stop_token_ids is the name": ("eos_token_id", "stop_ids"),
    "seed is the name": ("sampling_seed", "random_seed"),
    "bad_words takes texts and lists of token ids": ("bad_words_ids", "bad_words_token_ids"),
    "logprobs = n gives every token's own and the n largest": (
        *("top_logprobs", "top_logprobs_num", "num_logprobs", "return_logprob", "n_probs", "logprob_token_ids"),
    ),
    "logits_processors takes functions and objects with clone()": ("logits_processor", "custom_logit_processor"),
    "draft_length is the name": ("num_assistant_tokens", "num_speculative_tokens", "num_draft_tokens"),
    "temperature is the name": ("temp",),
    "temperature = 0 is greedy, everything else samples": ("do_sample",),
    "bad_words = [[id], ...] forbids tokens": ("suppress_tokens", "begin_suppress_tokens"),
    "ask for n samples and choose; logprobs says how likely each is": ("best_of", "num_return_sequences"),
    "beam search looks for one likely text and samples none; n gives samples": (
        *("use_beam_search", "beam_width", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("length_penalty", "early_stopping"),
    ),
    "DRY is a function of the tokens so far: pass one in logits_processors, docs/sampling.md has it": (
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_range"),
        *("dry_sequence_breakers",),
    ),
    "XTC tosses a coin of its own for every token; pass its law in logits_processors, docs/sampling.md has it": (
        *("xtc_probability", "xtc_threshold"),
    ),
    "mirostat's bound depends on the rows before: pass it with clone() in logits_processors, docs/sampling.md has it": (
        *("mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta", "mirostat_ent", "mirostat_lr"),
    ),
    "a filter of the logits alone; pass it in logits_processors": (
        *("typical_p", "typ_p", "typical", "tfs_z", "tfs", "top_a", "top_n_sigma", "epsilon_cutoff", "eta_cutoff"),
        *("dynatemp_range", "dynatemp_exponent", "dynatemp_low", "dynatemp_high"),
        *("smoothing_factor", "smoothing_curve", "renormalize_logits"),
    ),
    "a function of the tokens so far; pass it in logits_processors": (
        *("no_repeat_ngram_size", "encoder_repetition_penalty", "exponential_decay_length_penalty"),
    ),
    "the order of the transforms is fixed, see SamplingParams": ("samplers", "sampler_order", "temperature_last"),
    "the model would run twice for every token; nothing here does": ("guidance_scale", "cfg_scale", "penalty_alpha"),
    "it belongs in grammar = {'json_schema': schema}": ("guided_json", "json_schema"),
    "it belongs in grammar = {'json_object': True}": ("json_object", "json_mode"),
    "use grammar = {'json_schema': schema} or {'json_object': True}": ("response_format",),
    "it belongs in grammar = {'regex': pattern}": ("guided_regex", "regex"),
    "use grammar = {'json_schema': {'enum': [...]}}; for texts without quotes {'regex': 'one|two|three'}": (
        *("guided_choice", "choice"),
    ),
    "it belongs in grammar = {'lark': text}, in Lark's notation": ("guided_grammar", "ebnf", "gbnf", "lark"),
    "it belongs in grammar = {'json_schema': schema, 'lenient': True}": ("lenient",),
    "it belongs in grammar = {'json_schema': schema, 'whitespace': False}, or beside 'json_object'": ("whitespace",),
    "use grammar = {...}, one of json_schema, json_object, regex, lark": (
        *("guided_decoding", "guided_decoding_backend", "structured_outputs", "structural_tag"),
    ),
    "use grammar = {'json_schema': schema, 'whitespace': False} for none": ("guided_whitespace_pattern",),
    "use grammar_after": ("grammar_lazy", "grammar_triggers"),
    "shorten the prompt's token ids before you pass them": ("truncate_prompt_tokens", "truncation_side"),
    "control tokens have no text, and token_ids holds all tokens": (
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    ),
    "LLM.stream gives what becomes final, LLM.generate the whole": ("stream", "output_kind"),
    "the result holds the prompt already": ("echo",),
}
REFUSED = {name: why for why, names in _OTHERS.items() for name in names}
"""Name of an option that other engines have -> what to do here instead."""

_T = TypeVar("_T")


def _names_checked(cls: type[_T]) -> type[_T]:
    """A dataclass whose constructor knows the options that it does not have."""
    init = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name in REFUSED:
                raise UnsupportedOption(
                    f"{name} = {shown(options[name])} is not an option of Paceline: {REFUSED[name]}"
                )
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
                raise TypeError(f"{cls.__name__} has no option {name!r}; {hint}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_names_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Frozen; every error names field, value and allowed range.

    Lists and mappings are copied and become tuples and dicts of its own; do not write to the dicts. Unknown options are
    a TypeError, and those that other engines have UnsupportedOption saying what to do instead.

    Every option holds on every emitted token, whichever row it came from. They apply in this order, each to the
    renormalised result of the one before: logits_processors; allowed_token_ids, bad_words, min_tokens; grammar;
    logit_bias; repetition, presence and frequency penalties; temperature; top-k; top-p; min-p.

    n: samples of the prompt, 1 to 128; they share its keys and values. Sample 0 has the seed, the others seeds derived
    from it, reported with the outputs.
    max_tokens: int >= 1, or None for "until the context is full". min_tokens: before so many, end ids and
    stop_token_ids cannot be emitted and stop strings do not count.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p in (0, 1]. min_p in [0, 1]. presence_penalty and
    frequency_penalty in [-2, 2] count output tokens; repetition_penalty > 0 counts prompt and output.
    logit_bias: token id -> [-100, 100], added to the logit. allowed_token_ids: nothing else is emitted, no other end id
    either. bad_words: texts, or lists of token ids, that the output never holds as a run of tokens; a text stands for
    its own tokens and for those it has behind a space.
    stop: strings that end the text, cut before them unless include_stop_str_in_output. stop_token_ids: further ids that
    end it. ignore_eos: end ids may be emitted and do not stop.
    seed: 0 .. 2**64 - 1, or None for one drawn from the operating system (and reported); requests with equal seeds
    share noise.
    logprobs: for every output token its own logprob and the n largest, -1 all; logprobs_mode: of the model's logits as
    they are ("raw_logprobs"), or of p, after every transform ("processed_logprobs"). prompt_logprobs: the same for
    every prompt token but the first, always raw; the prompt is then computed anew even where its beginning is cached.
    logits_processors: each a function (tokens, logits) -> logits, of the tokens so far (prompt and output, a tuple) and
    float64[V]; or an object that is called in the same way and has clone(), if it keeps state. See
    `paceline.sampling.processors`.
    grammar: {"json_schema": schema}, {"json_object": True}, {"regex": text} or {"lark": text}; with a schema also
    "lenient": True, to drop keywords that are not supported instead of refusing them, and with both JSON kinds
    "whitespace": False, for none between tokens of JSON. grammar_after: a token id, or a string of the output, behind
    which the grammar starts; until then anything goes.
    verification: which rule decides *sampled* drafts. draft_length: 0 is off, None the engine's choice.
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
    bad_words: Sequence[str | Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    include_stop_str_in_output: bool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    grammar: Mapping[str, Any] | None = None
    grammar_after: str | int | None = None
    verification: Verification = "auto"
    draft_length: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", integer("n", self.n, 1, MAX_SAMPLES))
        if self.max_tokens is not None:
            put("max_tokens", integer("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID))
        put("min_tokens", integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(f"min_tokens = {self.min_tokens}; allowed: 0 to max_tokens = {self.max_tokens}")
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
        put("bad_words", _bad_words(self.bad_words))
        put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids == ():
            raise InvalidParams("allowed_token_ids = (); allowed: at least one token id, or None for all")
        put("stop", _strings("stop", self.stop))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        put("ignore_eos", _flag("ignore_eos", self.ignore_eos))
        put(
            "include_stop_str_in_output",
            _flag("include_stop_str_in_output", self.include_stop_str_in_output),
        )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, integer(name, getattr(self, name), -1, MAX_TOKEN_ID))
        put("logits_processors", checked_processors(self.logits_processors))
        put("grammar", _grammar(self.grammar))
        put("grammar_after", _grammar_after(self.grammar_after, self.grammar))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, MAX_SEED))
        if self.draft_length is not None:
            put("draft_length", integer("draft_length", self.draft_length, 0, MAX_TOKEN_ID))
        if not isinstance(self.verification, str) or self.verification not in VERIFICATIONS:
            raise InvalidParams(f"verification = {shown(self.verification)}; allowed: {', '.join(VERIFICATIONS)}")
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidParams(f"logprobs_mode = {shown(self.logprobs_mode)}; allowed: {', '.join(LOGPROBS_MODES)}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when None."""
        return tuple(self.stop or ())

    @property
    def has_penalties(self) -> bool:
        """Whether p depends on the tokens already generated through a penalty."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def integer(name: str, value: Any, low: int, high: int = MAX_TOKEN_ID) -> int:
    """`value` as an int from low to high (numpy integers are fine, bool is not), else InvalidParams naming it."""
    allowed = f"an integer from {low} to {high}"
    if isinstance(value, bool):
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}") from None
    if not low <= number <= high:
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}")
    return number


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    bracket = "(" if open_low else "["
    allowed = f"a finite number in {bracket}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, (bool, str, bytes, bytearray, memoryview)):
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}") from None
    inside = low < number <= high if open_low else low <= number <= high
    if not inside or not math.isfinite(number):
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParams(f"{name} = {shown(value)}; allowed: True or False")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, str) else _items(name, value, "a non-empty string, or a list of them")
    for item in items:
        if not isinstance(item, str) or not item:
            raise InvalidParams(f"{name} = {shown(value)}; allowed: non-empty strings")
        _refuse_surrogates(name, item)
    return items


def _items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    """The items of a list of any kind; a mapping or bytes are none, though they can be walked through."""
    try:
        if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise InvalidParams(f"{name} = {shown(value)}; allowed: {allowed}") from None


def _refuse_surrogates(name: str, text: str) -> None:
    """Half a pair of surrogates is no text: no token writes it, and nothing can be compared with it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{name} = {shown(text)}; allowed: text without lone surrogates ({error.reason})") from None


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = _items(name, value, "a list of token ids")
    return tuple(integer(f"{name}[{i}]", item, 0, MAX_TOKEN_ID) for i, item in enumerate(items))


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidParams(f"logit_bias = {shown(value)}; allowed: a mapping from token id to a number")
    return {
        integer("logit_bias key", token, 0, MAX_TOKEN_ID): _number(f"logit_bias[{shown(token)}]", bias, -100.0, 100.0)
        for token, bias in value.items()
    }


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...] | None:
    if value is None:
        return None
    allowed = "a list of non-empty texts or lists of token ids"
    words: list[str | tuple[int, ...]] = []
    for i, word in enumerate(_items("bad_words", value, allowed)):
        checked = word if isinstance(word, str) else _ids(f"bad_words[{i}]", word)
        if not checked:
            raise InvalidParams(f"bad_words[{i}] = {shown(word)}; allowed: {allowed}")
        if isinstance(word, str):
            _refuse_surrogates(f"bad_words[{i}]", word)
        words.append(checked)
    return tuple(words)


def checked_processors(value: Any) -> tuple[Callable[..., Any], ...] | None:
    """Functions and objects with clone(), as a tuple; anything else might keep state that nobody could roll back."""
    if value is None:
        return None
    processors = _items("logits_processors", value, "a list of functions (tokens, logits) -> logits")
    for i, one in enumerate(processors):
        name = f"logits_processors[{i}] = {shown(one)}"
        if not callable(one) or isinstance(one, type):
            raise InvalidParams(f"{name}; allowed: a function (tokens, logits) -> logits, or an object called like one")
        if isinstance(one, functools.partial):
            raise UnsupportedOption(
                f"{name} is a partial, which may hold anything: wrap it in a function, as in "
                "lambda tokens, logits: one(tokens, logits)"
            )
        if not isinstance(one, FunctionType) and not callable(getattr(one, "clone", None)):
            raise UnsupportedOption(
                f"{name} may keep state, and drafts must be able to take it back: give it clone(), which returns an "
                "independent copy, or pass a function of (tokens, logits) if it keeps none"
            )
    return processors or None


def _grammar(value: Any) -> dict[str, Any] | None:
    """A copy of its own, which later changes to the caller's schema do not reach."""
    if value is None:
        return None
    kinds = [kind for kind in GRAMMAR_KINDS if isinstance(value, Mapping) and kind in value]
    _refuse_model("grammar", value)
    if len(kinds) != 1:
        raise InvalidParams(f"grammar = {shown(value)}; allowed: a mapping with one of {', '.join(GRAMMAR_KINDS)}")
    kind = kinds[0]
    options = {"json_schema": {"lenient", "whitespace"}, "json_object": {"whitespace"}}.get(kind, set())
    for name, option in value.items():
        if name == kind:
            continue
        if name not in options or not isinstance(option, bool):
            others = f", and {', '.join(sorted(options))}, each True or False" if options else ""
            raise InvalidParams(f"grammar[{name!r}] = {shown(option)}; allowed beside {kind}: nothing else{others}")
    body = value[kind]
    if kind == "json_object" and body is not True:
        raise InvalidParams(f"grammar['json_object'] = {shown(body)}; allowed: True")
    if kind in ("regex", "lark") and (not isinstance(body, str) or not body):
        raise InvalidParams(f"grammar[{kind!r}] = {shown(body)}; allowed: a non-empty text")
    if isinstance(body, str):
        _refuse_surrogates(f"grammar[{kind!r}]", body)
    if kind == "json_schema":
        body = _schema(body)
    return {**value, kind: body}


def _schema(value: Any) -> dict[str, Any] | bool:
    """A JSON schema as plain JSON; a text is parsed first."""
    _refuse_model("grammar['json_schema']", value)
    try:
        schema = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParams(f"grammar['json_schema'] = {shown(value)}; it is not JSON ({error})") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidParams(
            f"grammar['json_schema'] = {shown(value)}; allowed: a JSON schema, an object or true or false"
        )
    _refuse_wrapper(schema)
    return schema


def _refuse_model(name: str, value: Any) -> None:
    """A class of pydantic, or one of its objects, knows its schema and is none."""
    if callable(getattr(value, "model_json_schema", None)):
        kind = value if isinstance(value, type) else type(value)
        schema = f"{kind.__name__}.model_json_schema()"
        wanted = schema if name != "grammar" else f"{{'json_schema': {schema}}}"
        raise InvalidParams(f"{name} = {shown(value)}; allowed: a mapping; pass {wanted}")


def _refuse_wrapper(schema: Any) -> None:
    """What other interfaces put around a schema would itself be read as one, and allow any JSON."""
    inside = None
    if isinstance(schema, dict) and "schema" in schema and set(schema) <= {"name", "description", "schema", "strict"}:
        inside = "'schema'"
    elif isinstance(schema, dict) and schema.get("type") == "json_schema":
        inside = "'schema' in its 'json_schema'" if "json_schema" in schema else "'schema'"
    if inside is not None:
        raise InvalidParams(
            f"grammar['json_schema'] = {shown(schema)} is a wrapper around a schema; pass what stands under {inside}"
        )


def _grammar_after(value: Any, grammar: Any) -> str | int | None:
    if value is None:
        return None
    if grammar is None:
        raise InvalidParams(f"grammar_after = {shown(value)}; allowed: None, for there is no grammar to start")
    if isinstance(value, str) and value:
        _refuse_surrogates("grammar_after", value)
        return value
    try:
        return integer("grammar_after", value, 0, MAX_TOKEN_ID)
    except InvalidParams:
        raise InvalidParams(f"grammar_after = {shown(value)}; allowed: a token id or a non-empty string") from None
