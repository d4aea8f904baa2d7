"""Grammars, bad words and allowed ids from a shell: files, exclusions, and what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .shell import error_line, paceline, toy

BASE = ["--raw", "--prompt", "the cat sat on the mat", "--max-tokens", "40", "--seed", "1"]
SCHEMA = {"type": "object", "properties": {"ab": {"enum": [1, 2]}}, "required": ["ab"], "additionalProperties": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs, with a few files in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=2), encoding="utf-8")
    (tmp_path / "broken.json").write_text('{"type": "object",\n "properties": }', encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "nan.json").write_text('{"minimum": NaN}', encoding="utf-8")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    (tmp_path / "answer.lark").write_text('start: "yes" | "no"\n', encoding="utf-8")
    (tmp_path / "broken.lark").write_text("start: nothing_of_that_name\n", encoding="utf-8")
    (tmp_path / "hard.json").write_text('{"type": "string", "format": "nonsense"}', encoding="utf-8")
    return tmp_path


def generate(*arguments: str, stdin: str | bytes = b"") -> Any:
    return paceline("generate", "--model", "toy", *BASE, *arguments, stdin=stdin)


# --- what comes out ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("drafter", ["auto", "none", "model:toy", "forced"])
def test_a_schema_from_a_file(drafter: str) -> None:
    value = toy(*BASE, "--json-schema", "schema.json", "--no-whitespace", "--drafter", drafter)
    assert json.loads(value["text"])["ab"] in (1, 2)
    assert (value["finish_reason"], value["stop_reason"]) == ("stop", None)


@pytest.mark.usefixtures("folder")
def test_forced_tokens_are_drafts_by_default() -> None:
    """Most of this schema's answer is given; catches an `auto` without forced tokens."""
    assert toy(*BASE, "--json-schema", "schema.json", "--no-whitespace")["speculation"]["accepted"] >= 4


@pytest.mark.usefixtures("folder")
def test_other_grammars() -> None:
    assert toy(*BASE, "--lark", "answer.lark")["text"] in ("yes", "no")
    assert toy(*BASE, "--json-object", "--no-whitespace")["text"].startswith("{")
    text = toy(*BASE, "--regex", "[0-9]{4}", "--grammar-after", "rc")["text"]
    before, after = text.split("rc", 1)
    assert not before.isdigit()
    assert len(after) == 4
    assert after.isdigit()


def test_a_schema_from_standard_input() -> None:
    text = generate("--json-schema", "-", "--no-whitespace", stdin=json.dumps(SCHEMA)).stdout
    assert json.loads(text)["ab"] in (1, 2)


@pytest.mark.usefixtures("folder")
def test_what_leniency_drops_is_said_once() -> None:
    refused = generate("--json-schema", "hard.json")
    assert refused.exit_code == 2
    assert "nonsense" in error_line(refused)
    lenient = generate("--json-schema", "hard.json", "--lenient")
    assert lenient.exit_code == 0
    assert lenient.stdout.startswith('"')
    assert lenient.stderr.count("nonsense") == lenient.stderr.count("note: the grammar is looser") == 1


def test_words_that_are_never_said() -> None:
    whole = toy(*BASE)["text"]
    word = whole[3:5]
    assert word not in toy(*BASE, "--bad-words", word)["text"]


# --- what is said beside the answer ---------------------------------------------------------------


def notes(result: Any) -> list[str]:
    lines: list[str] = result.stderr.splitlines()
    return [line.removeprefix("paceline: note: ") for line in lines if line.startswith("paceline: note: ")]


CUT = "the answer was cut at --max-tokens"


