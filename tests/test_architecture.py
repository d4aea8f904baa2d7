"""Who may import whom, what importing the package loads, and the size budgets."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SRC = Path(paceline.__file__).parent
BASE = {"types", "params", "errors", "rng", "outputs", "compiling"}
RULES = BASE | {"sampling", "verify"}
ENGINE = {"admission", "sequence", "engine"}
# part -> parts it may import besides itself
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "compiling": set(),
    "params": {"errors"},
    "outputs": {"errors"},
    "proposal": {"errors"},
    "paths": {"errors"},
    "types": {"errors", "params", "outputs", "proposal"},
    "cache": {"errors"},
    "rng": BASE,
    "sampling": BASE,
    "verify": BASE | {"sampling"},
    "draft": RULES,
    "backend": RULES | {"text", "cache", "paths"},
    "text": RULES,
    "schedule": BASE,
    "models": BASE | {"backend", "paths"},
    "sequence": RULES | {"text"},
    "admission": RULES | {"text", "sequence"},
    "engine": RULES | {"text", "draft", "schedule", "backend"} | ENGINE,
    "opening": BASE | {"models", "backend", "schedule", "paths"},
    "llm": RULES | {"text", "draft", "schedule", "backend", "models", "opening"} | ENGINE,
    "engine_thread": BASE | {"llm", "sampling"} | ENGINE,
    "async_engine": BASE | {"llm", "engine_thread"} | ENGINE,
    "plan": BASE | {"llm", "draft", "models", "opening", "schedule", "bench"} | ENGINE,
    "bench": BASE | {"llm", "async_engine", "draft", "models", "opening", "backend"} | ENGINE,
}


def part_of(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Top-level parts of paceline that a file imports, at module level or inside functions."""
    package = ("paceline", *path.relative_to(SRC).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "paceline" and len(parts) > 1:
                found.add(parts[1])
    return found


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_import_direction(path: Path) -> None:
    part = part_of(path)
    if part == "__init__" or part not in ALLOWED:
        # The package's face and what stands above the engine: nothing below may import them, see below.
        return
    forbidden = imports_of(path) - ALLOWED[part] - {part}
    assert not forbidden, f"{path.relative_to(SRC)} imports {sorted(forbidden)}"


def test_nothing_imports_the_cli() -> None:
    for path in FILES:
        if part_of(path) not in ("cli", "__main__"):
            assert "cli" not in imports_of(path), path


def test_every_part_is_known() -> None:
    parts = {part_of(p) for p in FILES} - {"__init__", "__main__", "cli"}
    assert parts <= set(ALLOWED), f"give {sorted(parts - set(ALLOWED))} a line in ALLOWED"


def test_importing_paceline_loads_no_model_runtime() -> None:
    code = (
        "import sys, paceline; paceline.LLM; "
        "print([m for m in ('torch', 'llama_cpp', 'fastapi', 'typer') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_verify_stays_readable() -> None:
    assert sum(len(p.read_text().splitlines()) for p in (SRC / "verify").glob("*.py")) <= 520
