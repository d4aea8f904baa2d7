"""Reports: whole in every format, and never half on disk."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import report as module
from paceline.bench.cells import Comparison
from paceline.bench.machine import QUANTISATIONS, machine, model_facts
from paceline.bench.report import FIELDS, SCHEMA, compared, form_of, read_report, render, write_whole
from paceline.bench.svg import Mark, bars, lines, ratio_plot
from paceline.bench.tables import tables
from paceline.errors import InvalidInput, InvalidParams

from .fakes import loaded, run

NAMES = ("plain", "K = 4", "a <peer> | more")


def a_report() -> dict[str, Any]:
    """A comparison of three, with a category whose name no format may stumble over."""
    runs = []
    for category in ("code & <edit>", "qa"):
        for temperature in (0.0, 1.0):
            for unit in range(3):
                for i, name in enumerate(NAMES):
                    known = {"category": category, "temperature": temperature, "unit": unit}
                    seconds = (1.0 + unit) / (1 + 0.5 * i) * (1.01 if unit else 1.0)
                    load = loaded() if (i, unit) == (1, 2) else None
                    runs.append(run(name, seconds, load=load, steps=4 if i else 10, **known))
    head = {
        "schema": SCHEMA,
        "kind": "compare",
        "machine": machine(),
        "model": model_facts("toy", "toy", "auto", {"n_threads": None, "max_len": 2048}),
        "workload": {
            "files": ["x"], "prompts": {"qa": 3}, "left_out": {"rag": 2}, "template": True, "repeats": 1,
            "concurrencies": [1], "sampling": {"temperature": "0 and 1"},
        },
        "stopped": None,
        "guard": {"on": False, "why_off": "switched off", "limit_cpus": 0.15, "waited_seconds": 0.0, "reruns": 0},
        "contenders": [{"name": name, "peer": name.startswith("a"), "engine": "e & f"} for name in NAMES],
        "baseline": "plain",
        "runs": [one.as_json() for one in runs],
    }  # fmt: skip
    return compared(head)


def test_every_cell_is_there_in_every_format() -> None:
    """Catches cells that a report leaves out, the bad ones first."""
    report = a_report()
    assert len(report["cells"]) == 3 * 2 * 3  # contenders, temperatures, two categories and their mean
    page = ET.fromstring(render(report, "html").split("\n", 1)[1])
    cells = {"".join(td.itertext()) for td in page.iter("td")}
    markdown = render(report, "markdown")
    for cell in report["cells"]:
        if cell["contender"] != "plain":
            shown = f"{cell['ratio']['ratio']:.3f} ({cell['ratio']['low']:.2f} to {cell['ratio']['high']:.2f})"
            assert shown in cells
            assert shown in markdown
    assert json.loads(render(report, "json")) == json.loads(json.dumps(report))


def test_the_page_is_one_file() -> None:
    """Catches scripts, fonts and pictures from elsewhere, and names that break the markup."""
    text = render(a_report(), "html")
    page = ET.fromstring(text.split("\n", 1)[1])
    assert not list(page.iter("script"))
    assert not list(page.iter("link"))
    assert not [e for e in page.iter() if {"src", "href"} & set(e.attrib)]
    assert "url(" not in text
    assert "@import" not in text
    plots = list(page.iter("{http://www.w3.org/2000/svg}svg"))
    assert len(plots) == 2  # one for each temperature
    circles = [c for plot in plots for c in plot.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == 2 * 3 * 2  # two contenders in three rows, twice
    assert "code & <edit>" in {"".join(td.itertext()) for td in page.iter("td")}


def test_markdown_tables_have_equal_rows() -> None:
    """Catches a | in a name that makes a column of its own."""
    lines_ = [line.replace("\\|", "") for line in render(a_report(), "markdown").splitlines() if line.startswith("|")]
    widths: list[set[int]] = [set()]
    for line in render(a_report(), "markdown").splitlines():
        if line.startswith("|"):
            widths[-1].add(line.replace("\\|", "").count("|"))
        elif widths[-1]:
            widths.append(set())
    assert len(lines_) > 20
    assert all(len(counts) == 1 for counts in widths if counts)


def test_the_schema_is_what_others_rely_on() -> None:
    """Catches a field that is renamed: scripts and old reports read them."""
    report = a_report()
    assert report["schema"] == "paceline-bench/1"
    assert set(report) == {
        *(
            "schema",
            "kind",
            "stopped",
            "machine",
            "model",
            "workload",
            "guard",
            "contenders",
            "baseline",
            "cells",
            "warnings",
            "runs",
        )
    }
    assert set(report["cells"][0]) == {
        *("temperature", "concurrency", "category", "contender", "runs", "tokens", "seconds", "tokens_per_second"),
        *("decode_tokens_per_second", "tokens_per_step", "drafted", "accepted", "acceptance_at", "ratio"),
        *("decode_ratio", "same_text", "disturbed", "preemptions", "error"),
    }
    assert set(report["runs"][0]) == {
        *(
            "contender",
            "category",
            "temperature",
            "concurrency",
            "unit",
            "repeat",
            "seconds",
            "results",
            "load",
            "error",
        )
    }
    assert set(report["machine"]) == {
        *("cpu", "cpus", "physical_cores", "memory_gib", "system", "python", "versions", "date")
    }
    assert {"paceline", "numpy", "numba"} <= set(report["machine"]["versions"])


def test_a_report_is_read_back_and_turned_to_another_baseline(tmp_path: Path) -> None:
    """Catches a saved report whose ratios stay to the old baseline."""
    path = tmp_path / "r.json"
    report = a_report()
    write_whole(path, render(report, "json"))
    again = read_report(path)
    assert json.loads(json.dumps(compared(again))) == again == json.loads(json.dumps(report))
    turned = compared(again, "K = 4")
    first = {c["contender"]: c["ratio"] for c in report["cells"][-9:] if c["category"] == "qa"}
    (cell,) = [c for c in turned["cells"][-9:] if c["category"] == "qa" and c["contender"] == "plain"]
    assert cell["ratio"]["ratio"] == pytest.approx(1 / first["K = 4"]["ratio"])
    for text in ("{", "[]", '{"schema": "other", "kind": "compare"}', '{"schema": "paceline-bench/1", "kind": "x"}'):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="report "):
            read_report(path)
    for field in (*FIELDS, "cells"):
        path.write_text(json.dumps({name: value for name, value in report.items() if name != field}))
        with pytest.raises(InvalidInput, match=f"is damaged: it has no {field}"):
            read_report(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_report(tmp_path / "nothing.json")


def test_an_unfinished_report_says_so_for_good(tmp_path: Path) -> None:
    """Catches a warning that is lost when the report is shown again, and old reports that are refused."""
    report = compared({**a_report(), "stopped": "interrupted after 36 of 99 runs"})
    assert compared(report, "K = 4")["warnings"][0] == "unfinished: interrupted after 36 of 99 runs"
    old = {key: value for key, value in a_report().items() if key != "stopped"}
    assert compared(old)["warnings"] == a_report()["warnings"]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a report after Ctrl-C, and the temporary file left beside it."""
    path = tmp_path / "r.json"
    path.write_text("the old one")

    class Interrupted:
        def __init__(self, *args: object, **options: object) -> None:
            import os

            os.close(int(args[0]))  # type: ignore[call-overload]

        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def write(self, text: str) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fdopen", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "the new one")
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "the old one"
    write_whole(path, "the new one")
    assert path.read_text() == "the new one"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    """Catches an hour of measuring whose report has nowhere to go."""
    assert [form_of(tmp_path / f"x.{s}") for s in ("json", "md", "html", "HTML")] == [
        "json",
        "markdown",
        "html",
        "html",
    ]
    with pytest.raises(InvalidParams, match=r"ends in \.json, \.md"):
        form_of(tmp_path / "x.pdf")
    with pytest.raises(InvalidParams, match="make it first"):
        form_of(tmp_path / "there" / "x.md")


