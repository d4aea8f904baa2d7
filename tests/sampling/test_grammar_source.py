"""What may be a grammar, what is refused and how, and what compilers remember."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidParams, PacelineError, UnsupportedOption
from paceline.sampling.constrain import MAX_COMPILED, Grammar, GrammarCompiler
from paceline.sampling.grammar_source import source_of

from .regexes import Pieces

PIECES = [*(bytes([b]) for b in range(256)), b""]
END = 256
COMPILER = GrammarCompiler(Pieces(PIECES), frozenset({END}))
UNKNOWN = "http://example.com/no/such/schema#"


def start(spec: dict[str, Any]) -> Grammar:
    return COMPILER.compile(spec).start(frozenset({END}))


def accepts(spec: dict[str, Any], text: str) -> bool:
    """Whether the text, all of it, is in the language."""
    grammar, tokens = start(spec), list(text.encode())
    if grammar.num_legal(tokens) < len(tokens):
        return False
    mask = grammar.legal(tokens)
    assert mask is not None
    return grammar.is_over(tokens) or bool(mask[END])


@pytest.mark.parametrize(
    ("spec", "inside", "outside"),
    [
        ({"regex": "[ab]+c"}, "abbac", "ab"),
        ({"regex": "a/b\\/"}, "a/b/", "a/b"),
        ({"lark": 'start: "(" start ")" | "x"'}, "((x))", "((x)"),
        ({"lark": 'start: item*\nitem: /[a-z]+/ ";"\n%ignore " "'}, "ab; c;", "ab; c"),
        ({"lark": 'start: %json {"type": "integer"}'}, "12", "1.5"),
        ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"json_object": True, "whitespace": False}, '{"a":[1,{"b":null}]}', '{"a": 1}'),
        ({"json_schema": {"type": "integer", "minimum": 10}}, "12", "9"),
        ({"json_schema": True}, '[1, "a"]', "a"),
        ({"json_schema": {"const": {"b": 1, "a": 2}}, "whitespace": False}, '{"b":1,"a":2}', '{"a":2,"b":1}'),
    ],
)
def test_every_kind(spec: dict[str, Any], inside: str, outside: str) -> None:
    assert accepts(spec, inside)
    assert not accepts(spec, outside)


def test_properties_keep_their_order() -> None:
    """Two schemas that differ in the order of properties are two grammars: that order is how they are written."""
    for names in ("ab", "ba"):
        schema = {"type": "object", "properties": {n: {"const": 1} for n in names}, "required": ["a", "b"]}
        schema["additionalProperties"] = False
        written = "{" + ",".join(f'"{n}":1' for n in names) + "}"
        assert accepts({"json_schema": schema, "whitespace": False}, written)


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ({"regex": "[a"}, InvalidParams, "unclosed character class"),
        ({"regex": "(?=a)b"}, UnsupportedOption, "look-around"),
        ({"regex": r"a\b"}, UnsupportedOption, "lookarounds not supported"),
        ({"regex": r"(a)\1"}, UnsupportedOption, "backreferences are not supported"),
        ({"regex": r"(?-u:\xff)"}, InvalidParams, "invalid UTF-8"),
        ({"lark": "start: nothing"}, InvalidParams, 'unknown name: "nothing"'),
        ({"lark": 'start: "a" [\n'}, InvalidParams, "1\\(13\\)"),
        ({"lark": 'start: <|no_such|> "a"'}, InvalidParams, "unknown special token"),
        ({"lark": 'start: a\na[temperature=0.5]: "a"'}, UnsupportedOption, "temperature=0.5"),
        ({"lark": '{"grammars": []}'}, InvalidParams, "expecting rule"),
        ({"json_schema": {"$schema": "http://json-schema.org/draft-03/schema#"}}, UnsupportedOption, "draft-03"),
        ({"json_schema": False}, InvalidParams, "satisfies"),
        ({"json_schema": {"not": {}, "contains": {}}}, UnsupportedOption, r'\["contains", "not"\]'),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, UnsupportedOption, "uniqueItems"),
        ({"json_schema": {"items": {"if": {}, "then": {}}}}, UnsupportedOption, "if.*then.*would drop it$"),
        ({"json_schema": {"type": "string", "format": "color"}}, UnsupportedOption, "Unknown format: color"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)"}}, UnsupportedOption, "pattern: .*look-around"),
        ({"json_schema": {"type": "string", "pattern": "("}}, InvalidParams, "pattern: .*unclosed group"),
        ({"json_schema": {"$ref": "http://example.com/a"}}, UnsupportedOption, r"\$ref: .*example.com"),
        ({"json_schema": {"$ref": "#/nowhere"}}, InvalidParams, "/nowhere"),
        ({"json_schema": {"type": "strin"}}, InvalidParams, "Invalid type: strin"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, InvalidParams, "minimum"),
        (
            {"json_schema": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}},
            UnsupportedOption,
            "oneOf",
        ),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, UnsupportedOption, '"not"'),
    ],
)
def test_what_is_refused_says_why(spec: dict[str, Any], error: type[PacelineError], said: str) -> None:
    """llguidance's own message with the keyword; leniency is an option of the caller, never of the schema."""
    with pytest.raises(error, match=f"(?s){next(iter(spec))}.*{said}") as caught:
        COMPILER.compile(spec)
    assert "no_forcing" not in str(caught.value)


