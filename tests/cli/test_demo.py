"""`paceline demo`: both speeds, and whether the texts are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import demo
from paceline.cli.loading import open_session
from paceline.cli.options import ModelOptions
from paceline.params import SamplingParams

from .shell import error_line, paceline

TOY = ["demo", "--model", "toy", "--runs", "2", "--max-tokens", "30", "--drafter", "model:toy", "--draft-length", "4"]


def test_the_numbers() -> None:
    result = paceline(*TOY, "--format", "json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert (value["model"], value["draft_length"]) == ("toy", 4)
    assert (value["equal"], value["first_difference"]) == (True, None)
    assert (value["without"]["drafter"], value["with"]["drafter"]) == ("none", "model:toy")
    assert value["without"]["tokens_per_step"] == 1.0
    assert value["with"]["tokens_per_step"] == 5.0
    assert value["without"]["text"] == value["with"]["text"]
    for one in (value["without"], value["with"]):
        assert len(one["tokens_per_second_of_runs"]) == len(one["seconds_of_runs"]) == 2
        assert one["tokens"] == 30
    ratio = value["with"]["tokens_per_second"] / value["without"]["tokens_per_second"]
    assert value["speedup"] == pytest.approx(ratio)


def test_the_table() -> None:
    result = paceline(*TOY)
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    for said in ("no drafting", "model:toy, K = 4", "tokens per step 1.00 5.00", "speedup", "texts equal: yes, all 30"):
        assert said in words


def test_another_prompt_goes_into_the_template(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    value = json.loads(paceline(*TOY, "--prompt-file", str(file), "--format", "json").stdout)
    assert value["prompt_tokens"] == len("user: hello\nassistant: ")


def test_a_difference_is_found_and_explained() -> None:
    with open_session(ModelOptions(model="toy", drafter="lookup")) as session:
        one, other = (
            demo.Series(name, session.llm, SamplingParams(max_tokens=20, seed=1, draft_length=4, logit_bias=bias))
            for name, bias in (("none", None), ("lookup", {10: 6.0}))
        )
        one.run("hello")
        other.run("hello")
        result = demo.compare(session, one, other)
    ids = [series.outputs[0].outputs[0].token_ids for series in (one, other)]
    first = result["first_difference"]
    assert result["equal"] is False
    assert ids[0][:first] == ids[1][:first]
    assert ids[0][first] != ids[1][first]


def test_comparing_nothing_with_nothing_is_refused() -> None:
    result = paceline("demo", "--model", "toy", "--drafter", "none")
    assert result.exit_code == 2
    assert "drafter = 'none'" in error_line(result)


@pytest.mark.model
def test_a_real_model_edits_code_in_few_steps(model_path: Any) -> None:
    path = str(model_path("smollm2:bf16"))
    result = paceline(
        "demo", "--model", path, "--runs", "1", "--max-tokens", "120", "--threads", "1", "--format", "json"
    )
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["with"]["tokens_per_step"] > 4
    assert "self.notes[:self.limit]" in value["with"]["text"]
