"""The nouns of a benchmark: what is asked, who answers, what came back. And timing: everybody in turn.

question    a prompt, with an id and a category
ask         a question as a request: token ids and sampling params, the same for everybody
contender   who answers: a setting of ours (plain, fixed K, adaptive), or a peer
unit        the asks that are made at once; at concurrency 1 a single one
run         one contender, one unit, timed
cell        one line of a report: a contender in one category at one temperature and concurrency
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ..errors import InvalidInput, PacelineError, UnsupportedOption
from ..params import SamplingParams
from ..types import SpeculationStats, Tokenizer
from .guard import Guard, Load
from .prompts import Question, by_category, spread_out

T = TypeVar("T")
Report = Callable[[str, int, int], None]
"""report(what, done, total): how far it is."""
WARM_UP_TOKENS = 16
Prompt = tuple[Question, tuple[int, ...]]
"""A question and its token ids."""
Unit = tuple[str, list[Prompt]]
"""(category, the prompts that are asked at once)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question as a request. ids: the prompt's tokens, by the target's own tokenizer and chat template."""

    question: Question
    ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Result:
    """What came back for one ask.

    tokens: emitted, without the id that ended it. decode_seconds, decode_tokens: without the time to read the prompt,
    and the tokens made in it; None where a peer does not say. speculation: None where a peer does not say.
    """

    question_id: str
    prompt_tokens: int
    tokens: int
    text: str
    finish_reason: str
    decode_seconds: float | None = None
    decode_tokens: int | None = None
    speculation: SpeculationStats | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One contender on one unit, timed. seconds: wall time of the whole unit, prompts included. load: of the guard.

    error: why a peer has no results.
    """

    contender: str
    category: str
    temperature: float
    concurrency: int
    unit: int
    repeat: int
    seconds: float
    results: tuple[Result, ...]
    load: Load | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Of all its results."""
        return sum(result.tokens for result in self.results)

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included; 0.0 where nothing was emitted."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second behind the prompt; None where it is unknown, or several run at once."""
        if self.concurrency != 1 or any(r.decode_seconds is None or not r.decode_tokens for r in self.results):
            return None
        seconds = sum(r.decode_seconds or 0.0 for r in self.results)
        return sum(r.decode_tokens or 0 for r in self.results) / seconds if seconds > 0 else None

    @property
    def stats(self) -> SpeculationStats | None:
        """Of all its results together; None where one does not say."""
        known = [result.speculation for result in self.results if result.speculation is not None]
        return SpeculationStats.sum(known) if known and len(known) == len(self.results) else None

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Run:
        """Of what as_json gave. Raises InvalidInput where it is something else."""
        try:
            results = tuple(
                Result(**{**r, "speculation": r["speculation"] and SpeculationStats(**r["speculation"])})
                for r in value["results"]
            )
            load = Load(**value["load"]) if value["load"] else None
            return cls(**{**value, "results": results, "load": load})
        except (TypeError, KeyError) as error:
            raise InvalidInput(f"a run of a bench report has other fields than it should: {error!r}") from None


class Contender(Protocol):
    """Who answers. name: of its column. sessions: process sessions it computes in, beside this process."""

    @property
    def name(self) -> str: ...

    @property
    def sessions(self) -> Sequence[int]: ...

    def run(self, asks: Sequence[Ask], concurrency: int) -> tuple[float, tuple[Result, ...]]:
        """All asks, `concurrency` at once, and the seconds that took. Raises PeerError where a peer fails, RefusedError
        where it can go on with others."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a report says about it."""
        ...


class PeerError(PacelineError):
    """A peer failed: it did not start, did not answer, or answered something else than the protocol says."""


class RefusedError(PeerError):
    """A peer cannot do what it was asked, says so, and stays open for what it can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What everybody is asked.

    params: but for temperature and seed, which every ask has of its own. chat: the model's chat template, raw text
    (False), or the template where there is one (None). limit: questions of each category, evenly spaced over those
    that fit. unit_size: asks of a unit; None is as many as run at once. seed: of the first ask.
    """

    questions: Sequence[Question]
    params: SamplingParams
    temperatures: Sequence[float] = (0.0,)
    concurrencies: Sequence[int] = (1,)
    repeats: int = 1
    limit: int | None = None
    max_prompt_tokens: int | None = None
    unit_size: int | None = None
    chat: bool | None = None
    seed: int = 0

    def size(self, concurrency: int) -> int:
        """Asks of a unit at this concurrency."""
        return max(self.unit_size or concurrency, concurrency)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokenised questions by category. left_out: how many of each did not fit. template: whether there was one."""

    groups: Mapping[str, Sequence[Prompt]]
    left_out: Mapping[str, int]
    template: bool


def tokenised(workload: Workload, tokenizer: Tokenizer, max_len: int) -> Prompts:
    """The workload's questions as token ids. Raises InvalidInput where none fits into max_len with its answer."""
    template = workload.chat is not False and _has_template(tokenizer, workload.chat)
    room = max_len - (workload.params.max_tokens or 1)
    room = min(room, workload.max_prompt_tokens or room)
    groups, left_out = {}, {}
    for category, questions in by_category(workload.questions).items():
        pairs = [(question, _ids(tokenizer, question.text, template)) for question in questions]
        fitting = [pair for pair in pairs if len(pair[1]) <= room]
        left_out[category] = len(pairs) - len(fitting)
        if fitting:
            groups[category] = spread_out(fitting, workload.limit)
    if not groups:
        raise InvalidInput(
            f"no prompt fits: allowed are {room} tokens, {max_len} of the context less {workload.params.max_tokens} "
            "for the answer; raise --max-len or lower --max-tokens"
        )
    return Prompts(groups, {name: n for name, n in left_out.items() if n}, template)


