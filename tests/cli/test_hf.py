"""A folder of transformers on the command line, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ..backend.hf.models import build
from ..backend.hf.test_tokenizer import byte_level, saved
from .shell import error_line, paceline


def test_a_folder_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a backend that is not chosen by itself, and anything else on stdout or stderr."""
    folder = tmp_path / "tiny"
    model = build("llama", vocab_size=259)
    model.save_pretrained(folder)
    config = (folder / "config.json").read_text()
    saved(folder, byte_level(), eos_token="<|im_end|>")
    (folder / "config.json").write_text(config)
    capfd.readouterr()
    ask = [
        "generate",
        "-m",
        str(folder),
        "--raw",
        "-p",
        "ab",
        "--max-tokens",
        "6",
        "--temperature",
        "0",
        "--ignore-eos",
    ]
    result = paceline(*ask, "--format", "json", "--page-size", "4", "--threads", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["model"] == str(folder)
    assert len(answer["token_ids"]) == 6
    assert capfd.readouterr() == ("", "")
    plain = json.loads(paceline(*ask, "--format", "json", "--drafter", "none", "--backend", "hf").stdout)
    assert plain["token_ids"] == answer["token_ids"]


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    asked = {
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "none"): "no model file or folder at",
        "qwen": "hub id",
    }
    for model, said in asked.items():
        result = paceline("generate", "-m", model, "-p", "x")
        assert result.exit_code == 1
        assert said in error_line(result)
