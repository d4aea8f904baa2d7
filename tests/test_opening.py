"""The measured cost of forwards, kept between runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.backend.toy import ToyBackend
from paceline.opening import cost_table
from paceline.schedule import CostTable

TABLE = CostTable([1, 8], [4], [[1.0, 2.0]])


class Named(ToyBackend):
    """A toy that is a certain file, as models from disk are."""

    def __init__(self) -> None:
        super().__init__(max_len=64, max_seqs=2)
        self.info = replace(self.info, fingerprint="the same file")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Measuring takes no time here, and is written down; nothing else is of interest."""
    calls: list[str] = []

    def measure(backend: Any, **rest: Any) -> CostTable:
        calls.append("measured")
        return CostTable.from_json(TABLE.to_json())

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(CostTable, "measure", measure)
    monkeypatch.setattr(CostTable, "fits", lambda self, backend: True)
    return calls


def the_file(cache: Path) -> Path:
    (file,) = (cache / "costs").iterdir()
    return file


def test_a_table_is_measured_once(measured: list[str], tmp_path: Path) -> None:
    for _ in range(3):
        assert cost_table(Named()).to_json() == TABLE.to_json()
    assert measured == ["measured"]
    assert the_file(tmp_path).read_text() == TABLE.to_json()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b'{"widths": [1, 1e999], "contexts": [4], "seconds": [[1, 2]], "per_sequence": 0}',
        b'{"widths": [1, 8], "contexts": [4], "seconds": [[1, 2]], "per_sequence": -1000}',
        b'{"widths": [1, 8], "contexts": [4], "seconds": [[1, "x"]], "per_sequence": 0}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_table_is_measured_anew(damage: bytes, measured: list[str], tmp_path: Path) -> None:
    """A byte that is no UTF-8 in the cache, and no model could be opened any more."""
    cost_table(Named())
    the_file(tmp_path).write_bytes(damage)
    assert cost_table(Named()).to_json() == TABLE.to_json()
    assert len(measured) == 2
    assert the_file(tmp_path).read_text() == TABLE.to_json()


def test_a_table_that_no_longer_fits_is_measured_anew(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost_table(Named())
    monkeypatch.setattr(CostTable, "fits", lambda self, backend: False)
    cost_table(Named())
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_none(measured: list[str], tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("a file where a folder should be")
    for _ in range(2):
        assert cost_table(Named()).to_json() == TABLE.to_json()
    assert len(measured) == 2


def test_a_model_without_a_file_is_measured_every_time(measured: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        cost_table(ToyBackend(max_len=64))
    assert len(measured) == 2
    assert not (tmp_path / "costs").exists()
