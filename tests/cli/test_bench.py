"""`paceline bench`: counts, pairing and reports on the toy model. How fast anything is decides no test."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import bench_options

from .shell import error_line, paceline, started

PEER = Path(__file__).parents[1] / "bench" / "example_peer.py"
TOY = ["--model", "toy", "--no-guard", "--max-tokens", "12"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Two categories, of two prompts and of one."""
    rows = [("a", "hello there hello"), ("a", "one two one two"), ("b", "abc abc")]
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question_id": i, "category": c, "turns": [t, "never asked"]}) for i, (c, t) in enumerate(rows)
        )
    )
    return str(path)


def bench(command: str, prompts: str, *options: str) -> dict[str, Any]:
    """The report as JSON; notes on stderr are allowed."""
    result = paceline("bench", command, *TOY, "--prompts", prompts, "--format", "json", *options)
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    assert value["kind"] == command
    return value


def test_run_reports_each_category(prompts: str) -> None:
    """Catches prompts that are not asked, and second turns that are."""
    report = bench("run", prompts, "--drafter", "model:toy", "-k", "3", "--repeats", "2", "--temperature", "1")
    cells = {c["category"]: c for c in report["cells"]}
    assert {name: (c["runs"], c["tokens"]) for name, c in cells.items()} == {
        "a": (4, 48), "b": (2, 24), "mean": (6, 72),
    }  # fmt: skip
    assert cells["a"]["tokens_per_step"] == 4.0
    assert cells["a"]["acceptance_at"] == [1.0, 1.0, 1.0]
    assert report["contenders"] == [{"name": "K = 3", "peer": False, "drafter": "model:toy", "draft_length": 3}]
    assert report["workload"]["prompts"] == {"a": 2, "b": 1}


def test_run_without_drafting(prompts: str) -> None:
    """Catches a plain run that drafts."""
    for off in (("-k", "0"), ("--drafter", "none")):
        (cell,) = bench("run", prompts, *off, "--category", "b")["cells"]
        assert (cell["contender"], cell["drafted"], cell["tokens_per_step"]) == ("plain", 0, 1.0)


def test_compare_pairs_everybody_with_plain(prompts: str) -> None:
    """Catches cells that are missing, ratios without partners, and texts that differ on a model whose do not."""
    report = bench(
        "compare", prompts, "-d", "model:toy", "-k", "2", "-k", "4", "--temperature", "0", "--temperature", "1",
        "-c", "1", "-c", "2", "--repeats", "2",
    )  # fmt: skip
    names = ["plain", "K = 2", "K = 4", "adaptive"]
    assert [c["name"] for c in report["contenders"]] == names
    keys = [(c["concurrency"], c["temperature"], c["contender"], c["category"]) for c in report["cells"]]
    wanted = [(n, t, name, c) for n in (1, 2) for t in (0.0, 1.0) for name in names for c in ("a", "b", "mean")]
    assert sorted(keys) == sorted(wanted)
    for cell in report["cells"]:
        assert (cell["ratio"] is None) == (cell["contender"] == "plain")
        assert cell["same_text"] == cell["runs"]
        if cell["contender"] != "plain":
            assert (
                cell["ratio"]["low"] is None or cell["ratio"]["low"] <= cell["ratio"]["ratio"] <= cell["ratio"]["high"]
            )
    tokens = {c["contender"]: c["tokens"] for c in report["cells"] if c["category"] == "mean" and c["concurrency"] == 1}
    assert set(tokens.values()) == {6 * 12}
    assert {len(r["results"]) for r in report["runs"] if r["concurrency"] == 2} == {2}
    assert len(report["runs"]) == 4 * 2 * (3 + 2) * 2


def test_compare_with_a_peer(prompts: str) -> None:
    """Catches a peer that gets no turns, or whose name is lost."""
    report = bench("compare", prompts, "--peer", f"letters={sys.executable} {PEER}", "--baseline", "letters")
    (about,) = [c for c in report["contenders"] if c["peer"]]
    assert about["engine"] == "letters 1.0"
    cells = {(c["contender"], c["category"]): c for c in report["cells"]}
    assert cells["letters", "a"]["tokens"] == 24
    assert cells["letters", "a"]["ratio"] is None
    assert cells["plain", "a"]["ratio"]["n"] == 2
    # Who answers with the letters of the question instead of a model's words is told so.
    assert report["warnings"]
    assert all("none of its 2 texts is that of letters" in warning for warning in report["warnings"])


