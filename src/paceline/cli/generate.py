"""`paceline generate`: one prompt, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidInput
from ..params import SamplingParams
from ..types import StreamChunk
from .answer import answer_as_json, notes_on
from .constraints import ConstraintOptions
from .exits import Debug, ReportedFailure, describe, say_error, say_note
from .loading import open_session
from .logprobs import print_logprobs
from .options import ModelOptions, OutputFormat
from .prompts import is_on_stdin, read_prompt
from .report import error_as_json, print_json, print_stats
from .sampling import SamplingOptions
from .streaming import InTurn, TextWriter, as_request, run_request


def generate(
    *,
    sampling: SamplingOptions,
    constraints: ConstraintOptions,
    models: ModelOptions,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read it from a UTF-8 file; - is standard input, also the default."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            metavar="",
            help="Put the prompt into the model's chat template, or continue it as it stands. "
            "Default: --chat where the model has a template.",
        ),
    ] = None,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="Text as it is made, or one JSON object at the end.")
    ] = OutputFormat.TEXT,
    stats: Annotated[bool, typer.Option("--stats", metavar="", help="Speed and acceptance, on stderr.")] = False,
    show_drafts: Annotated[
        bool,
        typer.Option("--show-drafts", metavar="", help="Colour accepted, recovered and bonus tokens, on a terminal."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt.

    The text goes to stdout, everything else to stderr; with `--n` the texts go there one after another. `--format json`
    writes one object: model, drafter, draft_length, verification, usage, speculation, timing (seconds), error where
    there is one, and `outputs`, a list with one object for each sample: index, seed, text, token_ids, token_kinds,
    finish_reason, stop_reason, logprobs, error. The fields of the first sample stand in the object itself too.
    `logprobs`, and `prompt_logprobs` of the prompt, have one object for each token: token_id, text, logprob (null for
    minus infinity), rank, and `top`, a list of the same for the likeliest tokens. The prompt's first token has null.
    """
    as_json = output_format is OutputFormat.JSON
    try:
        if as_json and show_drafts:
            raise InvalidInput("--show-drafts colours text; with --format json read the field token_kinds instead")
        taken = "the prompt" if is_on_stdin(prompt, prompt_file) else None
        params = sampling.params(**constraints.keywords(stdin_taken=taken))
        text = read_prompt(prompt, prompt_file)
        errors = _answer(models, params, text, chat, as_json=as_json, stats=stats, show_drafts=show_drafts)
    except Exception as failure:
        if as_json and not isinstance(failure, BrokenPipeError):
            print_json({"model": models.model, "drafter": models.drafter, "error": error_as_json(failure)})
        raise
    for said in errors:
        say_error(said)
    if errors:
        raise ReportedFailure


def _answer(
    models: ModelOptions,
    params: SamplingParams,
    text: str,
    chat: bool | None,
    *,
    as_json: bool,
    stats: bool,
    show_drafts: bool,
) -> list[str]:
    """Load, run, write; the errors that ended samples."""
    with open_session(models, params.n) as session:
        request = as_request(session, text, chat)
        if as_json:
            answer = run_request(session, request, params, _drop)
            print_json(answer_as_json(session, answer, params))
        else:
            writer = TextWriter(show_drafts=show_drafts)
            writer.legend()
            try:
                answer = run_request(session, request, params, InTurn(writer, params.n).write)
            finally:
                writer.end()
            print_logprobs(answer.output, params)
        for note in notes_on(answer.output, params):
            say_note(note)
        if stats:
            print_stats(answer)
        failed = [one for one in answer.output.outputs if one.error is not None]
        return [("" if params.n == 1 else f"sample {one.index}: ") + describe(one.error) for one in failed if one.error]


def _drop(chunk: StreamChunk) -> None:
    """JSON is written at the end; nothing streams."""
