"""How a model is opened, as options of a command; and how options that several commands share get into them.

A command takes options as whole objects (these, and those of `sampling` and `constraints`); `expand_options` spreads
their fields over its signature, where Typer looks for options.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer

SPECULATION = "Speculation"
MODEL = "Model"


class OutputFormat(StrEnum):
    """What a command writes on stdout."""

    TEXT = "text"
    JSON = "json"


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
            help="lookup copies what followed the same words before; model:M is a second model with the same "
            "vocabulary; forced proposes what a grammar leaves no choice about; forced+lookup and forced+model:M do "
            "both. none drafts nothing; auto is forced+lookup; auto:M is that or forced+model:M, in each step "
            "whichever promises more.",
            rich_help_panel=SPECULATION,
        ),
    ] = "auto"
    no_measure: Annotated[
        bool,
        typer.Option(
            "--no-measure",
            metavar="",
            help="Do not measure what a step costs on this machine; the draft length is then fixed.",
            rich_help_panel=SPECULATION,
        ),
    ] = False
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            metavar="",
            help="Say on stderr, for every step, how many drafts were verified and why.",
            rich_help_panel=SPECULATION,
        ),
    ] = False

    def keywords(self) -> dict[str, Any]:
        """As LLM takes them; what was not given is None."""
        return {**super().keywords(), "measure": False if self.no_measure else None}


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