def test_a_peer_that_dies_is_a_warning(prompts: str) -> None:
    """Catches a comparison that is lost because one engine fell over."""
    report = bench("compare", prompts, "--peer", f"letters={sys.executable} {PEER} dies")
    assert any("peer letters ended (exit status 3)" in warning for warning in report["warnings"])
    assert {c["tokens"] for c in report["cells"] if c["contender"] == "plain"} == {24, 12, 36}


GREEDY_PEER = """
import json, sys
def say(**message): print(json.dumps(message), flush=True)
sys.stdin.readline()
say(type="ready", protocol=1, engine="greedy 1.0")
for line in sys.stdin:
    job = json.loads(line)
    if job["type"] == "close":
        break
    if job["requests"][0]["temperature"]:
        say(type="error", message="greedy only", REFUSAL)
    else:
        results = [{"id": r["id"], "tokens": 2, "text": "ab", "finish_reason": "length"} for r in job["requests"]]
        say(type="result", job=job["job"], seconds=0.001, results=results)
"""


@pytest.mark.parametrize(
    "refusal, goes_on",
    [("refused=True, job=job['job']", True), ("job=job['job']", False), ("refused=True, job=99", False)],
)
def test_a_peer_that_refuses_one_temperature_is_measured_at_the_next(
    prompts: str, tmp_path: Path, refusal: str, goes_on: bool
) -> None:
    """Catches cells that are never measured because of an earlier option, and a peer kept that is out of step."""
    script = tmp_path / "peer.py"
    script.write_text(GREEDY_PEER.replace("REFUSAL", refusal))
    options = ["--temperature", "1", "--temperature", "0", "--no-adaptive", "--peer", f"g={sys.executable} {script}"]
    report = bench("compare", prompts, *options)
    runs = [(r["temperature"], r["error"]) for r in report["runs"] if r["contender"] == "g"]
    assert runs == [(1.0, "peer g says: greedy only"), *([(0.0, None)] * 3 if goes_on else [])]
    cells = {(c["temperature"], c["category"]): c for c in report["cells"] if c["contender"] == "g"}
    assert (cells[0.0, "mean"]["tokens"], cells[0.0, "mean"]["error"]) == ((6, None) if goes_on else (0, "no runs"))
    assert cells[1.0, "a"]["error"] == "peer g says: greedy only"
    plain = [c["runs"] for c in report["cells"] if c["contender"] == "plain"]
    assert plain == [2, 1, 3, 2, 1, 3]


def test_step_shows_every_stage(prompts: str) -> None:
    """Catches a stage, a drafter or a draft length that is left out."""
    report = bench("step", prompts, "-d", "lookup", "-d", "model:toy", "-k", "2", "--repeats", "1", "--top-p", "0.9")
    rows = {r["contender"]: r for r in report["steps"]}
    assert list(rows) == ["plain", "lookup K = 2", "lookup adaptive", "model:toy K = 2", "model:toy adaptive"]
    assert rows["plain"]["drafts_per_step"] == 0
    assert rows["model:toy K = 2"]["drafts_per_step"] == 2
    for row in rows.values():
        stages = [row[f"{stage}_us"] for stage in ("draft", "forward", "verify", "other")]
        assert all(stage >= 0 for stage in stages)
        assert row["share_outside"] == pytest.approx(1 - row["forward_us"] / sum(stages))
    assert report["workload"]["sampling"]["top_p"] == 0.9


def test_load_has_a_row_for_each_traffic(prompts: str) -> None:
    """Catches readers that are not served, and limits that are not said."""
    report = bench("load", prompts, "-c", "2", "--rate", "200", "--requests", "5", "--first-token-ms", "250")
    rows = [(r["traffic"], r["contender"], r["requests"], r["tokens"]) for r in report["loads"]]
    assert rows == [(t, c, 5, 60) for t in ("2 at once", "200 a second") for c in ("plain", "adaptive")]
    assert report["limits"] == {"first_token_seconds": 0.25, "per_token_seconds": 0.1}
    only = bench("load", prompts, "--rate", "300", "--requests", "2", "--no-adaptive")
    assert [r["traffic"] for r in only["loads"]] == ["300 a second"]


