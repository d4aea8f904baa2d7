"""The options that `generate` and `chat` share, each named and explained once.

A command takes them as whole objects; `expand_options` spreads the fields over its signature, where Typer
looks for options.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer

from ..params import SamplingParams

SAMPLING = "Sampling"
STOPPING = "Stopping"
SPECULATION = "Speculation"
MODEL = "Model"

DEFAULTS = SamplingParams()
NO_LIMIT = "none"


class OutputFormat(StrEnum):
    """What a command writes on stdout."""

    TEXT = "text"
    JSON = "json"


def parse_max_tokens(text: str) -> int | str:
    """A number of tokens, or the word `none`."""
    if text == NO_LIMIT:
        return NO_LIMIT
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number; give one, or {NO_LIMIT!r} for no limit") from None


def parse_bias(items: list[str]) -> dict[int, float]:
    """`ID=BIAS`, each token once. Whether ids and numbers are in range is SamplingParams' affair."""
    biases: dict[int, float] = {}
    for item in items:
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
    """SamplingParams on the command line: the same names, defaults and ranges."""

    max_tokens: Annotated[
        Any,
        typer.Option(
            parser=parse_max_tokens,
            metavar=f"N|{NO_LIMIT}",
            help=f"Most tokens to generate; {NO_LIMIT} is until the context is full.",
            rich_help_panel=STOPPING,
        ),
    ] = str(DEFAULTS.max_tokens)
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
        list[int] | None,
        typer.Option(metavar="ID", help="End at this token. May be repeated.", rich_help_panel=STOPPING),
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
        typer.Option(metavar="ID=BIAS", help="Add BIAS to a token's logit. May be repeated.", rich_help_panel=SAMPLING),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The same seed gives the same text; without one, a new seed.", rich_help_panel=SAMPLING
        ),
    ] = None
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

    def params(self) -> SamplingParams:
        """Raises InvalidParams where a value is out of range."""
        return SamplingParams(
            max_tokens=None if self.max_tokens == NO_LIMIT else int(self.max_tokens),
            stop=self.stop or None,
            include_stop_str_in_output=self.include_stop,
            stop_token_ids=self.stop_token_ids or None,
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
            draft_length=self.draft_length,
            verification=self.verification,  # type: ignore[arg-type]  # SamplingParams checks it
        )


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """How a model is run: the keywords of LLM. What a backend does not have it refuses."""

    backend: Annotated[
        str,
        typer.Option(
            metavar="B",
            help="auto (llamacpp for names and GGUF files, hf for folders and hub ids), llamacpp, hf or toy.",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    max_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens of prompt and answer together. Default: the model's, at most 4096.",
            rich_help_panel=MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Default: one for each physical core; hf: as PyTorch is set.",
            rich_help_panel=MODEL,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="hf: float64, float32, bfloat16 or float16. Default: the model's, bfloat16 for a GGUF.",
            rich_help_panel=MODEL,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(metavar="D", help="hf: where PyTorch computes. Default: cpu.", rich_help_panel=MODEL),
    ] = None
    page_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="hf, toy: tokens per page. Default: 16.", rich_help_panel=MODEL),
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            metavar="",
            help="hf: compile the model first, which takes a minute.",
            rich_help_panel=MODEL,
        ),
    ] = None
    no_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--no-prefix-cache", metavar="", help="Share no pages between equal beginnings.", rich_help_panel=MODEL
        ),
    ] = False

    def keywords(self) -> dict[str, Any]:
        """As LLM takes them; what was not given is None."""
        return {
            "backend": self.backend,
            "max_len": self.max_len,
            "n_threads": self.threads,
            "dtype": self.dtype,
            "device": self.device,
            "page_size": self.page_size,
            "compile": self.compile,
            "prefix_cache": False if self.no_prefix_cache else None,
        }


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BackendOptions):
    """What is loaded, with which drafter."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="A name (see: paceline models list), the path of a GGUF file or a Hugging Face folder, a hub id "
            "owner/name, or toy.",
            rich_help_panel=MODEL,
        ),
    ] = "smollm2"
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            "-d",
            metavar="D",
            help="auto, none, lookup, or model:M for a second model with the same vocabulary.",
            rich_help_panel=SPECULATION,
        ),
    ] = "auto"


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of an options class are replaced by the fields of that class."""
    groups: dict[str, type[Any]] = {}
    spread: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            field_types = get_type_hints(kind, include_extras=True)
            spread += [
                inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=field_types[f.name]
                )
                for f in dataclasses.fields(kind)
            ]
        else:
            spread.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return run
