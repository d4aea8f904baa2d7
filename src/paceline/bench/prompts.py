"""Prompts from JSONL files, and a small set of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InvalidPrompt

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
UNNAMED = "prompts"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. text: what the user says; category: the group its numbers are reported in."""

    question_id: str
    category: str
    text: str


def read_questions(path: Path) -> list[Question]:
    """The prompts of a JSONL file: {"question_id", "category", "turns": [text, ...]} or {"prompt": text} a line.

    Only the first turn is asked. The eight categories of MT-bench become one, "mt_bench"; a line without a category
    is in "prompts", one without an id has the number of its line. Raises InvalidPrompt naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InvalidPrompt(f"prompts file {str(path)!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"prompts file {str(path)!r} is not UTF-8 text: {error.reason}; convert it first") from None
    found = [_question(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise InvalidPrompt(f"prompts file {str(path)!r} holds no prompt; a line is a JSON object with turns")
    return found


def _question(line: str, number: int, path: Path) -> Question:
    where = f"prompts file {str(path)!r}, line {number}"
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidPrompt(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidPrompt(f"{where} is {type(row).__name__}; allowed: an object with turns or prompt")
    turns = row.get("turns", [row.get("prompt")])
    text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str) or not text:
        raise InvalidPrompt(f"{where} has no text; allowed: turns, a list of texts, or prompt, a text")
    category = str(row.get("category", UNNAMED))
    return Question(
        str(row.get("question_id", number)), MT_BENCH if category in MT_BENCH_CATEGORIES else category, text
    )


def in_categories(questions: Sequence[Question], categories: Sequence[str]) -> list[Question]:
    """Those of the named categories, all where none is named. Raises InvalidPrompt for one that is not there."""
    there = sorted({question.category for question in questions})
    for name in categories:
        if name not in there:
            raise InvalidPrompt(f"category {name!r} is not in the prompts; they have {', '.join(there)}")
    return [question for question in questions if not categories or question.category in categories]


def by_category(questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Category -> its questions, in order of appearance."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    return groups


def spread_out(items: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of them, evenly spaced: the first few of a file are often of one kind."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
