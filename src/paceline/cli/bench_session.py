"""What every command of `paceline bench` opens first: prompts, model, drafters; and the head of its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParams, UnsupportedOption
from .bench_options import ContenderOptions, GuardOptions, WorkloadOptions
from .exits import say_note
from .loading import is_toy, locate, progress_bar
from .options import BackendOptions, ModelOptions

if TYPE_CHECKING:
    from ..bench.guard import Guard
    from ..bench.runs import Contender, Prompts, Workload
    from ..bench.target import Setting, Target

MAX_LEN = 2048
"""The context, where nobody says; prompts that do not fit are left out and counted."""


@dataclass(frozen=True)
class Bench:
    """Everything open that a command measures with. path: of the model, or its name."""

    path: str
    target: Target
    settings: Sequence[Setting]
    workload: Workload
    prompts: Prompts
    guard: Guard
    facts: dict[str, Any]


@contextmanager
def open_bench(
    model: str,
    backend: BackendOptions,
    work: WorkloadOptions,
    guard: GuardOptions,
    settings: Sequence[Setting],
    *,
    concurrencies: Sequence[int] = (1,),
    repeats: int = 1,
    unit_size: int | None = None,
    kv_tokens: int | None = None,
) -> Iterator[Bench]:
    """Read the prompts, open model and drafters, tokenise; what can be refused is refused before anything is loaded."""
    from ..bench.guard import Guard
    from ..bench.prompts import BUILT_IN, in_categories, read_questions
    from ..bench.runs import Workload, tokenised
    from ..bench.target import open_target
    from ..draft import parse_drafter

    files = work.prompts or [BUILT_IN]
    questions = in_categories([q for file in files for q in read_questions(file)], work.category or [])
    workload = Workload(
        questions=questions,
        params=work.params(),
        temperatures=work.temperatures,
        concurrencies=concurrencies,
        repeats=repeats,
        limit=work.limit,
        max_prompt_tokens=work.max_prompt_tokens,
        unit_size=unit_size,
        chat=work.chat,
        seed=work.seed,
    )
    named = {s.drafter: parse_drafter(s.drafter) for s in settings if s.drafter != "none"}
    if backend.threads is not None and is_toy(model):
        raise UnsupportedOption(f"--threads {backend.threads} is not an option of a toy model; leave it out")
    most = max(concurrencies)
    # Without the prefix cache: repeats of a prompt would not read it again.
    options = {**backend.keywords(), "prefix_cache": False, "max_seqs": most, "max_len": backend.max_len or MAX_LEN}
    options["kv_tokens"] = kv_tokens or max(4, most) * options["max_len"]
    with ExitStack() as stack:
        with progress_bar() as report:
            path = locate(_as_model(model, backend), model, report)
            specs = {}
            for name, spec in named.items():
                kind = name.removesuffix(spec.argument)
                located = locate(_as_model(model, backend), spec.argument, report) if spec.argument else ""
                specs[name] = f"{kind}{located}" if located else name
            report(f"loading {model}", 0, None)
            clip = backend.max_len is None
            target = stack.enter_context(open_target(path, specs, clip_max_len=clip, progress=report, **options))
        prompts = tokenised(workload, target.backend.tokenizer, target.backend.info.max_len)
        watch = Guard(
            on=not guard.no_guard,
            budget_seconds=guard.guard_wait,
            say=lambda message: say_note(f"{message} (--no-guard does not wait)"),
        )
        facts = _facts(model, path, target, options, work, workload, prompts)
        yield Bench(path, target, settings, workload, prompts, watch, facts)


def _as_model(model: str, backend: BackendOptions) -> ModelOptions:
    return ModelOptions(model=model, backend=backend.backend)


def _facts(
    model: str,
    path: str,
    target: Target,
    options: dict[str, Any],
    work: WorkloadOptions,
    workload: Workload,
    prompts: Prompts,
) -> dict[str, Any]:
    """The head of a report."""
    from ..bench.machine import machine, model_facts
    from ..bench.report import SCHEMA

    backend = options["backend"]
    known = {**options, "max_len": target.backend.info.max_len, "kv_tokens": target.backend.info.kv_tokens}
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "model": model_facts(model, path, backend, known),
        "workload": {
            "files": [file.name for file in work.prompts or []] or ["built in"],
            "prompts": {name: len(pairs) for name, pairs in prompts.groups.items()},
            "left_out": dict(prompts.left_out),
            "template": prompts.template,
            "repeats": workload.repeats,
            "concurrencies": list(workload.concurrencies),
            "sampling": work.sampling_facts(),
        },
    }


def report_of(
    bench: Bench, kind: str, contenders: Sequence[Contender], *, stopped: str | None = None, **rest: Any
) -> dict[str, Any]:
    """A report with its head. stopped: why it does not hold all that was planned; rest: what the command found."""
    from ..bench.report import unfinished

    return {
        **bench.facts,
        "kind": kind,
        "stopped": stopped,
        "guard": bench.guard.as_json(),
        "contenders": [contender.describe() for contender in contenders],
        "warnings": unfinished(stopped),
        **rest,
    }


def settings_of(chosen: ContenderOptions) -> list[Setting]:
    """The contenders. Raises InvalidParams where none is left."""
    from ..bench.target import settings

    drafters = list(dict.fromkeys(chosen.drafter or ["auto"]))
    lengths = list(dict.fromkeys(chosen.draft_length or []))
    found = settings(drafters, lengths, plain=chosen.plain, adaptive=chosen.adaptive)
    if not found:
        raise InvalidParams("nothing is left to measure: --no-plain, --no-adaptive and no --draft-length")
    return found
