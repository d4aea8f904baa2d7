"""Deliberately wrong variants of the shipped code, and the tools that make them.

Each mutant changes one place: `edit` swaps a fragment of a function's source, and everybody who imported the
function runs the wrong one until the patch is undone. A fragment that is no longer in the source, once, is an
error of the mutant, not a catch: move the mutant along with the code.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Apply = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """check: the name of the check that must catch it. reports: public threads where somebody shipped it."""

    name: str
    why: str
    check: str
    apply: Apply
    reports: tuple[str, ...] = ()


MUTANTS: list[Mutant] = []
HARMLESS: list[Mutant] = []
"""Changes that must *not* matter: speculation is exact whatever the drafter is worth."""


def mutant(name: str, why: str, check: str, *reports: str) -> Callable[[Apply], Apply]:
    """Register a function that makes the shipped code wrong."""

    def register(apply: Apply) -> Apply:
        MUTANTS.append(Mutant(name, why, check, apply, reports))
        return apply

    return register


def harmless(name: str, why: str, check: str, *reports: str) -> Callable[[Apply], Apply]:
    """Register a function that changes the shipped code in a way that this check must not see."""

    def register(apply: Apply) -> Apply:
        HARMLESS.append(Mutant(name, why, check, apply, reports))
        return apply

    return register


def edit(patch: pytest.MonkeyPatch, function: Any, *changes: tuple[str, str], **helpers: Any) -> None:
    """Replace old by new, for each (old, new), in the source of a Python function or method, until undone.

    helpers: names that the new source may use.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        found = source.count(old)
        if found != 1:
            raise LookupError(f"{function.__qualname__} holds {old!r} {found} times; it must hold it once")
        source = source.replace(old, new)
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<mutant of {function.__qualname__}>", "exec", flags=flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    for name, helper in helpers.items():
        patch.setitem(function.__globals__, name, helper)
    patch.setattr(function, "__code__", made[function.__name__].__code__)