def _has_template(tokenizer: Tokenizer, chat: bool | None) -> bool:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    except UnsupportedOption:
        if chat:
            raise
        return False
    return True


def _ids(tokenizer: Tokenizer, text: str, template: bool) -> tuple[int, ...]:
    if not template:
        return tuple(tokenizer.encode(text))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tuple(tokenizer.encode(prompt, parse_special=True))


def units(prompts: Prompts, size: int) -> Iterator[Unit]:
    """Each category's prompts, `size` at a time; its last unit is filled up from its beginning."""
    for category, pairs in prompts.groups.items():
        for start in range(0, len(pairs), size):
            yield category, [pairs[i % len(pairs)] for i in range(start, start + size)]


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """What was measured: all that was planned, or what there was when error came (Ctrl-C, or what an engine raised)."""

    made: list[T]
    planned: int
    error: BaseException | None = None

    @property
    def stopped(self) -> str | None:
        """Why it is not all, in words; None where it is."""
        if self.error is None:
            return None
        so_far = f"after {len(self.made)} of {self.planned} runs"
        if isinstance(self.error, KeyboardInterrupt):
            return f"interrupted {so_far}"
        return f"stopped {so_far} by {type(self.error).__name__}: {self.error}"


def kept(runs: Iterator[T], planned: int) -> Measured[T]:
    """All of them, or those before Ctrl-C or an error: an hour of measuring is not thrown away for its last minute.

    Raises that error where there were none.
    """
    made: list[T] = []
    try:
        for run in runs:
            made.append(run)
    except (Exception, KeyboardInterrupt) as error:
        if not made:
            raise
        return Measured(made, planned, error)
    return Measured(made, planned)


def measure(
    contenders: Sequence[Contender], workload: Workload, prompts: Prompts, guard: Guard, report: Report
) -> Measured[Run]:
    """Every contender on every unit, in turn, so that what slows the machine slows everybody.

    Before each temperature and concurrency everybody makes a few tokens that do not count. Who goes first changes from
    unit to unit. All get the same ids, params and seeds. A peer that fails has a run with an error, and no more turns;
    one that refuses, no more of that temperature and concurrency. What ends it early leaves what was measured; see
    kept().
    """
    plan = [
        (concurrency, temperature, list(units(prompts, workload.size(concurrency))))
        for concurrency in workload.concurrencies
        for temperature in workload.temperatures
    ]
    planned = sum(len(each) * workload.repeats * len(contenders) for _, _, each in plan)
    total = planned + len(plan) * len(contenders)

    def turns() -> Iterator[Run]:
        done = 0
        failed: set[str] = set()
        for concurrency, temperature, each in plan:
            refused: set[str] = set()
            for repeat, index, (category, pairs) in _rounds(each, workload.repeats):
                asks = _asks(pairs, workload, temperature, repeat, index)
                for contender in rotated(contenders, index + repeat):
                    report(f"{category}, temperature {temperature:g}, {concurrency} at once", done, total)
                    done += 1
                    if contender.name in failed | refused:
                        continue
                    run = Run(contender.name, category, temperature, concurrency, index, repeat, 0.0, ())
                    try:
                        run = _timed(contender, run, asks, guard)
                    except PeerError as error:
                        (refused if isinstance(error, RefusedError) else failed).add(contender.name)
                        run = replace(run, error=str(error))
                    if repeat >= 0 or run.error is not None:
                        yield run
        report("", total, total)

    return kept(turns(), planned)


def _rounds(each: Sequence[Unit], repeats: int) -> Iterator[tuple[int, int, Unit]]:
    """(repeat, index, unit): the first unit as repeat -1, which warms up; then all of them, as often as is said."""
    yield -1, 0, each[0]
    for repeat in range(repeats):
        for index, unit in enumerate(each):
            yield repeat, index, unit


def rotated(contenders: Sequence[T], by: int) -> list[T]:
    """All of them in their order, but for who goes first."""
    first = by % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def _asks(pairs: Sequence[Prompt], workload: Workload, temperature: float, repeat: int, index: int) -> list[Ask]:
    seed = workload.seed + 1_000 * max(repeat, 0) + 10_000_000 * index
    params = replace(workload.params, temperature=temperature)
    return [Ask(question, ids, replace(params, seed=seed + i)) for i, (question, ids) in enumerate(pairs)]


def _timed(contender: Contender, run: Run, asks: Sequence[Ask], guard: Guard) -> Run:
    if run.repeat < 0:
        contender.run([_short(ask) for ask in asks], run.concurrency)
        return run
    work = partial(contender.run, asks, run.concurrency)
    (seconds, results), load = guard.run(work, contender.sessions)
    return replace(run, seconds=seconds, results=results, load=load)


def _short(ask: Ask) -> Ask:
    tokens = min(ask.params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    return Ask(ask.question, ask.ids, replace(ask.params, max_tokens=tokens))