def test_lenient_lists_what_it_drops() -> None:
    schema = {"type": "string", "format": "color", "not": {}, "oneOf": [{"minLength": 2}, {"minLength": 3}]}
    with pytest.warns(UserWarning, match="looser") as caught:
        compiled = COMPILER.compile({"json_schema": schema, "lenient": True})
    listed = " ".join(compiled.dropped)
    for name in ('"not"', "Unknown format: color", "oneOf"):
        assert name in listed
        assert name in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert COMPILER.compile({"json_schema": {"type": "string"}, "lenient": True}).dropped == ()
    with pytest.raises(InvalidParams, match="unclosed group"):
        COMPILER.compile({"json_schema": {"pattern": "("}, "lenient": True})


def test_a_reason_is_said_once_and_what_to_do_is_ours() -> None:
    """Catches a refusal that repeats itself, or names an option that only llguidance has."""
    one_of = [{"type": "string"}, {"type": "string", "minLength": 2}]
    looser = "take oneOf for anyOf, which allows more"
    for schema, said in (
        ({"uniqueItems": True}, """llguidance: Unimplemented keys: ["uniqueItems"]; 'lenient': True would drop it"""),
        ({"oneOf": one_of}, f"oneOf constraints are not supported; 'lenient': True would {looser}"),
        ({"not": {}, "format": "color", "oneOf": one_of}, f"would drop it; drop: Unknown format: color; {looser}"),
    ):
        with pytest.raises(UnsupportedOption) as caught:
            COMPILER.compile({"json_schema": schema})
        assert said in str(caught.value)
        assert "coerce_one_of" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ('"a" <256>', "<256>"), ('"a" | <256>', "<256>"), ('"a" <[256]>', "<[256]>"),
        ('"a" <[256-256]> "b"', "<[256-256]>"),
        ('"a" <[97]>', None), ('"a" <[97,256]>', None), ('"a" <[^97]>', None), ('"a" <[*]>', None),
        ('"<256>"', None), (r'"\"<256>"', None), ("/<256>/", None), (r"/a\/<256>/", None), ('"a" // <256>', None),
        ('"a" # <256>', None), ('/a/ "b" /<256>/', None),
    ],
)  # fmt: skip
def test_a_lark_grammar_names_no_end_token(rule: str, named: str | None) -> None:
    """It ends the text wherever it comes: what a grammar has behind it is never reached, and alone nothing is."""
    ends = {END: b"<256>"}
    if named is None:
        assert source_of({"lark": f"start: {rule}"}, ends)[0] == "lark"
        return
    with pytest.raises(InvalidParams) as refused:
        source_of({"lark": f"start: {rule}"}, ends)
    assert str(refused.value) == (
        f"grammar['lark'] names {named}, which ends the text; leave it out, the grammar ends there by itself"
    )
    assert source_of({"lark": f"start: {rule}"}, {})[0] == "lark"


