"""What makes tokens illegal, as options of a command: grammars, allowed ids, bad words."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..errors import InvalidParams
from .prompts import checked, decode, read_file
from .sampling import parse_ids

CONSTRAINTS = "Constraints"
KINDS = "--json-schema, --json-object, --regex and --lark"


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """The constraints of SamplingParams. A grammar is one option for each of its kinds, and its texts are in files."""

    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The answer is JSON that this schema allows; - is standard input.",
            rich_help_panel=CONSTRAINTS,
        ),
    ] = None
    json_object: Annotated[
        bool,
        typer.Option("--json-object", metavar="", help="The answer is a JSON object.", rich_help_panel=CONSTRAINTS),
    ] = False
    regex: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="The whole answer matches it.", rich_help_panel=CONSTRAINTS),
    ] = None
    lark: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The answer follows this Lark grammar, as llguidance reads it; - is standard input.",
            rich_help_panel=CONSTRAINTS,
        ),
    ] = None
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            metavar="",
            help="Drop what --json-schema asks for and nobody can enforce, and say what; else it is refused.",
            rich_help_panel=CONSTRAINTS,
        ),
    ] = False
    no_whitespace: Annotated[
        bool,
        typer.Option("--no-whitespace", metavar="", help="None between tokens of JSON.", rich_help_panel=CONSTRAINTS),
    ] = False
    grammar_after: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The grammar starts behind this string of the answer, such as `</think>`.",
            rich_help_panel=CONSTRAINTS,
        ),
    ] = None
    grammar_after_id: Annotated[
        int | None,
        typer.Option(metavar="ID", help="The grammar starts behind this token.", rich_help_panel=CONSTRAINTS),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Never emit the tokens that this is written with. May be repeated.",
            rich_help_panel=CONSTRAINTS,
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="No token but this one and others so named. May be repeated; or ID,ID,...",
            rich_help_panel=CONSTRAINTS,
        ),
    ] = None

    def keywords(self, *, stdin_taken: str | None) -> dict[str, Any]:
        """As SamplingParams takes them. stdin_taken: what is read from standard input, so that nothing else can be.

        Raises InvalidParams where options exclude one another, or a file is not what it should be.
        """
        if self.grammar_after is not None and self.grammar_after_id is not None:
            raise InvalidParams("--grammar-after and --grammar-after-id were both given; give one of them")
        after = _checked("--grammar-after", self.grammar_after)
        return {
            "bad_words": [_checked("--bad-words", word) for word in self.bad_words] if self.bad_words else None,
            "allowed_token_ids": parse_ids("--allowed-token-ids", self.allowed_token_ids),
            "grammar": self._grammar(stdin_taken),
            "grammar_after": self.grammar_after_id if after is None else after,
        }

    def _grammar(self, stdin_taken: str | None) -> dict[str, Any] | None:
        given = {
            "--json-schema": self.json_schema is not None,
            "--json-object": self.json_object,
            "--regex": self.regex is not None,
            "--lark": self.lark is not None,
        }
        kinds = [kind for kind, is_given in given.items() if is_given]
        if len(kinds) > 1:
            raise InvalidParams(f"{' and '.join(kinds)} were both given; give one of {KINDS}")
        self._check_flags(kinds)
        if self.json_schema is not None:
            schema = _read_schema(self.json_schema, stdin_taken)
            return {"json_schema": schema, "lenient": self.lenient, "whitespace": not self.no_whitespace}
        if self.json_object:
            return {"json_object": True, "whitespace": not self.no_whitespace}
        if self.regex is not None:
            return {"regex": _checked("--regex", self.regex)}
        if self.lark is not None:
            return {"lark": _read_text("--lark", self.lark, stdin_taken)}
        return None

    def _check_flags(self, kinds: list[str]) -> None:
        """Options that would mean nothing beside these kinds are refused."""
        after = "--grammar-after" if self.grammar_after is not None else "--grammar-after-id"
        if not kinds and (self.grammar_after is not None or self.grammar_after_id is not None):
            raise InvalidParams(f"{after} starts a grammar, and there is none; give one of {KINDS}, or leave it out")
        if self.lenient and kinds != ["--json-schema"]:
            raise InvalidParams("--lenient is about a schema; give --json-schema with it, or leave it out")
        if self.no_whitespace and kinds not in (["--json-schema"], ["--json-object"]):
            raise InvalidParams("--no-whitespace is about JSON; give --json-schema or --json-object with it")


def _read_text(option: str, path: Path, stdin_taken: str | None) -> str:
    if str(path) != "-":
        origin = f"{option} {str(path)!r}"
        text = decode(read_file(path, option, InvalidParams), origin, InvalidParams)
    elif stdin_taken is not None:
        raise InvalidParams(f"{option} - reads standard input, which holds {stdin_taken}; put one of them in a file")
    else:
        origin = f"{option} -"
        text = decode(sys.stdin.buffer.read(), f"{origin} (standard input)", InvalidParams)
    if not text.strip():
        raise InvalidParams(f"{origin} is empty")
    return text


def _read_schema(path: Path, stdin_taken: str | None) -> dict[str, Any] | bool:
    origin = f"--json-schema {str(path)!r}"
    text = _read_text("--json-schema", path, stdin_taken)

    def refuse(name: str) -> NoReturn:
        raise InvalidParams(f"{origin} is not JSON: it holds {name}")

    try:
        schema = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidParams(f"{origin} is not JSON: {error.msg} at {place}") from None
    except (RecursionError, ValueError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidParams(f"{origin} {why}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidParams(f"{origin} holds {_what(schema)}; a JSON schema is an object, or true or false")
    return schema


def _what(value: Any) -> str:
    names = {list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), "a number")


def _checked(option: str, text: str | None) -> str | None:
    return None if text is None else checked(text, option, InvalidParams)
