"""Reading prompts: Spec-Bench's format, one group for MT-bench, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.prompts import BUILT_IN, by_category, in_categories, read_questions, spread_out
from paceline.errors import InvalidPrompt

OWN_EDITS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "code_edit.jsonl"


def write(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def test_the_first_turn_is_asked_and_mt_bench_is_one_group(tmp_path: Path) -> None:
    """Catches a second turn that is asked, and MT-bench's eight categories reported one by one."""
    path = write(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"question_id": 82, "category": "stem", "turns": ["another"]},
        {"question_id": 400, "category": "rag", "turns": ["read this"]},
        "",
        {"prompt": "bare"},
    )
    asked = [(q.question_id, q.category, q.text) for q in read_questions(path)]
    assert asked == [
        ("81", "mt_bench", "first"),
        ("82", "mt_bench", "another"),
        ("400", "rag", "read this"),
        ("5", "prompts", "bare"),
    ]


@pytest.mark.parametrize(
    "row, said",
    [
        ("{not json", "line 2 is not JSON"),
        ("[1]", "line 2 is list"),
        ({"question_id": 1}, "line 2 has no text"),
        ({"turns": []}, "line 2 has no text"),
        ({"turns": [""]}, "line 2 has no text"),
        ({"turns": [3]}, "line 2 has no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, said: str) -> None:
    """Catches a line that is skipped in silence."""
    with pytest.raises(InvalidPrompt, match=said):
        read_questions(write(tmp_path, {"prompt": "good"}, row))


def test_files_that_cannot_be_prompts(tmp_path: Path) -> None:
    """Catches a traceback of the operating system instead of a typed error."""
    with pytest.raises(InvalidPrompt, match="cannot be read"):
        read_questions(tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidPrompt, match="holds no prompt"):
        read_questions(write(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InvalidPrompt, match="not UTF-8"):
        read_questions(tmp_path / "latin.jsonl")


def test_categories_are_chosen_by_name(tmp_path: Path) -> None:
    """Catches a misspelt category that silently leaves nothing."""
    questions = read_questions(write(tmp_path, {"category": "a", "prompt": "x"}, {"category": "b", "prompt": "y"}))
    assert [q.text for q in in_categories(questions, ["b"])] == ["y"]
    assert len(in_categories(questions, [])) == 2
    with pytest.raises(InvalidPrompt, match="'c' is not in the prompts; they have a, b"):
        in_categories(questions, ["c"])


def test_a_limit_spreads_over_all_of_them() -> None:
    """Catches a limit that takes the first ones, which in Spec-Bench's MT-bench part are all of one kind."""
    assert spread_out(range(10), 3) == [0, 3, 6]
    assert spread_out(range(4), 4) == spread_out(range(4), 9) == spread_out(range(4), None) == [0, 1, 2, 3]


def test_spec_bench_has_six_groups(spec_bench: list[str]) -> None:
    """Catches groups that differ from the published ones: five named, and MT-bench as one."""
    import os

    questions = read_questions(Path(os.environ["PACELINE_DATA"]) / "spec_bench" / "question.jsonl")
    groups = by_category(questions)
    assert sorted(groups) == ["math_reasoning", "mt_bench", "qa", "rag", "summarization", "translation"]
    assert [q.text for q in questions] == spec_bench


def test_the_sets_that_come_with_us() -> None:
    """Catches a set that is not packaged, or editing tasks that are too few, double, or short."""
    small = by_category(read_questions(BUILT_IN))
    assert sorted(small) == ["code_edit", "question", "rewrite", "story", "summary"]
    assert all(len(group) == 3 for group in small.values())
    edits = read_questions(OWN_EDITS)
    assert len(edits) == len({q.text for q in edits}) == len({q.question_id for q in edits}) == 40
    for question in edits:
        instruction, fence, code = question.text.partition("\n\n```")
        assert question.category == "code_edit"
        assert instruction
        assert fence
        assert 15 <= len(code.splitlines()) - 2 <= 60, question.question_id
