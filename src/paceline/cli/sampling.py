"""SamplingParams on the command line, but for what makes tokens illegal, which is in `constraints`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..params import SamplingParams
from .options import SPECULATION

SAMPLING = "Sampling"
STOPPING = "Stopping"
SAMPLES = "Samples and logprobs"

DEFAULTS = SamplingParams()
NO_LIMIT = "none"


def parse_max_tokens(text: str) -> int | str:
    """A number of tokens, or the word `none`."""
    if text == NO_LIMIT:
        return NO_LIMIT
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number; give one, or {NO_LIMIT!r} for no limit") from None


def parse_ids(option: str, items: list[str] | None) -> list[int] | None:
    """Token ids, each item one of them or several with commas between. None where there are no items."""
    parts = [part.strip() for item in items or () for part in item.split(",")]
    try:
        return [int(part) for part in parts] or None
    except ValueError:
        given = " ".join(items or ())
        raise typer.BadParameter(f"{option} {given!r}: give token ids, such as 42 or 42,43") from None


def parse_bias(items: list[str]) -> dict[int, float]:
    """`ID=BIAS`, or several with commas between, each token once.

    Whether ids and numbers are in range is SamplingParams' affair.
    """
    biases: dict[int, float] = {}
    for item in (part.strip() for given in items for part in given.split(",")):
        token, equals, bias = item.partition("=")
        try:
            if not equals:
                raise ValueError
            key, value = int(token), float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"--logit-bias {item!r} is not ID=BIAS, a token id and a number such as 42=-5"
            ) from None
        if key in biases:
            raise typer.BadParameter(f"--logit-bias names token {key} twice; give each token once")
        biases[key] = value
    return biases


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """SamplingParams on the command line, constraints excepted: the same names, defaults and ranges."""

    max_tokens: Annotated[
        Any,
        typer.Option(
            parser=parse_max_tokens,
            metavar=f"N|{NO_LIMIT}",
            help=f"Most tokens to generate; {NO_LIMIT} is until the context is full.",
            rich_help_panel=STOPPING,
        ),
    ] = str(DEFAULTS.max_tokens)
    min_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Before so many tokens nothing ends the text but --max-tokens.", rich_help_panel=STOPPING
        ),
    ] = DEFAULTS.min_tokens
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End the text before this string. May be repeated.", rich_help_panel=STOPPING
        ),
    ] = None
    include_stop: Annotated[
        bool,
        typer.Option("--include-stop", metavar="", help="Keep the stop string in the text.", rich_help_panel=STOPPING),
    ] = False
    stop_token_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="End at this token. May be repeated; or ID,ID,...", rich_help_panel=STOPPING),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", metavar="", help="Go on behind the model's own end-of-text token.", rich_help_panel=STOPPING
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token every time.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.temperature
    top_k: Annotated[
        int, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 is off.", rich_help_panel=SAMPLING)
    ] = DEFAULTS.top_k
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Sample from the likeliest tokens that sum to P; 1 is off.", rich_help_panel=SAMPLING
        ),
    ] = DEFAULTS.top_p
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Leave out tokens below P times the likeliest one; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = DEFAULTS.min_p
    presence_penalty: Annotated[
        float,
        typer.Option(metavar="X", help="Against tokens the answer holds already.", rich_help_panel=SAMPLING),
    ] = DEFAULTS.presence_penalty
    frequency_penalty: Annotated[
        float,
        typer.Option(metavar="X", help="The same, once for each time they occur.", rich_help_panel=SAMPLING),
    ] = DEFAULTS.frequency_penalty
    repetition_penalty: Annotated[
        float,
        typer.Option(
            metavar="X", help="Against tokens in prompt or answer, as a factor; 1 is off.", rich_help_panel=SAMPLING
        ),
    ] = DEFAULTS.repetition_penalty
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS",
            help="Add BIAS to a token's logit. May be repeated; or ID=BIAS,ID=BIAS,...",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The same seed gives the same text; without one, a new seed.", rich_help_panel=SAMPLING
        ),
    ] = None
    n: Annotated[
        int,
        typer.Option(
            "--n",
            metavar="N",
            help="Answers to the prompt; the first has the seed, the others seeds made from it.",
            rich_help_panel=SAMPLES,
        ),
    ] = DEFAULTS.n
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Show each token's logprob and rank, and the N likeliest in its place; -1 is all.",
            rich_help_panel=SAMPLES,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="The same for the tokens of the prompt.", rich_help_panel=SAMPLES),
    ] = None
    logprobs_mode: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="raw_logprobs: of the model as it is; processed_logprobs: after every option.",
            rich_help_panel=SAMPLES,
        ),
    ] = DEFAULTS.logprobs_mode
    draft_length: Annotated[
        int | None,
        typer.Option(
            "--draft-length",
            "-k",
            metavar="K",
            help="Draft tokens per step; 0 is no drafting. Default: the engine's choice.",
            rich_help_panel=SPECULATION,
        ),
    ] = None
    verification: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="auto, rejection, block or coupled: which rule decides drafts that were sampled. "
            "auto is coupled with --seed, else block.",
            rich_help_panel=SPECULATION,
        ),
    ] = DEFAULTS.verification

    def params(self, **constraints: Any) -> SamplingParams:
        """constraints: what ConstraintOptions.keywords() gave. Raises InvalidParams where a value is out of range."""
        return SamplingParams(
            n=self.n,
            max_tokens=None if self.max_tokens == NO_LIMIT else int(self.max_tokens),
            min_tokens=self.min_tokens,
            stop=self.stop or None,
            include_stop_str_in_output=self.include_stop,
            stop_token_ids=parse_ids("--stop-token-ids", self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=parse_bias(self.logit_bias) if self.logit_bias else None,
            seed=self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logprobs_mode=self.logprobs_mode,  # type: ignore[arg-type]  # SamplingParams checks it
            draft_length=self.draft_length,
            verification=self.verification,  # type: ignore[arg-type]  # and this
            **constraints,
        )
