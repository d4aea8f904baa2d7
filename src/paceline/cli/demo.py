"""`paceline demo`: the same prompt with and without drafting, timed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import InvalidParams
from ..params import SamplingParams
from ..types import RequestOutput
from .exits import Debug
from .loading import Session, open_session
from .options import BackendOptions, ModelOptions, OutputFormat
from .prompts import decode, read_prompt
from .report import print_json, print_table
from .streaming import Message, TextWriter, as_request, run_request

if TYPE_CHECKING:
    from ..llm import LLM

OWN_PROMPT = Path(__file__).with_name("demo_prompt.txt")
OWN_STOP = "```"
OWN_DRAFT_LENGTH = 12  # the best of 4, 6, 8, 10 and 12 for this prompt and smollm2, on two Zen 4 cores
OWN_TASK = "write a class again, with a parameter renamed"

WHY_TEXTS_DIFFER = (
    "Not a fault of the rule: floating-point kernels add in another order when several tokens are scored at once, "
    "so logits move a little, and where two tokens are almost equally likely the other one may win. "
    "Quantised weights on one thread do not do that: --model smollm2:q4_0 --threads 1 --draft-length 7"
)


@dataclass
class Series:
    """Repeated runs of one prompt, the same way each time."""

    name: str
    llm: LLM
    params: SamplingParams
    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, request: str | Sequence[Message]) -> None:
        """Once more, timed."""
        start = perf_counter()
        with self.llm.stream(request, self.params) as stream:
            output = [chunk.output for chunk in stream][-1]
        assert output is not None
        if output.outputs[0].error is not None:
            raise output.outputs[0].error
        self.seconds.append(perf_counter() - start)
        self.outputs.append(output)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each run, the prompt's own forwards left out."""
        return [
            output.speculation.emitted / (seconds - output.speculation.prefill_seconds)
            for output, seconds in zip(self.outputs, self.seconds, strict=True)
        ]

    @property
    def tokens_per_step(self) -> float:
        """Of all runs together, bonus and recovered included."""
        stats = [output.speculation for output in self.outputs]
        return sum(s.emitted for s in stats) / sum(s.steps for s in stats)

    def as_json(self) -> dict[str, Any]:
        """Its numbers: one per run, and the median of the speeds."""
        return {
            "drafter": self.name,
            "tokens_per_second": median(self.speeds),
            "tokens_per_second_of_runs": self.speeds,
            "seconds_of_runs": self.seconds,
            "tokens_per_step": self.tokens_per_step,
            "tokens": len(self.outputs[0].outputs[0].token_ids),
            "text": self.outputs[0].outputs[0].text,
        }


def demo(
    *,
    settings: BackendOptions,
    model: Annotated[str, typer.Option("--model", "-m", metavar="M", help="As for generate.")] = "smollm2",
    drafter: Annotated[str, typer.Option("--drafter", "-d", metavar="D", help="As for generate.")] = "lookup",
    draft_length: Annotated[
        int, typer.Option("--draft-length", "-k", metavar="K", help="Draft tokens per step.", min=1)
    ] = OWN_DRAFT_LENGTH,
    runs: Annotated[int, typer.Option(metavar="N", help="Runs of each kind, in turn.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.", min=1)] = 400,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another prompt, put into the model's chat template where it has one."),
    ] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="A table, or JSON.")] = OutputFormat.TEXT,
    debug: Debug = False,
) -> None:
    """Time a prompt with and without drafting, at temperature 0.

    The prompt is a small code edit, the kind of task that prompt lookup is good at; other prompts gain less.
    Prints tokens per second, tokens per step, and whether the two texts are equal.
    """
    if drafter == "none":
        raise InvalidParams("drafter = 'none'; a demo compares drafting with none, name another one")
    as_json = output_format is OutputFormat.JSON
    text = decode(OWN_PROMPT.read_bytes(), OWN_PROMPT.name) if prompt_file is None else read_prompt(None, prompt_file)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        draft_length=draft_length,
        stop=OWN_STOP if prompt_file is None else None,
    )
    with open_session(ModelOptions(model=model, drafter=drafter, **dataclasses.asdict(settings))) as session:
        request = as_request(session, text, False if prompt_file is None else None)
        if not as_json:
            _show_answer(session, request, params, OWN_TASK if prompt_file is None else str(prompt_file))
        plain, drafting = measure(session, request, params, runs)
    result = compare(session, plain, drafting)
    if as_json:
        print_json(result)
    else:
        _print_result(result, runs)


