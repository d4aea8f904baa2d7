"""Paceline's own contenders: one open model, with every drafter and draft length that is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, cast

from ..draft import NoDrafter, open_drafter
from ..errors import InvalidParams, InvariantError, UnsupportedOption
from ..llm import LLM
from ..models import Progress
from ..opening import LACKS, Options, chosen_backend, open_backend
from ..types import Backend, Drafter, RequestOutput
from .runs import Ask, Result

PLAIN = "plain"
ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Setting:
    """How Paceline runs. drafter: a name, "none" for plain. draft_length: None is adaptive, K is fixed."""

    name: str
    drafter: str
    draft_length: int | None


class Target:
    """An open backend, the drafters that go with it by name, and an LLM for each contender and each concurrency."""

    def __init__(self, backend: Backend, drafters: Mapping[str, Drafter]) -> None:
        self.backend = backend
        self.drafters: dict[str, Drafter] = {"none": NoDrafter(), **drafters}
        self._llms: dict[tuple[str, str, int], LLM] = {}

    def llm(self, drafter: str, max_seqs: int, contender: str = "") -> LLM:
        """The same one every time, so that what a contender's has learnt stays, and stays its own. One at a time may
        have requests."""
        key = (contender, drafter, max_seqs)
        if key not in self._llms:
            self._llms[key] = self.fresh_llm(drafter, max_seqs)
        return self._llms[key]

    def fresh_llm(self, drafter: str, max_seqs: int) -> LLM:
        """One of the caller's own, to hand over or to close; model and drafter stay open."""
        slots = self.backend.info.max_slots
        if max_seqs > slots:
            raise InvalidParams(f"{max_seqs} requests at once; allowed: at most {slots} on {self.backend.info.model}")
        return LLM(self.backend, drafter=self.drafters[drafter], max_seqs=max_seqs)

    def close(self) -> None:
        """Close its LLMs; model and drafters are closed by whoever opened them."""
        for llm in self._llms.values():
            llm.close()


@contextmanager
def open_target(
    model: str,
    drafters: Mapping[str, str],
    *,
    backend: str = "auto",
    clip_max_len: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[Target]:
    """Open a model, and drafters: the name reports give them -> what LLM takes.

    options: as of LLM, None is unset. clip_max_len: a max_len beyond what the model was trained for means that.
    """
    given = cast(Options, {name: value for name, value in options.items() if value is not None})
    with ExitStack() as opened:
        target = open_backend(model, backend, clip_max_len=clip_max_len, progress=progress, **given)
        opened.callback(target.close)
        if drafters and not target.info.can_truncate:
            raise UnsupportedOption(f"speculation is off for {model}: {target.info.no_speculation_reason}")

        def open_one(name: str) -> Backend:
            rest = {**given, "max_seqs": target.info.max_slots, "max_len": target.info.max_len}
            lacks = LACKS[chosen_backend(name, backend)]
            had = cast(Options, {k: v for k, v in rest.items() if k not in lacks and k not in ("compile", "kv_tokens")})
            return open_backend(name, backend, clip_max_len=True, progress=progress, **had)

        found: dict[str, Drafter] = {}
        for name, spec in drafters.items():
            found[name] = open_drafter(spec, target, open_one)
            opened.callback(found[name].close)
        with_drafters = Target(target, found)
        opened.callback(with_drafters.close)
        yield with_drafters


def settings(
    drafters: Sequence[str], draft_lengths: Sequence[int], *, plain: bool = True, adaptive: bool = True
) -> list[Setting]:
    """Plain, and with each drafter each fixed length and adaptive. Drafters are named where there are several."""
    found = [Setting(PLAIN, "none", 0)] if plain else []
    for drafter in drafters:
        prefix = f"{drafter} " if len(drafters) > 1 else ""
        found += [Setting(f"{prefix}K = {k}", drafter, k) for k in draft_lengths]
        found += [Setting(f"{prefix}{ADAPTIVE}", drafter, None)] if adaptive else []
    return found


class Own:
    """A contender: the target with one setting."""

    sessions = ()

    def __init__(self, target: Target, setting: Setting) -> None:
        self._target, self.setting, self.name = target, setting, setting.name

    def run(self, asks: Sequence[Ask], concurrency: int) -> tuple[float, tuple[Result, ...]]:
        """See Contender. A request that fails raises its error: there is nothing to compare then."""
        llm = self._target.llm(self.setting.drafter, concurrency, self.name)
        prompts = [ask.ids for ask in asks]
        params = [replace(ask.params, draft_length=self.setting.draft_length) for ask in asks]
        start = perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = perf_counter() - start
        return seconds, tuple(_result(ask, output, seconds) for ask, output in zip(asks, outputs, strict=True))

    def describe(self) -> dict[str, Any]:
        """Drafter and draft length (None: adaptive)."""
        return {
            "name": self.name,
            "peer": False,
            "drafter": self.setting.drafter,
            "draft_length": self.setting.draft_length,
        }


def emitted_tokens(output: RequestOutput) -> int:
    """Tokens of the answer, without the id that ended it: engines differ in whether they hand that out."""
    answer = output.outputs[0]
    if answer.error is not None:
        raise answer.error
    return len(answer.token_ids) - (answer.finish_reason == "stop" and isinstance(answer.stop_reason, int))


def _result(ask: Ask, output: RequestOutput, seconds: float) -> Result:
    tokens, answer = emitted_tokens(output), output.outputs[0]
    if output.prompt_token_ids != ask.ids:
        raise InvariantError(f"question {ask.question.question_id}: the engine read another prompt than it was given")
    return Result(
        question_id=ask.question.question_id,
        prompt_tokens=len(ask.ids),
        tokens=tokens,
        text=answer.text,
        finish_reason=answer.finish_reason,
        decode_seconds=seconds - output.speculation.prefill_seconds,
        decode_tokens=tokens,
        speculation=output.speculation,
        preemptions=output.num_preemptions,
    )
