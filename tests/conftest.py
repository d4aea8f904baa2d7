"""Fixtures for what a machine may lack: models and prompt folders. Absence skips, with the reason."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from paceline.models import available


@pytest.fixture(scope="session")
def model_path() -> object:
    """model_path(name): the cached file of a named model; tests that need it are skipped elsewhere."""

    def path(name: str) -> Path:
        if importlib.util.find_spec("llama_cpp") is None:
            pytest.skip("llama-cpp-python is not installed; pip install 'paceline[llamacpp]'")
        for entry in available():
            if entry.name == name and entry.cached:
                return Path(entry.path)
        pytest.skip(f"{name} is not in the cache; run: paceline models pull {name}")

    return path


@pytest.fixture(scope="session")
def spec_bench() -> list[str]:
    """First turns of Spec-Bench's questions, shortest first within a fixed choice of categories."""
    root = os.environ.get("PACELINE_DATA")
    if not root:
        pytest.skip("PACELINE_DATA is not set; it names a folder with spec_bench/question.jsonl")
    file = Path(root) / "spec_bench" / "question.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} does not exist")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row["turns"][0] for row in rows]