def measure(
    session: Session, request: str | Sequence[Message], params: SamplingParams, runs: int
) -> tuple[Series, Series]:
    """Both kinds in turn, after one untimed run of each, so that a machine that slows down slows both."""
    from ..llm import LLM

    plain = Series("none", LLM(session.llm.backend, drafter="none", max_seqs=1), params)
    drafting = Series(session.drafter, session.llm, params)
    for series in (plain, drafting):
        series.run(request)
        series.outputs.clear()
        series.seconds.clear()
    for i in range(runs):
        for series in (plain, drafting) if i % 2 == 0 else (drafting, plain):
            series.run(request)
    return plain, drafting


def compare(session: Session, plain: Series, drafting: Series) -> dict[str, Any]:
    """The object of `--format json`. first_difference: index of the first token that differs, or None."""
    without, with_drafts = plain.outputs[0].outputs[0], drafting.outputs[0].outputs[0]
    same_length = min(len(without.token_ids), len(with_drafts.token_ids))
    differences = [i for i in range(same_length) if without.token_ids[i] != with_drafts.token_ids[i]]
    equal = without.token_ids == with_drafts.token_ids
    first = None if equal else (differences or [same_length])[0]
    return {
        "model": session.model,
        "draft_length": drafting.params.draft_length,
        "prompt_tokens": len(plain.outputs[0].prompt_token_ids),
        "without": plain.as_json(),
        "with": drafting.as_json(),
        "speedup": median(drafting.speeds) / median(plain.speeds),
        "equal": equal,
        "first_difference": first,
    }


def _show_answer(session: Session, request: str | Sequence[Message], params: SamplingParams, task: str) -> None:
    """The answer as it is made, for somebody who watches."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return
    console.print(f"{session.model}: {task}", style="bold")
    writer = TextWriter(show_drafts=True)
    writer.legend()
    run_request(session, request, params, writer.write)
    writer.end()
    console.print()


def _print_result(result: dict[str, Any], runs: int) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    table.add_column(result["model"], no_wrap=True)
    table.add_column("no drafting", justify="right", no_wrap=True)
    table.add_column(f"{result['with']['drafter']}, K = {result['draft_length']}", justify="right", no_wrap=True)
    both = (result["without"], result["with"])
    table.add_row("tokens/s, median", *(f"{one['tokens_per_second']:.1f}" for one in both))
    table.add_row("slowest and fastest", *(_span(one["tokens_per_second_of_runs"]) for one in both))
    table.add_row("tokens per step", *(f"{one['tokens_per_step']:.2f}" for one in both))
    table.add_row("tokens", *(str(one["tokens"]) for one in both))
    table.add_row("seconds with prompt", *(f"{median(one['seconds_of_runs']):.2f}" for one in both))
    print_table(table, sys.stdout)
    lines = ["", *_conclusions(result, runs)]
    console.print("\n".join(lines), soft_wrap=not console.is_terminal)


def _conclusions(result: dict[str, Any], runs: int) -> Iterator[str]:
    turns = "run" if runs == 1 else "runs in turn"
    yield (
        f"speedup {result['speedup']:.2f}x in tokens/s ({runs} {turns} each; the {result['prompt_tokens']} tokens "
        "of the prompt are not counted; tokens per step include bonus and recovered ones)"
    )
    if result["equal"]:
        yield f"texts equal: yes, all {result['with']['tokens']} tokens"
    else:
        yield f"texts equal: no, they differ first at token {result['first_difference']}. {WHY_TEXTS_DIFFER}"


def _span(speeds: list[float]) -> str:
    return f"{min(speeds):.1f} - {max(speeds):.1f}"
