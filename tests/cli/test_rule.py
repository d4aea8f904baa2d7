"""`paceline rule`: the table is right, can be checked by hand, and bad input is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli.options import OutputFormat
from paceline.cli.rule import parse_probabilities, rule, rule_table
from paceline.errors import InvalidDistribution, InvalidInput


def test_the_lesson_by_hand() -> None:
    table = rule_table([0.7, 0.3], [0.4, 0.6])
    assert table.reject_probability == pytest.approx(0.3)
    assert [row.accept for row in table.rows] == [1.0, 0.5]
    assert [row.residual for row in table.rows] == [1.0, 0.0]
    assert [row.kept for row in table.rows] == pytest.approx([0.4, 0.3])
    assert [row.recovered for row in table.rows] == pytest.approx([0.3, 0.0])
    assert [row.total for row in table.rows] == pytest.approx([0.7, 0.3])


def test_a_token_that_is_never_drafted_is_recovered() -> None:
    table = rule_table([0.5, 0.5], [1.0, 0.0])
    assert [row.accept for row in table.rows] == [0.5, None]
    assert [row.recovered for row in table.rows] == [0.0, 0.5]


def test_equal_distributions_reject_nothing() -> None:
    table = rule_table([0.25, 0.75], [0.25, 0.75])
    assert table.reject_probability == 0.0
    assert [row.residual for row in table.rows] == [0.25, 0.75]


weights = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(lambda w: sum(w) > 0)


@given(weights, weights)
@settings(max_examples=200, derandomize=True)
def test_the_two_paths_always_add_up_to_p(a: list[int], b: list[int]) -> None:
    n = min(len(a), len(b))
    if sum(a[:n]) == 0 or sum(b[:n]) == 0:
        return
    p, q = (np.array(w[:n]) / sum(w[:n]) for w in (a, b))
    table = rule_table(p.tolist(), q.tolist())
    assert [row.total for row in table.rows] == pytest.approx(p.tolist(), abs=1e-12)
    assert table.reject_probability == pytest.approx(1.0 - np.minimum(p, q).sum(), abs=1e-12)


def test_text_has_every_product_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rule(target="0.7, 0.3", draft="0.4,0.6")
    text = capsys.readouterr().out
    for product in ("0.4 * 1 = 0.4", "0.6 * 0.5 = 0.3", "0.3 * 1 = 0.3", "0.3 * 0 = 0"):
        assert product in text
    assert re.search(r"P\(reject\) = .* = 0\.3\b", text)
    rule(target="1/3,1/3,1/3", draft="0.7111,0.2889,0")
    text = capsys.readouterr().out
    assert "never drafted" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    rule(target="1/3,2/3", draft="1/3,2/3")
    assert "every draft is kept" in capsys.readouterr().out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    rule(target="0.5,0.5", draft="1,0", output_format=OutputFormat.JSON)
    table = json.loads(capsys.readouterr().out)
    assert table["reject_probability"] == 0.5
    assert table["rows"][1] == {
        "token": 1,
        "p": 0.5,
        "q": 0.0,
        "accept": None,
        "residual": 1.0,
        "kept": 0.0,
        "recovered": 0.5,
        "total": 0.5,
    }


def test_fractions_and_spaces_are_numbers() -> None:
    assert parse_probabilities("--target", " 1/4 ,.75") == [0.25, 0.75]


@pytest.mark.parametrize("text", ["", "a,b", "0.5,", "0.5;0.5", "1/0", "1/2/3", "0.5 0.5", "50%"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"--target {text!r}")):
        parse_probabilities("--target", text)


@pytest.mark.parametrize(
    "target, draft, message",
    [
        ("0.7,0.4", "0.4,0.6", "target sums to 1.1"),
        ("0.7,0.3", "0.4,0.7", "draft sums to 1.1"),
        ("0.7,0.3", "1", "target has 2 probabilities and draft 1"),
        ("1.5,-0.5", "0.4,0.6", r"target\[0\] = 1.5"),
        ("nan,1", "0.4,0.6", r"target\[0\] = nan"),
        ("inf,1", "0.4,0.6", r"target\[0\] = inf"),
    ],
)
def test_what_is_no_distribution_is_refused(
    target: str, draft: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidDistribution, match=message):
        rule(target=target, draft=draft)
    assert capsys.readouterr().out == ""
    with pytest.raises(InvalidDistribution, match=message):
        rule(target=target, draft=draft, output_format=OutputFormat.JSON)
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "InvalidDistribution"


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(rule)
    return CliRunner().invoke(app, list(arguments))


def test_the_options_have_the_names_of_the_lesson() -> None:
    result = run("--target", "0.7,0.3", "--draft", "0.4,0.6", "--format", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows"][1]["accept"] == 0.5
    assert run("--target", "0.7,0.3").exit_code == 2
    assert run("--target", "0.7,0.3", "--draft", "0.4,0.6", "--format", "xml").exit_code == 2
