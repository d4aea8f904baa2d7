"""`paceline generate`: one prompt, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidInput
from ..params import SamplingParams
from ..types import StreamChunk
from .exits import Debug, ReportedFailure, describe, say_error
from .loading import open_session
from .options import ModelOptions, OutputFormat, SamplingOptions
from .prompts import read_prompt
from .report import answer_as_json, error_as_json, print_json, print_stats
from .streaming import TextWriter, as_request, run_request


def generate(
    *,
    sampling: SamplingOptions,
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

    The text goes to stdout, everything else to stderr. `--format json` writes one object: text, token_ids,
    token_kinds, finish_reason, usage, speculation, timing (seconds), model, drafter, seed, verification, and
    error where there is one.
    """
    as_json = output_format is OutputFormat.JSON
    try:
        if as_json and show_drafts:
            raise InvalidInput("--show-drafts colours text; with --format json read the field token_kinds instead")
        params = sampling.params()
        text = read_prompt(prompt, prompt_file)
        error = _answer(models, params, text, chat, as_json=as_json, stats=stats, show_drafts=show_drafts)
    except Exception as failure:
        if as_json and not isinstance(failure, BrokenPipeError):
            print_json({"model": models.model, "drafter": models.drafter, "error": error_as_json(failure)})
        raise
    if error is not None:
        say_error(describe(error))
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
) -> Exception | None:
    """Load, run, write; the error that ended the request, if one did."""
    with open_session(models) as session:
        request = as_request(session, text, chat)
        if as_json:
            answer = run_request(session, request, params, _drop)
            print_json(answer_as_json(session, answer, params))
        else:
            writer = TextWriter(show_drafts=show_drafts)
            writer.legend()
            try:
                answer = run_request(session, request, params, writer.write)
            finally:
                writer.end()
        if stats:
            print_stats(answer)
        return answer.output.outputs[0].error


def _drop(chunk: StreamChunk) -> None:
    """JSON is written at the end; nothing streams."""