@pytest.mark.parametrize("command", ["run", "compare", "step", "load"])
def test_all_formats_say_the_same(prompts: str, tmp_path: Path, command: str) -> None:
    """Catches a format that one command cannot make, and a saved report that cannot be shown again."""
    files = [tmp_path / f"r.{suffix}" for suffix in ("json", "md", "html")]
    outputs = [word for file in files for word in ("-o", str(file))]
    few = ["--requests", "2"] if command == "load" else ["--repeats", "1"]
    made = paceline("bench", command, *TOY, "--prompts", prompts, *few, *outputs)
    assert made.exit_code == 0, made.stderr
    assert "model: toy on toy" in made.stdout
    assert "idle machine: not waited for: switched off" in made.stdout
    assert files[1].read_text().startswith("# ")
    assert files[2].read_text().startswith("<!DOCTYPE html>")
    again = paceline("bench", "report", str(files[0]), "--format", "markdown")
    assert again.exit_code == 0, again.stderr
    assert again.stdout == files[1].read_text()
    page = paceline("bench", "report", str(files[0]), "--format", "html")
    assert page.stdout == files[2].read_text()


def test_the_small_set_needs_no_file() -> None:
    """Catches a package without its prompts."""
    result = paceline("bench", "run", *TOY, "--limit", "1", "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["workload"]["prompts"] == {
        "question": 1, "story": 1, "summary": 1, "rewrite": 1, "code_edit": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options, said",
    [
        (["compare", "--no-plain", "--no-adaptive"], "nothing is left to measure"),
        (["compare", "--baseline", "K = 9"], "baseline = 'K = 9'; allowed: plain, adaptive"),
        (["compare", "--peer", "vllm"], "NAME=COMMAND"),
        (["compare", "--peer", "plain=true"], "each with a name of its own"),
        (["compare", "-d", "lokup"], "did you mean lookup?"),
        (["compare", "--temperature", "0", "--temperature", "-1"], "temperature"),
        (["run", "--category", "c"], "category 'c' is not in the prompts"),
        (["run", "--max-prompt-tokens", "2"], "no prompt fits"),
        (["run", "--threads", "2"], "--threads 2 is not an option of a toy model"),
        (["run", "-o", "report.pdf"], "allowed: a name that ends in"),
        (["step", "-o", "/nowhere/at/all/x.md"], "make it first"),
        (["load", "--rate", "0"], "rate = 0.0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(prompts: str, options: list[str], said: str) -> None:
    """Catches an option that is ignored, a traceback, and a refusal that comes after the measuring."""
    result = paceline("bench", options[0], *TOY, "--prompts", prompts, *options[1:])
    assert result.exit_code == 2, result.stderr
    assert said in error_line(result)


def test_only_a_comparison_has_a_baseline(prompts: str, tmp_path: Path) -> None:
    """Catches an option that is ignored."""
    file = tmp_path / "r.json"
    paceline("bench", "run", *TOY, "--prompts", prompts, "-o", str(file))
    result = paceline("bench", "report", str(file), "--baseline", "plain")
    assert result.exit_code == 2
    assert "holds no comparison" in error_line(result)


def test_help_says_what_the_commands_do() -> None:
    """Catches a command that is not registered."""
    result = paceline("bench", "--help")
    assert result.exit_code == 0
    for name in ("run", "compare", "step", "load", "report"):
        assert name in result.stdout


@pytest.mark.parametrize("command", [["bench", "compare"], ["bench", "report"], ["plan", "map"]])
def test_help_names_the_formats_that_there_are(command: list[str]) -> None:
    """Catches a format in the help that the command refuses, and a reader who is not told what the JSON is for."""
    said = " ".join(paceline(*command, "--help").stdout.replace("│", " ").split())
    assert ".json, .md or .html" in said
    assert (".svg" in said) == (command[0] == "plan")
    assert ("makes the others of it" in said) == (command[0] == "bench")


def stops_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Let the measured run with this number (warm-ups do not count) raise the error, in whatever command."""
    import paceline.bench.guard as module

    made = iter(range(1, 1000))

    class Stops(module.Guard):
        def run(self, *args: Any, **options: Any) -> Any:
            if next(made) == call:
                raise error
            return super().run(*args, **options)

    monkeypatch.setattr(module, "Guard", Stops)


@pytest.mark.parametrize("command", ["run", "compare", "step", "load"])
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted after 2 of {} runs"),
        (RuntimeError("decode failed: 1"), 1, "stopped after 2 of {} runs by RuntimeError: decode failed: 1"),
    ],
)
def test_what_was_measured_is_kept(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, error: BaseException, status: int,
    said: str,
) -> None:  # fmt: skip
    """Catches an hour of measuring that Ctrl-C or an engine throws away, and half of it that looks like all of it."""
    stops_at(monkeypatch, 3, error)
    files = [tmp_path / f"r.{suffix}" for suffix in ("json", "md", "html")]
    outputs = [word for file in files for word in ("-o", str(file))]
    few = ["--requests", "2", "-c", "1", "-c", "2"] if command == "load" else ["--repeats", "1"]
    result = paceline("bench", command, *TOY, "--prompts", prompts, *few, *outputs)
    assert result.exit_code == status
    stopped = said.format({"run": 3, "compare": 6, "step": 6, "load": 4}[command])
    said = f"unfinished: {stopped}"
    assert f"paceline: note: {said}" in result.stderr
    report = json.loads(files[0].read_text())
    assert (report["stopped"], report["warnings"]) == (stopped, [said])
    assert len(report["loads" if command == "load" else "runs"]) == 2
    assert all(said in file.read_text() for file in files[1:])
    again = paceline("bench", "report", str(files[0]), "--format", "markdown")
    assert again.exit_code == 0, again.stderr
    assert again.stdout == files[1].read_text()


def test_an_error_before_the_first_number_writes_nothing(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an empty report in place of an old one."""
    stops_at(monkeypatch, 1, KeyboardInterrupt())
    file = tmp_path / "r.json"
    file.write_text("the old one")
    result = paceline("bench", "compare", *TOY, "--prompts", prompts, "-o", str(file))
    assert result.exit_code == 130
    assert file.read_text() == "the old one"


def test_an_interrupt_ends_everything_and_leaves_whole_files(prompts: str, tmp_path: Path) -> None:
    """Catches half a report, a temporary file, and a peer that goes on by itself."""
    folder = tmp_path / "out"
    folder.mkdir()
    marker = tmp_path / "job"
    peer = tmp_path / "peer.py"
    peer.write_text(
        f"import os, runpy, sys\nsys.stdout.reconfigure(line_buffering=True)\n"
        f"written = sys.stdout.write\n"
        f"def write(text):\n"
        f"    if '\"job\": 9' in text: open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
        f"    return written(text)\n"
        f"sys.stdout.write = write\n"
        f"runpy.run_path({str(PEER)!r}, run_name='__main__')\n"
    )
    options = [*TOY, "--prompts", prompts, "--repeats", "100000"]
    files = [word for name in ("r.json", "r.html") for word in ("-o", str(folder / name))]
    with started("bench", "compare", *options, *files, "--peer", f"letters={sys.executable} {peer}") as process:
        until = time.monotonic() + 60
        while not (marker.exists() and marker.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert sorted(path.name for path in folder.iterdir()) == ["r.html", "r.json"]
    report = json.loads((folder / "r.json").read_text())
    assert report["stopped"].startswith("interrupted after ")
    assert report["cells"][0]["runs"] >= 2
    assert (folder / "r.html").read_text().rstrip().endswith("</html>")
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.mark.model
def test_a_real_model_is_compared(model_path: Any, prompts: str) -> None:
    """Catches what a toy does not have: a chat template, end tokens, a model file to name."""
    path = str(model_path("smollm2:bf16"))
    result = paceline(
        "bench", "compare", "-m", path, "--prompts", prompts, "--limit", "1", "--max-tokens", "8", "--threads", "1",
        "-k", "2", "--no-guard", "--format", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["workload"]["template"] is True
    assert report["model"]["file"] == Path(path).name
    assert report["model"]["quantisation"] == "BF16"
    assert all(0 < c["tokens"] <= 16 for c in report["cells"] if c["category"] == "mean")


def test_a_log_of_a_long_run_tells_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run of an hour that shows nothing where its messages go to a file, and one that fills that file."""
    now = 0.0
    monkeypatch.setattr(bench_options, "perf_counter", lambda: now)
    with bench_options.counting_bar() as report:
        for done in range(100):
            report("qa", done, 100)
            now += bench_options.LINE_SECONDS / 10
        report("", 100, 100)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"paceline: note: {done} of 100: qa" for done in range(10, 100, 10)]
