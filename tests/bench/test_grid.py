"""benchmarks/grid.py: what it runs, what it does not run twice, and tables of ratios that are known."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.report import SCHEMA, compared
from paceline.bench.runs import Run

from .fakes import loaded, run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grid.py"


@pytest.fixture(scope="module")
def grid() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("grid", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts_of(grid: Any, *words: str) -> list[tuple[Path, list[str]]]:
    """(JSON file, command) of each part that these words of a command line ask for."""
    return list(grid.jobs(grid.read_options(["--into", "x", "--prompts", "q.jsonl", *words])))


def after(command: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(command) if name == option]


def test_every_part_is_run_what_matters_first(grid: Any) -> None:
    """Catches a model, a number at once or a temperature that is left out, and fixed lengths where none are wanted."""
    parts = parts_of(grid)
    assert len({file for file, _ in parts}) == len(parts) == 12
    assert [file.stem[-3:] for file, _ in parts] == ["c01"] * 4 + ["c16"] * 4 + ["c04"] * 4
    with_fixed = [file.stem for file, command in parts if "-k" in command]
    assert with_fixed == ["smollm2-bf16-llamacpp-c01", "smollm2-bf16-hf-c01"]
    for file, command in parts:
        assert after(command, "--temperature") == ["0", "1"]
        assert ("--compile" in command) == ("-hf-" in file.stem)
        assert (after(command, "-c"), after(command, "--limit")) in ((["1"], ["3"]), (["4"], ["12"]), (["16"], ["48"]))
        assert after(command, "-o") == [str(file)]
        assert after(command, "--prompts") == ["q.jsonl", str(SCRIPT.parent / "prompts" / "code_edit.jsonl")]
        assert (after(command, "--max-tokens"), after(command, "--max-prompt-tokens")) == (["48"], ["800"])
    models = [after(command, "-m")[-1].removeprefix("smollm2:") for _, command in parts[:4]]
    assert models == ["bf16", "bf16", "q4_0", "q4_1"]
    assert after(parts[0][1], "-k") == ["1", "2", "4", "8", "16"]


def test_parts_can_be_chosen_and_peers_added(grid: Any) -> None:
    """Catches an option that is not passed on."""
    only = parts_of(grid, "--only", "q4_0-llamacpp-c04", "hf", "--", "--guard-wait", "9", "--threads", "2")
    assert [file.stem for file, _ in only] == [
        *("smollm2-bf16-hf-c01", "smollm2-bf16-hf-c16", "smollm2-bf16-hf-c04", "smollm2-q4_0-llamacpp-c04")
    ]
    assert all((after(c, "--guard-wait"), after(c, "--threads")) == (["9"], ["2"]) for _, c in only)
    named = ["--model", "smollm2:bf16@hf", "--peer", "a=one two", "--peer", "b=three"]
    peers = parts_of(grid, *named, "--at-once", "1", "--at-once", "16")
    assert [after(command, "-c") for _, command in peers] == [["1"], ["16"]]
    assert all(after(command, "--peer") == ["a=one two", "b=three"] and "-k" not in command for _, command in peers)
    assert [after(command, "-c") for _, command in parts_of(grid, *named)] == [["1"]]
    assert [after(command, "-c") for _, command in parts_of(grid, "--at-once", "4")] == [["4"]] * 4


@pytest.mark.parametrize(
    "words, said",
    [
        (["--prompts", "q.jsonl", "--peer", "a=one"], "--peer without --model"),
        ([], "--prompts FILE, or --report"),
        (["--prompts", "q.jsonl", "--at-once", "3"], "choose from"),
    ],
)
def test_what_makes_no_sense_is_refused(grid: Any, capsys: Any, words: list[str], said: str) -> None:
    """Catches a peer that is compared with models it does not run, and an hour that begins without prompts."""
    with pytest.raises(SystemExit) as ended:
        grid.read_options(["--into", "x", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def report(
    seconds: dict[str, float], *, peers: tuple[str, ...] = (), noise: float = 0.001, **rest: Any
) -> dict[str, Any]:
    """One request at a time, three prompts in each of two groups: contender -> seconds, twice that in group qa."""
    runs: list[Run] = []
    for category, slow in (("rag", 1.0), ("qa", 2.0)):
        for unit in range(3):
            wobble = 1 + noise * unit
            for name, each in seconds.items():
                runs.append(run(name, each * slow * (wobble if name == "plain" else 1), category=category, unit=unit))
    head = {
        "schema": SCHEMA, "kind": "compare", "baseline": "plain", "stopped": None,
        "model": {"name": "smollm2:bf16", "backend": "hf"}, "workload": {"concurrencies": [1]},
        "contenders": [{"name": name, "peer": name in peers} for name in seconds],
        "runs": [one.as_json() for one in runs],
    }  # fmt: skip
    return compared({**head, **rest})


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_a_cell_fails_by_the_upper_end_of_its_interval(grid: Any) -> None:
    """Catches a loss that is not marked, a gain that is, and the mean counted as a cell of its own."""
    good, bad = report({"plain": 1.0, "adaptive": 0.5}), report({"plain": 1.0, "adaptive": 1.25})
    head, _, won, lost = rows(grid.never_slower([good, bad]))
    assert head == ["model", "temperature", "at once", "rag", "qa", "mean"]
    assert won[:3] == ["smollm2:bf16, hf", "0", "1"]
    assert all(cell.startswith("2.00 (2.00 to") for cell in won[3:])
    assert all(cell == "**0.80 (0.80 to 0.80)**" for cell in lost[3:])
    said = grid.counts([good, bad])
    assert said.startswith("4 cells, 2 failed, 0 without an interval, 0 beside other load; worst: **0.80")
    assert "**" not in grid.never_slower([report({"plain": 1.0, "adaptive": 1.02})])
    (unsure,) = rows(grid.never_slower([report({"plain": 1.0, "adaptive": 1.3}, noise=0.2)]))[2:]
    assert unsure[3].startswith("0.91 (0.")


def test_what_is_doubtful_is_marked(grid: Any) -> None:
    """Catches a failure that other load made, a single run that counts as sure, and half a measurement as a whole."""
    doubtful = report({"plain": 1.0, "adaptive": 1.25}, stopped="interrupted after 3 of 9 runs")
    runs = [Run.from_json(r) for r in doubtful["runs"]]
    loud = [r.as_json() for r in runs if r.unit == 0 and r.category == "qa" and r.contender == "plain"]
    loud += [{**r, "contender": "adaptive", "load": vars_of(loaded())} for r in loud]
    made = compared({**doubtful, "runs": loud})
    assert rows(grid.never_slower([made]))[2][3:] == ["1.00\\*", "-"]
    assert grid.counts([made]).startswith("1 cells, 0 failed, 1 without an interval, 1 beside other load")
    assert "smollm2:bf16, hf: interrupted after 3 of 9 runs." in grid.text_of([made])
    assert grid.text_of([]) == "\n"


def vars_of(load: Any) -> dict[str, Any]:
    return {"others": load.others, "tries": load.tries, "disturbed": load.disturbed}


def test_adaptive_is_held_against_the_best_fixed_length(grid: Any) -> None:
    """Catches a ratio to the worst or to plain, and one that is too low and not marked."""
    known = {"plain": 1.0, "K = 2": 0.8, "K = 8": 0.5}
    head, _, near, far = rows(
        grid.against_fixed(
            [report({**known, "adaptive": 0.51}), report({**known, "adaptive": 0.6}), report({"plain": 1})]
        )
    )
    assert head[2:] == ["K = 1", "K = 2", "K = 4", "K = 8", "K = 16", "adaptive", "best", "adaptive / best"]
    assert near[2:8] == ["-", "1.251", "-", "2.002", "-", "1.963"]
    assert near[8:] == ["K = 8", "0.98 (0.98 to 0.98)"]
    assert far[8:] == ["K = 8", "**0.83 (0.83 to 0.83)**"]


def test_ratios_to_peers_are_ours_over_theirs(grid: Any) -> None:
    """Catches a ratio that is turned over, or made of plain decoding; with and without plain in the report."""
    both = report({"plain": 1.0, "adaptive": 0.5, "vllm": 0.4, "slow": 2.0}, peers=("vllm", "slow"))
    head, _, vllm, slow = rows(grid.against_peers([both]))
    assert head == ["ours", "peer", "temperature", "at once", "rag", "qa", "mean"]
    assert vllm[1:5] == ["vllm", "0", "1", "**0.80 (0.80 to 0.80)**"]
    assert slow[1:5] == ["slow", "0", "1", "4.00 (4.00 to 4.00)"]
    alone = report({"adaptive": 0.5, "vllm": 0.4}, peers=("vllm",), baseline="vllm")
    assert len(rows(grid.text_of([alone]))) == 3


def test_from_prompts_to_tables_on_a_toy(tmp_path: Path) -> None:
    """Catches a command line that `bench compare` refuses, and parts that are measured twice or after the time."""
    prompts = tmp_path / "q.jsonl"
    lines = [{"category": c, "turns": [f"{c} {i} one two one two"]} for c in ("qa", "rag") for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    folder = tmp_path / "grid"
    sizes = ["--max-tokens", "4", "--max-prompt-tokens", "60", "--repeats", "1", "--limit", "3", "8", "16"]
    words = [sys.executable, str(SCRIPT), "--into", str(folder), "--prompts", str(prompts), "--model", "toy@auto"]

    def made(*options: str, behind: tuple[str, ...] = (), status: int = 0) -> tuple[str, str]:
        command = [*words, *sizes, *options, "--", "--no-guard", *behind]
        return ended(command, status)

    def ended(command: list[str], status: int) -> tuple[str, str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    assert "no report is in" in ended([*words, "--report"], 1)[1]
    assert "nowhere.jsonl' is no file" in ended([*words, "--prompts", "nowhere.jsonl"], 1)[1]
    assert "toy-auto-c01: left out, the time is over" in made("--minutes", "0", "--only", "c01")[1]
    failed = made("--only", "c01", behind=("--threads", "2"), status=1)[1]
    assert "--threads 2 is not an option of a toy" in failed
    assert "toy-auto-c01 ended with status 2" in failed
    text, progress = made("--only", "c01", "c04")
    assert "[1/2, 0.0 min] toy-auto-c01: measuring" in progress
    found = rows(text)
    assert found[0][3:] == ["qa", "rag", "mean"]
    assert [row[:3] for row in found[2:]] == [["toy, toy", t, n] for n in ("1", "4") for t in ("0", "1")]
    assert all("to" in cell for row in found[2:] for cell in row[3:4] if row[2] == "1")
    again, progress = made("--only", "c01", "c04")
    assert again == text
    assert progress.count("is there") == 2
    file = folder / "toy-auto-c01.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "stopped": "interrupted after 3 of 9 runs"}))
    text, progress = made("--only", "c01", "c04")
    assert (progress.count("measuring"), progress.count("is there")) == (1, 1)
    assert "interrupted" not in text
    file.write_text("{}")
    _, said = made("--only", "c01", status=1)
    assert "is not a report" in said
    assert "Traceback" not in said
