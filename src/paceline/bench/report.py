"""Reports: one JSON object, shown as text, Markdown, or a page that needs nothing beside it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, InvalidParams
from .cells import Comparison
from .runs import Run
from .tables import Table, plots
from .tables import tables as tables  # part of what a command shows, beside facts and notes

SCHEMA = "paceline-bench/1"
KINDS = {"run": "One configuration", "compare": "Comparison", "step": "Where a step's time goes", "load": "Under load"}
FIELDS = ("machine", "model", "workload", "guard", "contenders", "baseline", "warnings", "runs")  # of every kind
FIELDS_OF = {"run": ("cells",), "compare": ("cells",), "step": ("steps",), "load": ("limits", "loads")}
SUFFIXES = {".json": "json", ".md": "markdown", ".html": "html", ".htm": "html"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin: 1rem 0; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg text.title { font-size: 14px; font-weight: 600; }
dt { font-weight: 600; float: left; clear: left; width: 11rem; } dd { margin: 0 0 .2rem 11.5rem; }
"""


def compared(report: Mapping[str, Any], baseline: str | None = None) -> dict[str, Any]:
    """A comparison's report with cells and warnings made anew from its runs, against another baseline perhaps."""
    names = [c["name"] for c in report["contenders"]]
    chosen = baseline or report["baseline"]
    made = Comparison([Run.from_json(run) for run in report["runs"]], names, chosen)
    kept = {key: value for key, value in report.items() if key not in ("cells", "warnings", "baseline", "runs")}
    cells = [cell.as_json() for cell in made.cells]
    warnings = [*unfinished(report.get("stopped")), *made.warnings]  # reports of older versions do not say
    return {**kept, "baseline": chosen, "cells": cells, "warnings": warnings, "runs": report["runs"]}


def unfinished(stopped: str | None) -> list[str]:
    """The warning of a report that does not hold all that was planned; stopped: why, None where it does."""
    return [f"unfinished: {stopped}"] if stopped else []


