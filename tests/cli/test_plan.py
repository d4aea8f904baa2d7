"""`paceline plan` on the toy model: every number has its place. How fast anything is decides no test."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from .shell import error_line, paceline

TOY = ["--model", "toy", "--no-guard", "--max-tokens", "40"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("hello there hello", "one two one two")))
    return str(path)


@pytest.fixture(scope="module")
def made(prompts: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """stdout as text, and the folder with the report in every format."""
    folder = tmp_path_factory.mktemp("made")
    files = [word for suffix in ("json", "md", "html") for word in ("-o", str(folder / f"plan.{suffix}"))]
    options = ["-d", "model:toy", "-k", "3", "-c", "2", "--prompts", prompts]
    result = paceline("plan", "model", *TOY, *options, *files)
    assert result.exit_code == 0, result.stderr
    return result.stdout, folder


def report(made: tuple[str, Path]) -> dict[str, Any]:
    value = json.loads((made[1] / "plan.json").read_text())
    assert isinstance(value, dict)
    return value


def test_map_prints_the_surface() -> None:
    """Catches a command that is not registered, and a map at another cost than it was asked for."""
    result = paceline("plan", "map", "--cost-ratio", "0.1")
    assert result.exit_code == 0, result.stderr
    four = next(line for line in result.stdout.splitlines() if line.startswith("4 "))
    assert four.split()[1:5] == ["(0.89)", "1.18", "1.38", "1.65"]
    assert "Speedup at c = 0.1" in result.stdout
    free = paceline("plan", "map", "-c", "0", "--max-draft-length", "2", "--format", "json")
    found = json.loads(free.stdout)["map"]
    assert found["lengths"] == [0, 1, 2]
    assert found["speedups"][2][-1] == 3


def test_map_writes_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "map.svg"
    result = paceline("plan", "map", "-o", str(file), "--format", "svg")
    assert result.exit_code == 0, result.stderr
    assert file.read_text() == result.stdout
    assert ET.fromstring(result.stdout).tag.endswith("svg")


def test_model_measures_predicts_and_measures(made: tuple[str, Path]) -> None:
    """Catches a batch size or a draft length that is left out, and acceptance of somebody else's drafts."""
    found = report(made)
    assert found["schema"] == "paceline-plan/1"
    assert found["acceptance"]["mean"] == 1.0
    assert found["acceptance"]["at"] == [1.0] * 16
    assert [row["iid"] for row in found["tokens"]] == list(range(1, 18))
    walked = [row["walked"] for row in found["tokens"]]
    assert walked[:4] == [1.0, 2.0, pytest.approx(40 / 14), 4.0]
    assert {(p["length"], p["batch"]) for p in found["predictions"]} == {
        (length, batch) for length in range(17) for batch in (1, 2, 4, 8, 16, 32, 64)
    }
    for batch in (1, 2):
        rows = {check["setting"]: check for check in found["checks"] if check["batch"] == batch}
        assert {"plain", "K = 3", "adaptive"} <= set(rows)
        assert rows["plain"]["tokens_per_step"] == 1.0
        assert rows["K = 3"]["tokens_per_step"] == pytest.approx(4.0)
        assert rows["K = 3"]["predicted"]["tokens_per_step"] == pytest.approx(4.0)
        assert rows["K = 3"]["tokens_per_second"] > 0
    assert {p["batch"] for p in found["predictions"] if "batch" in p["beyond"]} == {4, 8, 16, 32, 64}
    assert len(found["costs"]["seconds"][0]) == len(found["costs"]["widths"])


def test_model_says_what_is_what_in_every_format(made: tuple[str, Path]) -> None:
    """Catches a verdict, a table or a level of certainty that one format leaves out."""
    stdout, folder = made
    page, markdown = (folder / "plan.html").read_text(), (folder / "plan.md").read_text()
    text = "".join(ET.fromstring(page.split("\n", 1)[1]).itertext())
    for shown in (stdout, text, markdown):
        for words in (
            "algorithm", "measurement", "extrapolation", "Best setting predicted for one request",
            "Best setting predicted for 2 requests at once", "Break-even batch", "Prediction beside measurement",
            "i.i.d. formula", "walked", "drafter",
        ):  # fmt: skip
            assert words in shown, words
    assert len(list(ET.fromstring(page.split("\n", 1)[1]).iter("{http://www.w3.org/2000/svg}svg"))) == 4
    assert "Acceptance by draft position" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["map", "-o", "map.png"], "a PNG needs a drawing library"),
        (["map", "--cost-ratio", "-1"], "cost-ratio"),
        (["map", "--cost-ratio", "inf"], "cost ratio = inf"),
        (["model", *TOY, "-d", "none"], "drafter = 'none'"),
        (["model", *TOY, "-d", "forced"], "drafter = 'forced'"),
        (["model", *TOY, "--temperature", "0", "--temperature", "1"], "2 temperatures; allowed: one"),
        (["model", *TOY, "-o", "/nowhere/at/all/plan.html"], "make it first"),
        (["model", *TOY, "--prompts", "/nowhere.jsonl"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: list[str], said: str) -> None:
    """Catches a traceback, and a refusal that comes after the measuring."""
    result = paceline("plan", *options)
    assert result.exit_code == 2, result.stderr
    assert said in error_line(result)


def test_help_says_what_the_commands_do() -> None:
    result = paceline("plan")
    assert result.exit_code == 0
    assert "map" in result.stdout
    assert "model" in result.stdout
