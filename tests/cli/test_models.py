"""`paceline models`, and the bar that fetching shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.models import available

from .shell import error_line, paceline


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_list_shows_every_name_and_fetches_nothing(cache: Path) -> None:
    result = paceline("models", "list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["NAME", "CACHED", "SIZE", "WHAT", "IT", "IS", "PATH"]
    assert any(line.startswith("smollm2 = smollm2:bf16 ") and str(cache) in line for line in lines)
    assert any(line.startswith("toy ") for line in lines)
    assert len(lines) == 2 + len(available())
    assert not cache.exists()


@pytest.mark.usefixtures("cache")
def test_list_as_json_says_the_same() -> None:
    rows = json.loads(paceline("models", "list", "--format", "json").stdout)["models"]
    for row, entry in zip(rows, available(), strict=False):
        assert (row["name"], row["cached"], row["size"]) == (entry.name, False, entry.size)
        assert (row["path"], row["note"]) == (str(entry.path), entry.note)
    assert (rows[-1]["name"], rows[-1]["cached"], rows[-1]["path"]) == ("toy", True, None)


@pytest.mark.usefixtures("cache")
def test_pull_of_an_unknown_name() -> None:
    result = paceline("models", "pull", "smolm2")
    assert result.exit_code == 1
    assert "'smollm2'" in error_line(result)


def test_pull_of_a_toy_has_nothing_to_do() -> None:
    result = paceline("models", "pull", "toy")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "built in" in result.stderr


def fake_pull(name: str, progress: Callable[[str, int, int | None], None]) -> Path:
    progress("downloading it", 0, 1000)
    progress("downloading it", 1000, 1000)
    progress("waiting for another process", 0, None)
    progress(f"making {name}", 50, 100)
    return Path("/somewhere/model.gguf")


def test_pull_prints_the_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.pull", fake_pull)
    result = paceline("models", "pull", "smollm2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "/somewhere/model.gguf\n", "")


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.pull", fake_pull)
    result = paceline("models", "pull", "smollm2", FORCE_COLOR="1", TERM="xterm-256color")
    assert result.stdout == "/somewhere/model.gguf\n"
    assert "making smollm2" in result.stderr
    assert "50/100 bytes" in result.stderr


def test_without_a_command_it_says_which_there_are() -> None:
    result = paceline("models")
    assert result.exit_code == 0
    assert "list" in result.stdout
    assert "pull" in result.stdout