def test_marks_show_where_other_load_was() -> None:
    """Catches a contaminated ratio that looks like any other."""
    report = a_report()
    marked = [row for table in tables(report)[:1] for row in table.rows]
    assert [cell.endswith("*") for cell in marked[0]] == [False, False, True, False]
    (warning,) = report["warnings"]
    assert warning == "4 of 36 runs were beside other load; their cells are marked *"


def test_plots_of_nothing_are_nothing() -> None:
    """Catches a division by zero in a report that has no numbers."""
    assert ratio_plot("t", [], ["a"]) == ""
    assert bars("t", [], ["a"]) == ""
    assert bars("t", [("x", [0.0])], ["a"]) == ""
    assert lines("t", [], "x") == ""
    assert lines("t", [("a", [(0.0, 0.0)])], "x") == ""


def test_a_ratio_of_one_lies_on_the_line_of_one() -> None:
    """Catches an axis that does not fit its points."""
    plot = ET.fromstring(ratio_plot("t", [("row", [Mark("a", 1.0, 0.5, 2.0)])], ["a"]))
    svg = "{http://www.w3.org/2000/svg}"
    (circle,) = plot.iter(f"{svg}circle")
    (one,) = [line for line in plot.iter(f"{svg}line") if line.get("stroke-width") == "1.5"]
    assert circle.get("cx") == one.get("x1")
    (interval,) = [line for line in plot.iter(f"{svg}line") if line.get("stroke-width") == "2"]
    left, right = float(interval.get("x1") or 0), float(interval.get("x2") or 0)
    assert float(circle.get("cx") or 0) == pytest.approx((left + right) / 2, abs=0.1)  # logarithmic


@pytest.mark.model
def test_a_gguf_says_how_it_is_quantised(model_path: Any) -> None:
    """Catches a report that calls a quantised file bf16."""
    for name, kind in (("smollm2:bf16", "BF16"), ("smollm2:q4_1", "Q4_1")):
        path = model_path(name)
        facts = model_facts(name, str(path), "auto", {"n_threads": 1})
        assert (facts["quantisation"], facts["threads"], facts["backend"]) == (kind, 1, "llamacpp")
        assert facts["bytes"] == path.stat().st_size
    assert len(set(QUANTISATIONS.values())) == len(QUANTISATIONS)


def test_a_comparison_of_no_runs_is_empty() -> None:
    """Catches an index error."""
    assert Comparison([], ["plain"], "plain").cells == []