@pytest.mark.parametrize("command", [["--format", "json"], ["--format", "text"]])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--regex", "[ab]{90}"], [CUT]),
        (["--regex", "[ab]{3}"], []),
        ([], []),
        (["--regex", "[ab]{90}", "--max-tokens", "none", "--max-len", "30"], [CUT.replace("max-tokens", "max-len")]),
        (["--regex", "[ab]{3}", "--grammar-after", "qqqq"], ["the grammar never started: 'qqqq' did not come", CUT]),
        (["--regex", "[ab]{3}", "--grammar-after-id", "256", "--ignore-eos", "--logit-bias", "256=-100"],
         ["the grammar never started: 256 did not come", CUT]),
        (["--regex", "[ab]{3}", "--grammar-after", "rc"], []),
        (["--regex", "[ab]{90}", "--n", "2"], [f"sample 0: {CUT}", f"sample 1: {CUT}"]),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_whole_is_said_to_be_so(command: list[str], arguments: list[str], said: str) -> None:
    """A document that is cut, or an answer without any grammar in it, looks like one that is right."""
    result = generate(*command, *arguments)
    assert result.exit_code == 0
    assert notes(result) == said


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json-schema", "nowhere.json"], "--json-schema 'nowhere.json' cannot be read: No such file"),
        (["--lark", "."], "--lark '.' cannot be read: Is a directory"),
        (["--json-schema", "broken.json"], "--json-schema 'broken.json' is not JSON: Expecting value at line 2, col"),
        (["--json-schema", "list.json"], "--json-schema 'list.json' holds a list"),
        (["--json-schema", "nan.json"], "--json-schema 'nan.json' is not JSON: it holds NaN"),
        (["--json-schema", "deep.json"], "--json-schema 'deep.json' is nested too deeply"),
        (["--json-schema", "empty"], "--json-schema 'empty' is empty"),
        (["--lark", "empty"], "--lark 'empty' is empty"),
        (["--lark", "binary"], "--lark 'binary' is not UTF-8 text: byte 0xff at offset 2"),
        (["--lark", "broken.lark"], "nothing_of_that_name"),
        (["--regex", "("], "regex"),
        (["--regex", "a\udcff"], "--regex is not UTF-8 text at character 1"),
        (["--regex", "a", "--json-object"], "--json-object and --regex were both given"),
        (["--regex", "a", "--lark", "answer.lark"], "give one of --json-schema, --json-object, --regex and --lark"),
        (["--regex", "a", "--lenient"], "--lenient is about a schema"),
        (["--json-object", "--lenient"], "--lenient is about a schema"),
        (["--regex", "a", "--no-whitespace"], "--no-whitespace is about JSON"),
        (["--lenient"], "--lenient is about a schema"),
        (["--grammar-after", "x"], "--grammar-after starts a grammar, and there is none"),
        (["--grammar-after-id", "0"], "--grammar-after-id starts a grammar, and there is none"),
        (["--regex", "a", "--grammar-after", "x", "--grammar-after-id", "1"], "were both given"),
        (["--regex", "a", "--grammar-after-id", "9999"], "9999"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    result = generate(*arguments)
    assert result.exit_code == 2
    assert said in error_line(result)
    assert result.stdout == ""


def test_standard_input_holds_one_thing() -> None:
    """Catches a schema that is read as the prompt, or the other way round."""
    for option in ("--json-schema", "--lark"):
        for prompt in ([], ["--prompt-file", "-"]):
            result = paceline("generate", "--model", "toy", *prompt, option, "-", stdin="{}")
            assert result.exit_code == 2
            assert f"{option} - reads standard input, which holds the prompt" in error_line(result)
        result = paceline("chat", "--model", "toy", option, "-", stdin="{}")
        assert result.exit_code == 2
        assert "which holds the conversation" in error_line(result)


@pytest.mark.usefixtures("folder")
def test_failures_are_json_too() -> None:
    result = generate("--format", "json", "--json-schema", "broken.json")
    assert json.loads(result.stdout)["error"] == {"type": "InvalidParams", "message": error_line(result)}


# --- in a conversation ------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_every_answer_of_a_conversation_is_constrained() -> None:
    result = paceline("chat", "--model", "toy", "--lark", "answer.lark", stdin="one\ntwo\nthree\n")
    assert result.exit_code == 0
    assert [line in ("yes", "no") for line in result.stdout.splitlines()] == [True] * 3
