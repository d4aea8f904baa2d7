"""Options, alone and in pairs, in worlds where each of them shows; drafters, good and bad; and who must agree.

A world is a model with a prompt. Its options are made from what it says without any, so that each of them changes
something there: the bad words are words that it would say, the stop strings come.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from paceline.backend.toy import ToyBackend
from paceline.draft import AutoDrafter, ForcedDrafter, LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.types import Backend, Distribution, DraftContext, Drafter, Proposal, RequestOutput
from tests.drafters import PointDrafter

from .options_reference import PATTERNS, Tokens

Options = dict[str, Any]
VOCAB, STOP = 100, 99
WIDE = {"max_seqs": 16, "max_len": 160, "max_step_tokens": 160}
SEED = 4100
TOY_SEED = 212

# --- worlds -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class World:
    """open(draft=...): a fresh backend, of the target or of a smaller model. prompt: what every request asks.

    max_tokens: of every request. at_once: how many requests of a batch may run together. exact: whether equal tokens
    in batches of another shape have equal logits, bit by bit.
    """

    name: str
    open: Callable[..., Backend]
    prompt: Tokens
    max_tokens: int = 24
    exact: bool = True
    grammars: dict[str, Options] = field(default_factory=dict)

    @property
    def text(self) -> Callable[[Sequence[int]], str]:
        tokenizer = opened(self).tokenizer
        return lambda tokens: b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


@cache
def opened(world: World) -> Backend:
    """One backend of the world, for all that does not change it."""
    return world.open()


@lru_cache(maxsize=100_000)
def _strong(key: Tokens) -> np.ndarray:
    return np.random.default_rng((1, *key)).random(VOCAB) * 8.0


@lru_cache(maxsize=100_000)
def toy_row(tokens: Tokens, draft: bool = False) -> np.ndarray:
    """Lower-case letters and spaces, mostly by the last token, so that text repeats; once in a while the end."""
    tokens = tuple(t & 255 for t in tokens)  # a cell that was never written holds -1
    rng = np.random.default_rng((TOY_SEED + draft, *tokens))
    row = _strong(tokens[-1:]) + 0.7 * rng.random(VOCAB)
    row[10:37] += 8.0
    if rng.random() < 0.05:
        row[STOP] = 30.0
    return row


def open_toy(draft: bool = False, **options: Any) -> Backend:
    return ToyBackend(VOCAB, stop_ids=(STOP,), table=lambda tokens: toy_row(tokens, draft), **{**WIDE, **options})


SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "ok": {"enum": ["yes", "no"]}},
    "required": ["id", "ok"],
    "additionalProperties": False,
}
JSON = {"json_schema": SCHEMA, "whitespace": False}
LARK = {"lark": 'start: ("a" NUM " ")+ "Z"\nNUM: /[0-9]{1,3}/\n'}
PATTERNS[repr(SamplingParams(grammar=JSON).grammar)] = r'\{"id":-?(0|[1-9][0-9]*),"ok":("yes"|"no")\}'
PATTERNS[repr(SamplingParams(grammar=LARK).grammar)] = "(a[0-9]{1,3} )+Z"
TOY_GRAMMARS: dict[str, Options] = {
    "regex": {"grammar": {"regex": "(id[0-9]{1,2} (yes|no) ){1,4}A?"}},
    "schema": {"grammar": JSON},
    "lark": {"grammar": LARK},
    "after": {"grammar": {"regex": "[0-9]{2}ab( [a-f]+)*"}},  # grammar_after: see options()
}
TOY_PROMPT: Tokens = (13, 10, 36, 22, 17, 14, 36, 13, 10, 36, 22)
TOY = World("toy", open_toy, TOY_PROMPT, grammars=TOY_GRAMMARS)


# --- options ------------------------------------------------------------------------------------------


def leaning(tokens: Tokens, logits: Any) -> Any:
    """A processor without state: what it favours depends on the place and on the last token."""
    logits[(7 * tokens[-1] + 3 * len(tokens)) % 40] += 9.0
    return logits


class Counting:
    """A processor with state: what it favours depends on every row it has seen."""

    def __init__(self, state: int = 1) -> None:
        self.state = state

    def __call__(self, tokens: Tokens, logits: Any) -> Any:
        self.state = (31 * self.state + tokens[-1] + int(np.argmax(logits))) % 10_007
        logits[self.state % 40] += 9.0
        return logits

    def clone(self) -> Counting:
        return Counting(self.state)


GRAMMARS = ("regex", "schema", "lark", "after")


@cache
def options(world: World) -> dict[str, Options]:
    """Every option, by name; each changes what the world says, or how it ends, or what is told of it."""
    greedy, drawn = (said(world, temperature) for temperature in (0.0, 1.0))
    vocab = opened(world).info.vocab_size
    found: dict[str, Options] = {
        "none": {},
        "temperature": {"temperature": 0.4},
        "top_k": {"top_k": 2},
        "top_p": {"top_p": 0.5},
        "min_p": {"min_p": 0.3},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": -0.9},
        "repetition": {"repetition_penalty": 1.3},
        "bias": {"logit_bias": {greedy[1]: -4.0, drawn[3]: -3.0, drawn[0]: 2.0}},
        "allowed": {"allowed_token_ids": [t for t in range(vocab) if t not in (greedy[4], drawn[4])]},
        "bad words": {"bad_words": [greedy[2:4], drawn[2:4], greedy[5:8], (drawn[6],)]},
        "processor": {"logits_processors": [leaning]},
        "stateful": {"logits_processors": [Counting()]},
        "min_tokens": {"min_tokens": world.max_tokens - 5},
        "stop": {"stop": [world.text(greedy[9:11]), world.text(drawn[9:11])]},
        "include": {"include_stop_str_in_output": True},
        "stop ids": {"stop_token_ids": [greedy[8], drawn[8]]},
        "ignore_eos": {"ignore_eos": True},
        "logprobs": {"logprobs": 3},
        "processed": {"logprobs": 3, "logprobs_mode": "processed_logprobs"},
        "prompt logprobs": {"prompt_logprobs": 2},
        "n": {"n": 3},
    }
    for name in world.grammars:
        found[name] = world.grammars[name]
    if "after" in found:
        found["after"] = {**found["after"], "grammar_after": world.text(greedy[2:4])}
        found["after id"] = {**found["after"], "grammar_after": drawn[3]}
    return found


@cache
def said(world: World, temperature: float) -> Tokens:
    """What the world says without options, in one go, as if nothing ended it."""
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=world.max_tokens, ignore_eos=True)
    engine = Engine(world.open(), NoDrafter())
    engine.add(world.prompt, params)
    (output,) = finished(engine).values()
    return output.outputs[0].token_ids


@dataclass(frozen=True, eq=False)
class Case:
    """One request of the matrix. names: of its options."""

    names: tuple[str, ...]
    params: SamplingParams

    def __repr__(self) -> str:
        return "+".join(self.names)


def cases(world: World, greedy: bool, every: int | None) -> list[Case]:
    """Every option alone, and of all pairs that do not contradict each other each `every`-th; None: no pairs."""
    named = options(world)
    wanted = [(name,) for name in named]
    if every is not None:
        pairs = [pair for pair in itertools.combinations(list(named)[1:], 2) if _agree(*(named[n] for n in pair))]
        wanted += pairs[::every] if every == 1 else random.Random(every).sample(pairs, len(pairs) // every)
    made = []
    for number, names in enumerate(wanted):
        merged = {key: value for name in names for key, value in named[name].items()}
        if greedy:
            rule = ("rejection", "block", "coupled")[number % 3]
            merged |= {"temperature": 0.0, "verification": rule}
        else:
            merged["verification"] = "coupled"
        merged = {"max_tokens": world.max_tokens, "seed": SEED, "draft_length": 1 + number % 5, **merged}
        made.append(Case(names, SamplingParams(**merged)))
    return made


def _agree(one: Options, other: Options) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys())


# --- drafters -----------------------------------------------------------------------------------------


class Adversary(PointDrafter):
    """Knows what comes and what must not: right drafts up to anywhere, then ids that are illegal, banned, terminal or
    odd, and more behind them; sometimes really drawn from a q that likes such ids; sometimes nothing."""

    name = "test-adversary"

    def __init__(self, streams: dict[int, Tokens], odd: Sequence[int], vocab_size: int) -> None:
        super().__init__(lambda tokens, budget: ())
        self._streams, self._odd, self._vocab_size = streams, list(odd), vocab_size

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Any]:
        answers = []
        for context, budget in zip(contexts, budgets, strict=True):
            assert self.observed[context.request_id] == list(context.tokens), "observe() missed tokens"
            start = len(context.tokens) - context.prompt_length
            rng = random.Random(1009 * context.request_id + start)
            right = self._streams[context.request_id][start : start + budget]
            right = (*right, *rng.choices(self._odd, k=budget - len(right)))
            answers.append(self._answer(context, right, rng))
        return answers

    def _answer(self, context: DraftContext, right: Tokens, rng: random.Random) -> Proposal:
        place, odd = rng.randrange(len(right)), rng.choice(self._odd)
        match rng.randrange(8):
            case 0:
                return Proposal.point(())
            case 1:
                return Proposal.point(rng.choices(self._odd, k=len(right)))
            case 2 | 3:
                return Proposal.point((*right[:place], odd, *right[place + 1 :]))
            case 4:
                return Proposal.point((*right[:place], odd, *right[place:-1]))
            case 5:
                return Proposal.point(right)
        return self._drawn(context, right)

    def _drawn(self, context: DraftContext, right: Tokens) -> Proposal:
        drafts: list[int] = []
        q: list[Distribution] = []
        ids = np.array(sorted({*right, *self._odd}), dtype=np.int64)
        for i, token in enumerate(right):
            probs = np.full(ids.size, 0.4 / ids.size) + 0.6 * (ids == token)
            row = Distribution(probs, self._vocab_size, ids)
            drafts.append(context.draws.pick(probs, len(context.tokens) + i, context.role, ids=ids, node=i))
            q.append(row)
        return Proposal.sampled(drafts, q)


Build = Callable[[World, Backend, dict[int, Tokens]], Drafter]


def second_model(world: World, target: Backend) -> ModelDrafter:
    return ModelDrafter(world.open(draft=True), "model:second", target)


def adversary(world: World, target: Backend, streams: dict[int, Tokens]) -> Drafter:
    named = options(world)
    words = [token for word in named["bad words"]["bad_words"] for token in word]
    info = target.info
    odd = [
        *info.stop_ids,
        0,
        1,
        info.vocab_size - 1,
        info.vocab_size // 2,
        *words,
        *named["stop ids"]["stop_token_ids"],
    ]
    return Adversary(streams, odd, info.vocab_size)


DRAFTERS: dict[str, Build] = {
    "lookup": lambda world, target, streams: LookupDrafter(2, 1),
    "model": lambda world, target, streams: second_model(world, target),
    "adversary": adversary,
    "forced+lookup": lambda world, target, streams: ForcedDrafter(LookupDrafter(2, 1)),
    # As the registry builds them.
    "forced+model": lambda world, target, streams: AutoDrafter(
        ForcedDrafter(), ForcedDrafter(second_model(world, target)), "forced+model"
    ),
    "auto": lambda world, target, streams: AutoDrafter(
        ForcedDrafter(LookupDrafter(2, 1)), ForcedDrafter(second_model(world, target)), "auto"
    ),
}

# --- running them -------------------------------------------------------------------------------------


def finished(engine: Engine) -> dict[int, RequestOutput]:
    """Everything to the end; owners check themselves after every step."""
    done: dict[int, RequestOutput] = {}
    steps = 0
    while engine.has_work:
        done.update((c.request_id, c.output) for c in engine.step() if c.output is not None)
        engine.check()
        steps += 1
        assert steps < 20_000, "the engine never finishes"
    return done


def run(world: World, wanted: Sequence[Case], drafter: str = "none", plain: Sequence[RequestOutput] = ()) -> list[Any]:
    """The output of every case, all in one engine. plain: what the adversary knows."""
    backend = world.open()
    streams: dict[int, Tokens] = {}
    built = NoDrafter() if drafter == "none" else DRAFTERS[drafter](world, backend, streams)
    engine = Engine(backend, built)
    ids = []
    for number, case in enumerate(wanted):
        ids.append(engine.add(world.prompt, case.params))
        for index in range(case.params.n if plain else 0):
            streams[ids[-1] + index] = plain[number].outputs[index].token_ids
    done = finished(engine)
    built.close()
    backend.close()
    return [done[i] for i in ids]


def differences(world: World, got: RequestOutput, wanted: RequestOutput) -> list[str]:
    """What a request was told with drafts, and not without."""
    found = []
    for one, plain in zip(got.outputs, wanted.outputs, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "seed"):
            if getattr(one, name) != getattr(plain, name):
                found.append(f"sample {one.index}: {name} {getattr(one, name)!r}, plainly {getattr(plain, name)!r}")
        if type(one.error) is not type(plain.error):
            found.append(f"sample {one.index}: {one.error!r}, plainly {plain.error!r}")
        if not same_logprobs(one.logprobs, plain.logprobs, world.exact):
            found.append(f"sample {one.index}: logprobs {one.logprobs}, plainly {plain.logprobs}")
        if len(one.kinds) != len(one.token_ids):
            found.append(f"sample {one.index}: {len(one.kinds)} kinds")
    if not same_logprobs(got.prompt_logprobs, wanted.prompt_logprobs, world.exact):
        found.append(f"prompt logprobs {got.prompt_logprobs}, plainly {wanted.prompt_logprobs}")
    spent = got.speculation
    counted = (sum(len(one.token_ids) for one in got.outputs), sum(one.kinds.count("accepted") for one in got.outputs))
    if (spent.emitted, spent.accepted) != counted:
        found.append(f"(emitted, accepted) = {(spent.emitted, spent.accepted)}, told were {counted}")
    return found


def same_logprobs(one: Any, other: Any, exact: bool) -> bool:
    """Whether two lists of logprobs agree: the same tokens in the same order, and the same numbers."""
    if one is None or other is None:
        return one is other
    if len(one) != len(other):
        return False
    if exact:
        return [x and list(x.items()) for x in one] == [x and list(x.items()) for x in other]
    return all(
        x is y or (list(x) == list(y) and all(math.isclose(x[t].logprob, y[t].logprob, abs_tol=1e-9) for t in x))
        for x, y in zip(one, other, strict=True)
    )


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, n=1, seed=seed)
