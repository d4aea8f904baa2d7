"""Every deliberately wrong variant of the shipped code is caught, and the shipped code itself is not.

Run with -s for the table of who was caught by what.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.errors import PacelineError

from . import (  # noqa: F401  (each registers its mutants and checks)
    mutants_drafting,
    mutants_engine,
    mutants_laws,
    mutants_memory,
    mutants_options,
    mutants_rules,
    mutants_runs,
    mutants_sampling,
)
from .mutants import HARMLESS, MUTANTS, Mutant
from .mutants_checks import CHECKS

CAUGHT = (AssertionError, PacelineError)
"""What a check may raise. Any other exception means that the mutant itself is broken."""


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[Mutant, str]]]:
    rows: list[tuple[Mutant, str]] = []
    yield rows
    for mutant, message in rows:
        reports = f"  [{', '.join(mutant.reports)}]" if mutant.reports else ""
        print(f"\n{mutant.name:<46} {mutant.check:<18} {message}{reports}", end="")
    print(f"\n{len(rows)} mutants caught")


@pytest.mark.parametrize("name", CHECKS)
def test_the_shipped_code_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, table: list[tuple[Mutant, str]]) -> None:
    mutant.apply(monkeypatch)
    try:
        CHECKS[mutant.check]()
    except CAUGHT as caught:
        table.append((mutant, " ".join(str(caught).split())[:90]))
        return
    pytest.fail(f"{mutant.name} ({mutant.why}) survives {mutant.check}")


@pytest.mark.parametrize("change", HARMLESS, ids=lambda m: m.name)
def test_a_bad_drafter_changes_nothing(change: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    change.apply(monkeypatch)
    CHECKS[change.check]()


def test_the_suite_is_in_order() -> None:
    assert len(MUTANTS) >= 30
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    idle = set(CHECKS) - {m.check for m in MUTANTS}
    assert not idle, f"no mutant is caught by {sorted(idle)}"


@pytest.mark.slow
def test_every_mutant_against_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for mutant in MUTANTS:
        caught_by = []
        for name, check in CHECKS.items():
            with pytest.MonkeyPatch.context() as patch:
                mutant.apply(patch)
                try:
                    check()
                except CAUGHT:
                    caught_by.append(name)
                except Exception:  # a wrong value met code that never expects it
                    caught_by.append(f"({name})")
        assert mutant.check in caught_by, f"{mutant.name}: {caught_by}"
        lines.append(f"{mutant.name:<46} {len(caught_by):>2}  {', '.join(caught_by)}")
    for name, check in CHECKS.items():  # nothing was left behind
        check()
        lines.append(f"shipped code passes {name}")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
