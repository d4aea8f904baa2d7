"""What llguidance is given for a `grammar` of SamplingParams, and what its refusals mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidParams, PacelineError, UnsupportedOption, shown

__all__ = ["refusal", "source_of"]

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_TOO_OLD = re.compile(r"https?://json-schema\.org/draft-0[0-3]/.*")  # llguidance reads them as the newest draft
_KNOWN_SCHEMAS = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LITERALS = ("enum", "const", "default", "examples")
# What llguidance says of things that mean something, but not to it.
_UNSUPPORTED = re.compile(
    r"Unimplemented|Unknown format|not supported|unsupported|not present in a registry|[Tt]oo (large|many|big|complex)"
    r"|fuel|limit",
)


_LARK_TOKEN = re.compile(
    r"""
    "(?:\\.|[^"\\])*" | /(?![/*])(?:\\.|[^/\\\n])+/ | (?://|\#)[^\n]*   # strings, expressions, comments
    | (?P<named><[^<>\s]+>)
    """,
    re.VERBOSE,
)


def source_of(spec: Mapping[str, Any], ends: Mapping[int, bytes] | None = None) -> tuple[str, str]:
    """Which kind of grammar it is, and llguidance's form of it.

    ends: id -> name of the model's own end tokens, which a Lark grammar may not name.
    """
    from llguidance import LLMatcher

    if "regex" in spec:
        trailing = len(spec["regex"]) - len(spec["regex"].rstrip("\\"))
        if trailing % 2:  # llguidance drops it
            raise InvalidParams(
                f"grammar['regex'] = {shown(spec['regex'])} ends in half an escape; write two backslashes"
            )
        (regex,) = json.loads(LLMatcher.grammar_from_regex(spec["regex"]))["grammars"]
        return "regex", _grammars({"lark_grammar": regex["lark_grammar"] + _NO_FORCING})
    if "lark" in spec:
        _refuse_sampling_options(spec["lark"])
        _refuse_ends(spec["lark"], ends or {})
        return "lark", _grammars({"lark_grammar": spec["lark"] + _NO_FORCING})
    kind = "json_schema" if "json_schema" in spec else "json_object"
    schema = spec["json_schema"] if kind == "json_schema" else {"type": "object"}
    if schema is False:
        raise InvalidParams("grammar['json_schema'] = False; allowed: a schema that something satisfies")
    schema = {} if schema is True else _with_known_addresses(schema)
    lenient = bool(spec.get("lenient", False))
    guidance = {"lenient": lenient, "coerce_one_of": lenient}
    if "whitespace" in spec:
        guidance["whitespace_flexible"] = spec["whitespace"]
    own = schema.get("x-guidance", {})
    if isinstance(own, Mapping) and spec.get("whitespace") is False:
        own = {name: value for name, value in own.items() if name != "whitespace_pattern"}
    schema = {**schema, "x-guidance": {**own, **guidance} if isinstance(own, Mapping) else own}
    return kind, _grammars({"lark_grammar": "start: @schema" + _NO_FORCING}, {"name": "schema", "json_schema": schema})


def _grammars(*grammars: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _refuse_sampling_options(lark: str) -> None:
    """A rule's temperature would be ignored: what samples is not llguidance."""
    bare = _LARK_TOKEN.sub("", lark)
    found = re.search(r"\[[^\[\]]*\btemperature\s*=[^\[\]]*\]", bare)
    if found:
        raise UnsupportedOption(
            f"grammar['lark'] has {found.group()!r}; a rule has no temperature of its own here, take it out"
        )


def _refuse_ends(lark: str, ends: Mapping[int, bytes]) -> None:
    """An end token ends the text wherever it comes, so what a grammar has behind it, or it alone, is never reached."""
    names = {name.decode("utf-8", "replace") for name in ends.values()}
    for found in _LARK_TOKEN.finditer(lark):
        named = found["named"]
        if named is not None and (named in names or _all_ends(named, ends)):
            raise InvalidParams(
                f"grammar['lark'] names {named}, which ends the text; leave it out, the grammar ends there by itself"
            )


def _all_ends(named: str, ends: Mapping[int, bytes]) -> bool:
    """Whether `<[1,4-6]>` lists end tokens alone."""
    if not re.fullmatch(r"<\[\d+(-\d+)?(,\d+(-\d+)?)*\]>", named):
        return False
    spans = [part.partition("-") for part in named[2:-2].split(",")]
    bounds = [(int(low), int(high or low)) for low, _, high in spans]
    # An end token for each id of a span; a span may be written longer than any vocabulary.
    return all(sum(low <= token <= high for token in ends) == high - low + 1 for low, high in bounds)


def _with_known_addresses(schema: Any) -> Any:
    """The schema without "$schema" addresses that mean nothing to llguidance, at any depth.

    Nobody fetches addresses. Where "$schema" is no keyword (a property of that name, a constant), it stays.
    """
    if isinstance(schema, list):
        return [_with_known_addresses(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "$schema":
            address = value if isinstance(value, str) else ""
            if _TOO_OLD.fullmatch(address):
                raise UnsupportedOption(f"grammar['json_schema'] has $schema {address!r}; allowed: draft 4 or later")
            if not _KNOWN_SCHEMAS.fullmatch(address):
                continue
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            value = {name: _with_known_addresses(one) for name, one in value.items()}
        elif key not in _LITERALS:
            value = _with_known_addresses(value)
        kept[key] = value
    return kept


def refusal(kind: str, message: str, dropped: Sequence[str] = ()) -> PacelineError:
    """What to raise for llguidance's message, which is repeated without the grammar's own lines.

    dropped: what "lenient" would drop.
    """
    lines = [line.rstrip() for line in message.strip().splitlines() if not re.match(r" *\d* \||<non-verbose", line)]
    said = "\n".join(line for line in lines if line.strip(" ^"))
    if kind == "regex":
        said = re.sub(r"^at \d+\(\d+\): ", "", said)
    elif "regex parse error" in said or "lookarounds" in said:
        said = f"pattern: {said}"
    elif "not present in a registry" in said:
        said = f"$ref: {said}"
    if not _UNSUPPORTED.search(said):
        return InvalidParams(f"grammar[{kind!r}] is no grammar: {said}")
    said = re.sub(r"\s*Enable 'coerce_one_of'[^.]*", "", said).rstrip(". ")  # an option of llguidance, not of ours
    deeds = ["drop it" if one == said else _deed(one) for one in dropped]
    lenient = f"; 'lenient': True would {'; '.join(deeds)}" if deeds else ""
    return UnsupportedOption(f"grammar[{kind!r}] is not supported by llguidance: {said}{lenient}")


def _deed(warning: str) -> str:
    """What "lenient" does, from llguidance's warning about it."""
    if warning.startswith("oneOf not fully supported"):
        return "take oneOf for anyOf, which allows more"
    return f"drop: {warning}"
