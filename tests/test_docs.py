"""Documentation that is executed: every ```python block of docs/*.md and README*.md, every ```sh block of README.md.

The blocks of a file run in order in one fresh namespace, in an empty folder. Skipped: other languages, and
blocks marked ```python no-run. A block marked ```python model=NAME needs that model in the cache, one marked
```python needs=MODULE that module; where it is missing the rest of the file is skipped.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("README*.md")])
FENCE = re.compile(r"^(`{3,})(.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block: its info string, its code, and the line of its first line in the page."""

    info: str
    code: str
    line: int

    @property
    def is_python(self) -> bool:
        return self.info.split()[:1] == ["python"]

    @property
    def runs(self) -> bool:
        return self.is_python and "no-run" not in self.info.split()

    @property
    def model(self) -> str | None:
        return self._marked("model=")

    @property
    def needs(self) -> str | None:
        return self._marked("needs=")

    def _marked(self, mark: str) -> str | None:
        return next((word.removeprefix(mark) for word in self.info.split() if word.startswith(mark)), None)


def blocks_of(text: str) -> list[Block]:
    """Every fenced block. Raises ValueError for a fence that is never closed."""
    blocks: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, lines = (fence[1], fence[2].strip(), number + 1), []
        elif line.strip() == opened[0]:
            blocks.append(Block(opened[1], "\n".join(lines) + "\n", opened[2]))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"the block that begins in line {opened[2] - 1} is never closed")
    return blocks


def run_blocks(blocks: list[Block], path: Path, need: Callable[[str], object]) -> int:
    """Run what runs, with the page's own line numbers in tracebacks; how many blocks ran."""
    namespace: dict[str, object] = {"__name__": f"page_{path.stem.replace('-', '_').replace('.', '_')}"}
    count = 0
    for block in blocks:
        if not block.runs:
            continue
        if block.model is not None:
            need(block.model)
        if block.needs is not None:
            pytest.importorskip(block.needs)
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        exec(code, namespace)
        count += 1
    return count


@pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_code_of_page(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    run_blocks(blocks, path, lambda name: request.getfixturevalue("model_path")(name))


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = (line.lstrip("#").strip().lower() for line in text.splitlines() if re.match(r"#+ ", line))
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(page.read_text(encoding="utf-8")), f"{target} has no heading #{anchor}"


def test_the_lesson_is_found_and_executed(tmp_path: Path) -> None:
    path = ROOT / "docs" / "how-it-works.md"
    assert path in PAGES
    assert sum(block.runs for block in blocks_of(path.read_text(encoding="utf-8"))) >= 15


def test_both_languages_run_the_same_code() -> None:
    pages = [ROOT / "docs" / name for name in ("how-it-works.md", "how-it-works.zh.md")]
    english, chinese = (blocks_of(page.read_text(encoding="utf-8")) for page in pages)
    assert [b.info for b in english] == [b.info for b in chinese]
    for a, b in zip(english, chinese, strict=True):
        if a.is_python:  # comments and messages are translated, the rest is the same
            assert shape(a.code) == shape(b.code), f"lines {a.line} and {b.line}"


def shape(code: str) -> str:
    """The code without comments and without the wording of its strings, bar those that are arguments."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.msg = None
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.Dict):
            node.keys = [ast.Constant(None)] * len(node.keys)
        if isinstance(node, ast.JoinedStr):
            node.values = []
    return ast.dump(tree)


def test_shell_examples_run_as_they_are_printed(tmp_path: Path) -> None:
    """In an empty folder, with a toy in the place of the model: catches options and files that are not there."""
    command = tmp_path / "bin" / "paceline"
    command.parent.mkdir()
    run = f'exec {sys.executable} -c "from paceline.cli import main; main()"'
    command.write_text(
        f'#!/bin/sh\ncase $1 in generate) {run} "$@" --model toy --max-tokens 40;; *) {run} "$@";; esac\n',
        encoding="utf-8",
    )
    command.chmod(0o755)
    blocks = [b for b in blocks_of((ROOT / "README.md").read_text(encoding="utf-8")) if b.info == "sh"]
    assert sum(b.code.count("paceline ") for b in blocks) >= 7
    for block in blocks:
        folder = tmp_path / str(block.line)
        folder.mkdir()
        done = subprocess.run(
            ["sh", "-e", "-c", block.code],
            cwd=folder,
            env={**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"line {block.line}: {done.stderr}"
    assert len(json.loads((folder / "prime.json").read_text(encoding="utf-8"))["outputs"]) == 3


def test_both_readmes_have_the_same_examples() -> None:
    """Catches an example that was mended in one language."""
    pages = [blocks_of((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "README.zh.md")]
    assert [b.info for b in pages[0]] == [b.info for b in pages[1]]
    for english, chinese in zip(*pages, strict=True):
        lines = [[line.partition("  #")[0].rstrip() for line in b.code.splitlines()] for b in (english, chinese)]
        assert lines[0] == lines[1], f"lines {english.line} and {chinese.line}"


# --- the runner itself ----------------------------------------------------------------------------------


def test_blocks_share_a_namespace_and_report_the_line_of_the_page(tmp_path: Path) -> None:
    page = "# Page\n\n```python\nx = 1\n```\n\n```console\n$ no\n```\n\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as failure:
        run_blocks(blocks_of(page), tmp_path / "page.md", lambda name: None)
    assert failure.traceback[-1].lineno + 1 == 12


def test_what_is_marked_does_not_run(tmp_path: Path) -> None:
    page = "```python no-run\nraise ValueError\n```\n```py\n1/0\n```\n````python\ns = '''\n```\n'''\n````\n"
    blocks = blocks_of(page)
    assert [b.info for b in blocks] == ["python no-run", "py", "python"]
    assert run_blocks(blocks, tmp_path / "page.md", lambda name: None) == 1


def test_a_block_may_need_a_model(tmp_path: Path) -> None:
    needed: list[str] = []
    assert run_blocks(blocks_of("```python model=smollm2:bf16\nx = 1\n```\n"), tmp_path / "p.md", needed.append) == 1
    assert needed == ["smollm2:bf16"]


def test_a_fence_that_stays_open_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1 is never closed"):
        blocks_of("```python\nx = 1\n")
