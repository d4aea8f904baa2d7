"""Several samples, and logprobs, from a shell: as text, as a table, as JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.backend.toy import ALPHABET, ToyBackend
from paceline.cli.logprobs import print_logprobs
from paceline.errors import ModelError
from paceline.types import CompletionOutput, Logprob, RequestOutput, SpeculationStats

from .shell import Terminal, error_line, paceline, toy

PROMPT = "the cat"
BASE = ["--raw", "--prompt", PROMPT, "--max-tokens", "12", "--seed", "3"]


def generate(*arguments: str) -> Any:
    return paceline("generate", "--model", "toy", *BASE, *arguments)


def library(**params: Any) -> RequestOutput:
    with LLM("toy") as llm:
        return llm.generate(PROMPT, SamplingParams(**{"max_tokens": 12, "seed": 3, **params}))[0]


# --- samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 20])
def test_samples_come_one_after_another(n: int) -> None:
    """Catches texts of two samples that mix, in whatever order they are made; 20 are more than run at once."""
    texts = [one.text for one in library(n=n).outputs]
    assert len(set(texts)) == n
    result = generate("--n", str(n))
    assert result.stdout == "".join(f"{text}\n" for text in texts)
    assert result.stderr.splitlines() == [f"--- sample {i} of {n}" for i in range(n)]


@pytest.mark.parametrize(("n", "at_once"), [(1, 1), (5, 5), (20, 16)])
def test_samples_run_at_once(n: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def stop(self: LLM, model: str, **options: Any) -> None:
        given.update(options)
        raise ModelError("far enough")

    monkeypatch.setattr(LLM, "__init__", stop)
    assert "far enough" in generate("--n", str(n)).stderr
    assert given["max_seqs"] == at_once


def test_samples_of_unequal_length_and_none_at_all() -> None:
    """One that ends first, with no text, neither holds up the others nor loses its heading."""
    options = ["--logit-bias", "256=8", "--max-tokens", "40", "--n", "4"]
    outputs = library(n=4, max_tokens=40, logit_bias={256: 8.0}).outputs
    assert len({len(one.token_ids) for one in outputs}) > 1
    result = generate(*options)
    assert result.stdout == "".join(f"{one.text}\n" for one in outputs if one.text)
    assert len(result.stderr.splitlines()) == 4


def test_headings_stand_above_their_samples_on_a_terminal() -> None:
    texts = [one.text for one in library(n=2).outputs]
    with Terminal("generate", "--model", "toy", *BASE, "--n", "2") as terminal:
        for i, text in enumerate(texts):
            terminal.wait_for(f"--- sample {i} of 2")
            terminal.wait_for(text)
        assert terminal.end() == 0


def test_json_has_all_samples_and_the_first_where_it_always_was() -> None:
    outputs = library(n=3).outputs
    value = toy(*BASE, "--n", "3")
    assert [one["text"] for one in value["outputs"]] == [one.text for one in outputs]
    assert [one["seed"] for one in value["outputs"]] == [one.seed for one in outputs]
    assert [one["index"] for one in value["outputs"]] == [0, 1, 2]
    assert value["usage"] == {"prompt_tokens": 7, "completion_tokens": 36, "total_tokens": 43}
    assert value["speculation"]["emitted"] == 36
    alone = toy(*BASE)
    for one in (value, alone):
        first = one["outputs"][0]
        assert {name: one[name] for name in first if name != "index"} == {
            k: v for k, v in first.items() if k != "index"
        }
    assert alone["outputs"] == value["outputs"][:1]
    assert set(alone) == set(value)
    again = toy(*BASE, "--seed", str(value["outputs"][2]["seed"]))
    assert again["token_ids"] == value["outputs"][2]["token_ids"]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What three samples say, but from here on the toy's logits turn to NaN behind a letter of the second."""
    texts = [one.text for one in library(n=3).outputs]
    letter = next(c for c in texts[1] if c not in texts[0] + texts[2] + PROMPT)
    bad = ALPHABET.index(ord(letter))
    broken = ToyBackend(max_seqs=3, nan_when=lambda visible: bad in visible)
    monkeypatch.setattr("paceline.llm.open_backend", lambda *_, **__: broken)
    return texts


def test_a_sample_that_fails_is_named_and_the_others_are_whole(texts: list[str]) -> None:
    text, as_json = (
        generate("--n", "3", "--drafter", "none"),
        generate("--n", "3", "--drafter", "none", "--format", "json"),
    )
    assert text.exit_code == as_json.exit_code == 1
    lines = text.stdout.splitlines()
    assert (lines[0], lines[2]) == (texts[0], texts[2])
    assert texts[1].startswith(lines[1])
    assert len(lines[1]) < len(texts[1])
    assert "paceline: error: sample 1: " in text.stderr
    value = json.loads(as_json.stdout)
    assert [one["finish_reason"] for one in value["outputs"]] == ["length", "error", "length"]
    assert value["error"] == value["outputs"][1]["error"]
    assert "error" not in value["outputs"][0]


def test_a_conversation_has_one_answer_a_turn() -> None:
    result = paceline("chat", "--model", "toy", "--n", "2", stdin="hi\n")
    assert result.exit_code == 2
    assert "--n 2: a conversation goes on from one answer" in error_line(result)


