"""What llguidance is given for a `grammar` of SamplingParams, and what its refusals mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidParams, PacelineError, UnsupportedOption

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


def source_of(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Which kind of grammar it is, and llguidance's form of it."""
    from llguidance import LLMatcher

    if "regex" in spec:
        (regex,) = json.loads(LLMatcher.grammar_from_regex(spec["regex"]))["grammars"]
        return "regex", _grammars({"lark_grammar": regex["lark_grammar"] + _NO_FORCING})
    if "lark" in spec:
        _refuse_sampling_options(spec["lark"])
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
    schema = {**schema, "x-guidance": {**own, **guidance} if isinstance(own, Mapping) else own}
    return kind, _grammars({"lark_grammar": "start: @schema" + _NO_FORCING}, {"name": "schema", "json_schema": schema})


def _grammars(*grammars: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _refuse_sampling_options(lark: str) -> None:
    """A rule's temperature would be ignored: what samples is not llguidance."""
    found = re.search(r"^[ \t]*[?!]?\w+\[[^\]]*\btemperature\s*=[^\]]*\]", lark, re.MULTILINE)
    if found:
        raise UnsupportedOption(
            f"grammar['lark'] has {found.group().strip()!r}; a rule has no temperature of its own here, take it out"
        )


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
    lenient = f"; 'lenient': True would drop: {'; '.join(dropped)}" if dropped else ""
    return UnsupportedOption(f"grammar[{kind!r}] is not supported by llguidance: {said}{lenient}")