def test_the_compiler_knows_the_end_tokens() -> None:
    name = Pieces(PIECES).token_text(END).decode()
    for spelled in (f"<[{END}]>", name):
        with pytest.raises(InvalidParams, match="which ends the text; leave it out"):
            COMPILER.compile({"lark": f'start: "a" {spelled}'})


@pytest.mark.parametrize("address", [UNKNOWN, 5, "https://json-schema.org/draft-07/schema#"])
def test_unknown_schema_addresses_are_left_out_wherever_they_are_keywords(address: Any) -> None:
    inner = {"$schema": address, "type": "integer"}
    schema = {
        "$schema": address,
        "$defs": {"n": inner},
        "type": "object",
        "properties": {"$schema": {"type": "string"}, "n": inner, "m": {"anyOf": [inner, {"$ref": "#/$defs/n"}]}},
        "required": ["$schema", "n"],
        "additionalProperties": {"items": inner, "type": "array"},
    }
    assert accepts({"json_schema": schema}, '{"$schema": "x", "n": 1, "m": 2, "z": [3]}')
    assert not accepts({"json_schema": schema}, '{"n": 1}'), "a property of that name is no keyword"
    assert not accepts({"json_schema": schema}, '{"$schema": 1, "n": 1}')
    for keyword in ("const", "enum"):
        value = {"$schema": address}
        literal = {keyword: value if keyword == "const" else [value], "$schema": address}
        assert accepts({"json_schema": literal}, json.dumps(value))
        assert not accepts({"json_schema": literal}, "{}")


@pytest.mark.parametrize(
    "address", ["http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema"]
)
def test_known_schema_addresses_keep_their_meaning(address: str) -> None:
    """In draft 7 a list of `items` is what draft 2020-12 calls prefixItems."""
    schema = {"$schema": address, "type": "array", "items": [{"enum": [1]}, {"enum": [2]}], "minItems": 2}
    assert accepts({"json_schema": schema}, "[1, 2]")
    assert not accepts({"json_schema": schema}, "[2, 2]")


def test_a_model_without_texts_has_no_grammars() -> None:
    with pytest.raises(UnsupportedOption, match="not known"):
        GrammarCompiler(Pieces([b"", b""]), frozenset()).compile({"regex": "a"})


def test_compiled_grammars_are_remembered_up_to_a_number() -> None:
    compiler = GrammarCompiler(Pieces(PIECES), frozenset({END}))
    first = compiler.compile({"regex": "a"})
    assert compiler.compile({"regex": "a"}) is first
    for i in range(MAX_COMPILED - 1):
        compiler.compile({"regex": f"b{i}"})
    assert compiler.compile({"regex": "a"}) is first
    compiler.compile({"regex": "c"})
    assert compiler.compile({"regex": "a"}) is first, "the one that was not used for longest goes, not this one"
    for i in range(MAX_COMPILED):
        compiler.compile({"regex": f"d{i}"})
    assert compiler.compile({"regex": "a"}) is not first


def test_samples_of_one_grammar_are_apart() -> None:
    compiled = COMPILER.compile({"regex": "ab|cd"})
    one, two = compiled.start(frozenset({END})), compiled.start(frozenset({END}))
    one.commit(ord("a"))
    two.commit(ord("c"))
    assert [np.flatnonzero(g.legal()).tolist() for g in (one, two)] == [[ord("b")], [ord("d")]]  # type: ignore[arg-type]


def test_many_threads_compile_and_walk_at_once() -> None:
    """vllm#52620: grammars under concurrency shared state. Eight threads, one compiler, some grammars equal."""
    compiler = GrammarCompiler(Pieces(PIECES), frozenset({END}))
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(20):
            word = f"x{(seed + i) % 5}y"
            grammar = compiler.compile({"regex": f"(?:{word})+"}).start(frozenset({END}))
            for byte in (word * 3).encode():
                mask = grammar.legal()
                if mask is None or np.flatnonzero(mask)[0] != byte:
                    wrong.append(word)
                    return
                grammar.commit(byte)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_importing_paceline_does_not_load_llguidance() -> None:
    code = "import sys, paceline; paceline.LLM; print('llguidance' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