# --- logprobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_as_json(mode: Any) -> None:
    asked: dict[str, Any] = {"logprobs": 9, "prompt_logprobs": 1, "temperature": 0.7, "logprobs_mode": mode}
    output = library(**asked)
    one = output.outputs[0]
    options = ["--logprobs", "9", "--prompt-logprobs", "1", "--temperature", "0.7", "--logprobs-mode", mode]
    value = toy(*BASE, *options)
    assert one.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(value["logprobs"]) == len(value["token_ids"])
    for token, row, entry in zip(one.token_ids, one.logprobs, value["logprobs"], strict=True):
        place = row[token]
        own = {"token_id": token, "text": place.text, "logprob": place.logprob, "rank": place.rank}
        assert {k: v for k, v in entry.items() if k != "top"} == own
        assert [top["rank"] for top in entry["top"]] == list(range(1, 10))
        assert (own in entry["top"]) == (place.rank <= 9)
        assert {top["token_id"]: top["logprob"] for top in entry["top"]}.items() <= {
            k: v.logprob for k, v in row.items()
        }.items()
    ranks = [entry["rank"] for entry in value["logprobs"]]
    assert any(1 < rank <= 9 for rank in ranks), "no case in which the own token has to move"
    assert value["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in value["prompt_logprobs"][1:]] == list(output.prompt_token_ids[1:])
    assert value["outputs"][0]["logprobs"] == value["logprobs"]
    assert "prompt_logprobs" not in value["outputs"][0]


def test_how_many_are_listed() -> None:
    assert "logprobs" not in toy(*BASE)
    assert "prompt_logprobs" not in toy(*BASE)
    assert all(entry["top"] == [] for entry in toy(*BASE, "--logprobs", "0")["logprobs"])
    everything = toy(*BASE, "--max-tokens", "2", "--logprobs", "-1")["logprobs"]
    for entry in everything:
        assert len(entry["top"]) == 257
        assert sum(math.exp(top["logprob"]) for top in entry["top"]) == pytest.approx(1.0)


def test_minus_infinity_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no word for it; catches a line that no reader takes."""
    table = ToyBackend(max_seqs=1, table=lambda seen: [0.0] * 10 + [-math.inf] * 246 + [0.0])
    monkeypatch.setattr("paceline.llm.open_backend", lambda *_, **__: table)
    value = toy(*BASE, "--prompt-logprobs", "1")
    assert [entry["logprob"] for entry in value["prompt_logprobs"][1:]] == [None] * 6


def test_logprobs_as_a_table() -> None:
    output = library(logprobs=2, n=2)
    plain = generate("--n", "2")
    result = generate("--n", "2", "--logprobs", "2", "--prompt-logprobs", "0")
    assert result.stdout == plain.stdout
    tables = result.stderr.removeprefix(plain.stderr).split("\n\n")
    heads = [table.strip().splitlines()[0].split() for table in tables]
    assert heads == [
        ["prompt", "id", "logprob", "rank"],
        ["sample", "0", "id", "logprob", "rank", "likeliest"],
        ["sample", "1", "id", "logprob", "rank", "likeliest"],
    ]
    assert len(tables[0].strip().splitlines()) == 1 + len(PROMPT)
    for one, table in zip(output.outputs, tables[1:], strict=True):
        assert one.logprobs is not None
        lines = table.strip().splitlines()[1:]
        for token, row, line in zip(one.token_ids, one.logprobs, lines, strict=True):
            place = row[token]
            own = [repr(place.text), str(token), f"{place.logprob:.4f}", str(place.rank)]
            assert " ".join(line.split()).startswith(" ".join(own))
            best = min(row.values(), key=lambda place: place.rank)
            assert f"{best.text!r} {best.logprob:.4f}" in line


def test_a_table_of_all_tokens_shows_the_likeliest() -> None:
    """257 entries a line are no table; catches a limit that a number of the caller's falls under too."""
    result = generate("--max-tokens", "2", "--logprobs", "-1", "--prompt-logprobs", "25")
    note, _, tables = result.stderr.partition("\n")
    assert note == "paceline: note: --logprobs -1: the 20 likeliest of each row are shown; --format json has all"
    prompt, answer = tables.strip().split("\n\n")
    lines = answer.splitlines()[1:], prompt.splitlines()[2:]
    assert [len(re.findall(r" -\d+\.\d{4}", line)) for line in lines[0]] == [21, 21]
    assert {len(re.findall(r" -\d+\.\d{4}", line)) for line in lines[1]} == {26}


def test_a_table_shows_markup_and_line_ends_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches text that is taken for Rich's markup, or that tears the table."""
    row = {7: Logprob(-0.5, 1, "[red]x[/red]"), 8: Logprob(-1.5, 2, "\n")}
    one = CompletionOutput(0, "[red]x[/red]", (7,), ("bonus",), "length", 1, "block", logprobs=(row,))
    print_logprobs(RequestOutput(0, None, (1,), [one], SpeculationStats()), SamplingParams(logprobs=2))
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["'[red]x[/red]'", "7", "-0.5000", "1", "'[red]x[/red]'", "-0.5000", r"'\n'", "-1.5000"]


def test_logprobs_of_a_conversation() -> None:
    base = ["chat", "--model", "toy", "--temperature", "0", "--max-tokens", "5"]
    plain, shown = paceline(*base, stdin="hi\nyou\n"), paceline(*base, "--logprobs", "1", stdin="hi\nyou\n")
    assert shown.stdout == plain.stdout
    assert sum(line.startswith("answer ") for line in shown.stderr.splitlines()) == 2