def read_report(path: Path) -> dict[str, Any]:
    """A report from its JSON file. Raises InvalidInput where it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"report {str(path)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidInput(f"report {str(path)!r} is not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or report.get("kind") not in KINDS:
        raise InvalidInput(f"report {str(path)!r} is not a report of `paceline bench` with schema {SCHEMA}")
    if missing := [field for field in (*FIELDS, *FIELDS_OF[report["kind"]]) if field not in report]:
        raise InvalidInput(f"report {str(path)!r} is damaged: it has no {', '.join(missing)}")
    return report


def render(report: dict[str, Any], form: str) -> str:
    """form: "json", "markdown" or "html"."""
    if form == "json":
        return json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    return _markdown(report) if form == "markdown" else _html(report)


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured, on what and how, as (name, words)."""
    machine, model, work, guard = (report[key] for key in ("machine", "model", "workload", "guard"))
    memory = f", {machine['memory_gib']} GiB" if machine["memory_gib"] else ""
    file = f", {model['file']}, {model['bytes'] / 1e6:.0f} MB" if "file" in model else ""
    kind = f", {model['quantisation']}" if "quantisation" in model else ""
    options = "".join(f", {name} {value}" for name, value in model["options"].items())
    rows = [
        ("machine", f"{machine['cpu']}, {machine['cpus']} CPUs ({machine['physical_cores']} cores){memory}"),
        ("system", f"{machine['system']}, Python {machine['python']}, {machine['date']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine["versions"].items())),
        ("model", f"{model['name']} on {model['backend']}{file}{kind}"),
        ("computed in", f"{model['dtype']}, threads: {model['threads']}{options}"),
        ("prompts", _prompts(work)),
        ("sampling", ", ".join(f"{name} {value}" for name, value in work["sampling"].items())),
        ("idle machine", _guard(guard)),
    ]
    for one in report["contenders"]:
        if one["peer"]:
            said = ", ".join(f"{key}: {value}" for key, value in one.items() if key not in ("name", "peer"))
            rows.append((one["name"], said))
    return rows


def _prompts(work: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in work["prompts"].items())
    left = ", ".join(f"{name} {count}" for name, count in work["left_out"].items())
    template = "chat template" if work["template"] else "raw text"
    return f"{counts} ({template}; {work['repeats']} repeats)" + (f"; too long and left out: {left}" if left else "")


def _guard(guard: Mapping[str, Any]) -> str:
    if not guard["on"]:
        return f"not waited for: {guard['why_off']}"
    limit = f"others may keep {guard['limit_cpus']:g} CPUs busy"
    return f"waited for: {limit}; waited {guard['waited_seconds']:.0f} s, {guard['reruns']} runs repeated"


def notes(report: Mapping[str, Any]) -> list[str]:
    """How to read the numbers."""
    said = [
        "Tokens are those emitted, without the one that ended the answer; tokens per step include bonus and recovered."
    ]
    if report["kind"] == "compare":
        said.append(
            f"Ratios are to {report['baseline']}, paired prompt by prompt within this run: geometric means with 95 % "
            "intervals (Student's t on logarithms). Seconds include the prompt. * marks cells beside other load."
        )
    return said


def _title(report: Mapping[str, Any]) -> str:
    return f"{KINDS[report['kind']]}: {report['model']['name']}"


def _markdown(report: dict[str, Any]) -> str:
    return markdown(_title(report), facts(report), [], tables(report), notes(report), report["warnings"])


def markdown(
    title: str,
    facts: Sequence[tuple[str, str]],
    verdicts: Sequence[str],
    tables: Sequence[Table],
    notes: Sequence[str],
    warnings: Sequence[str],
) -> str:
    """A report as Markdown, in that order; verdicts and notes are lines of it as they stand."""
    parts = [f"# {title}", "", *(f"- {name}: {words}" for name, words in facts)]
    parts += ["", *verdicts] if verdicts else []
    for table in tables:
        parts += ["", f"## {table.title}", "", pipes(table.head), "|---" * len(table.head) + "|"]
        parts += [pipes(row) for row in table.rows]
    parts += ["", *notes]
    if warnings:
        parts += ["", "## Warnings", "", *(f"- {warning}" for warning in warnings)]
    return "\n".join(parts) + "\n"


def pipes(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _html(report: dict[str, Any]) -> str:
    parts = [f"<p>{escape(note)}</p>" for note in notes(report)] + plots(report)
    parts += [html_table(table) for table in tables(report)]
    return page(_title(report), facts(report), parts, report["warnings"])


def page(title: str, facts: Sequence[tuple[str, str]], body: Sequence[str], warnings: Sequence[str]) -> str:
    """A report as HTML: facts, whatever the body is, warnings. All but the body is text to be escaped."""
    parts = [f"<h1>{escape(title)}</h1>", "<dl>"]
    parts += [f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts]
    parts += ["</dl>", *body]
    if warnings:
        parts += ["<h2>Warnings</h2>", "<ul>", *(f"<li>{escape(w)}</li>" for w in warnings), "</ul>"]
    head = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join(
        ["<!DOCTYPE html>", f'<html lang="en"><head>{head}</head>', "<body>", *parts, "</body></html>", ""]
    )


def html_table(table: Table) -> str:
    """A table with its title, as HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<h2>{escape(table.title)}</h2>\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"


def form_of(path: Path) -> str:
    """The format that a file's name asks for. Raises InvalidParams where it asks for none, or its folder is missing."""
    form = SUFFIXES.get(path.suffix.lower())
    if form is None:
        raise InvalidParams(f"output file {str(path)!r}; allowed: a name that ends in {', '.join(SUFFIXES)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InvalidParams(f"output file {str(path)!r}: there is no folder {str(folder)!r}; make it first")
    return form


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, whatever comes between."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp's are for nobody else
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
