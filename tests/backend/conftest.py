"""Tiny models for the llama.cpp tests, written once per run; skipped where llama-cpp-python is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.backend.llamacpp import LlamaCppBackend

from . import gguf_files

TINY = {
    "llama": gguf_files.llama(),
    "draft": gguf_files.llama(seed=7),
    "spm": gguf_files.llama(vocabulary=gguf_files.spm_vocabulary()),
    "moe": gguf_files.moe(),
    "gemma2": gguf_files.gemma2(window=8),
    "mamba": gguf_files.mamba(),
    "bert": gguf_files.bert(),
    "embedding": gguf_files.embedding_llama(),
    "no vocabulary": gguf_files.llama(vocabulary={"tokenizer.ggml.model": "none"}),
}

Open = Callable[..., LlamaCppBackend]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_path(name): the file of a tiny random model."""
    folder = tmp_path_factory.mktemp("tiny-models")

    def path(name: str) -> Path:
        file = folder / f"{name}.gguf"
        if not file.exists():
            gguf_files.write(file, *TINY[name])
        return file

    return path


@pytest.fixture
def tiny(tiny_path: Callable[[str], Path]) -> Iterator[Open]:
    """tiny(name, **options): an open backend on a tiny model, checked and closed afterwards."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed; pip install 'paceline[llamacpp]'")
    opened: list[LlamaCppBackend] = []

    def open_one(name: str = "llama", **options: Any) -> LlamaCppBackend:
        backend = LlamaCppBackend(tiny_path(name), **{"max_seqs": 6, "max_len": 256, "n_threads": 1, **options})
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture
def survives() -> Callable[..., str]:
    """survives(code, *arguments): stdout of a process that runs `code`; fails where a signal or assert ended it."""

    def run(code: str, *arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
        return done.stdout

    return run
