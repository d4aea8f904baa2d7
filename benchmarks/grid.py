"""The grid: adaptive against plain decoding, for every model, temperature, number of requests at once and group.

    python benchmarks/grid.py --prompts question.jsonl --into grid [--minutes 60] [--only c01] [-- --guard-wait 120]
    python benchmarks/grid.py --into grid --report
    python benchmarks/grid.py --prompts question.jsonl --into peers --model smollm2:bf16@hf --peer 'vllm=COMMAND'

--prompts is Spec-Bench's question.jsonl; the editing tasks of benchmarks/prompts are asked too. Each model and number
at once is one `paceline bench compare` at temperatures 0 and 1; single requests of a bf16 model are also run with fixed
draft lengths. What matters most comes first, and --minutes starts nothing new after that time. FOLDER gets a JSON of
each; one that is there and complete is not measured again, so give other sizes or peers a folder of their own. Ctrl-C
keeps what the running command has measured. What stands behind -- goes to `bench compare`. In the end, or with --report
at once, come the tables of all JSON files in FOLDER. With --peer, 1 and 16 at once are compared with other engines.

Sizes: three timed runs are the least that give a cell an interval over prompts, so --limit is 3, 12 and 48 prompts of
each group for 1, 4 and 16 at once. Spec-Bench's rag prompts have 650 to 900 tokens; --max-prompt-tokens 800 leaves 38
of 54, and 280 tokens as the mean over all groups. Two cores that read 700 of those a second (hf: 1,500) and decode 90 a
second (500 at 16 at once), with half a second for the guard before each run, take for bf16, hf, q4_0 and q4_1:

    one at once    84 runs of 1.4 s, 294 with fixed lengths     7 +  6 +  2 +  2 minutes
    16 at once     84 runs of 8 s (hf: 5 s)                    11 +  7 + 11 + 11 minutes
    4 at once      84 runs of 3 s (hf: 2 s)                     4 +  3 +  4 +  4 minutes

With opening that is over 70; --minutes 60 leaves out the end of four at once, which lies between the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.cells import MEAN
from paceline.bench.report import compared, pipes, read_report
from paceline.bench.target import ADAPTIVE, PLAIN
from paceline.errors import InvalidInput

MODELS = ("smollm2:bf16@llamacpp", "smollm2:bf16@hf", "smollm2:q4_0@llamacpp", "smollm2:q4_1@llamacpp")
AT_ONCE = (1, 16, 4)  # in the order of their worth
FIXED = (1, 2, 4, 8, 16)
TEMPERATURES = (0, 1)
EDITS = Path(__file__).parent / "prompts" / "code_edit.jsonl"
SLOWER, BEHIND = 0.97, 0.95
"""A cell fails whose interval ends below SLOWER; adaptive should have BEHIND of the best fixed draft length."""

Row = dict[str, Any]


def jobs(args: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """(JSON file, command) of each part, in the order in which they are run."""
    limits = dict(zip(sorted(AT_ONCE), args.limit, strict=True))
    for at_once in AT_ONCE:
        for name in args.model or MODELS:
            model, _, backend = name.partition("@")
            file = args.into / f"{name.replace(':', '-').replace('@', '-').replace('/', '_')}-c{at_once:02}.json"
            wanted = not args.only or any(part in file.stem for part in args.only)
            if not wanted or (args.peer and at_once == 4):
                continue
            words = [
                sys.executable,
                "-m",
                "paceline",
                "bench",
                "compare",
                "-m",
                model,
                "--backend",
                backend or "auto",
                "-c",
                str(at_once),
            ]
            words += ["--compile"] if backend == "hf" else []
            words += ["--prompts", str(args.prompts), "--prompts", str(EDITS), "--limit", str(limits[at_once])]
            words += ["--max-tokens", str(args.max_tokens), "--max-prompt-tokens", str(args.max_prompt_tokens)]
            words += ["--repeats", str(args.repeats)] + [w for t in TEMPERATURES for w in ("--temperature", str(t))]
            if at_once == 1 and model.endswith(":bf16") and not args.peer:
                words += [w for k in FIXED for w in ("-k", str(k))]
            words += [w for peer in args.peer for w in ("--peer", peer)]
            yield file, [*words, *args.options, "-o", str(file)]


def complete(file: Path) -> bool:
    """Whether the report is there, and all of it."""
    try:
        return bool(read_report(file).get("complete", True))
    except InvalidInput:
        return False


def measure(args: argparse.Namespace) -> None:
    """Every part that is not there yet, while there is time."""
    args.into.mkdir(parents=True, exist_ok=True)
    begun, parts = time.monotonic(), list(jobs(args))
    for number, (file, command) in enumerate(parts, start=1):
        minutes = (time.monotonic() - begun) / 60
        late = minutes >= args.minutes
        what = "is there" if complete(file) else "left out, the time is over" if late else "measuring"
        print(f"[{number}/{len(parts)}, {minutes:.1f} min] {file.stem}: {what}", file=sys.stderr, flush=True)
        if what != "measuring":
            continue
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                process.wait()  # it had the same Ctrl-C, and writes down what it has
                raise
        if status:
            print(f"{file.stem} ended with status {status}", file=sys.stderr, flush=True)


# --- tables -------------------------------------------------------------------------------------------


def text_of(reports: Sequence[Row]) -> str:
    """All tables that the reports have something for, and what they come to."""
    parts = [never_slower(reports), counts(reports), against_fixed(reports), against_peers(reports)]
    parts += [f"{_name(r)}: {r['stopped']}." for r in reports if r.get("stopped")]
    return "\n\n".join(part for part in parts if part) + "\n"


def never_slower(reports: Sequence[Row]) -> str:
    """Adaptive over plain, a line for each model, temperature and number at once."""
    groups = _groups(reports)
    rows = [
        [_name(report), f"{temperature:g}", str(at_once), *(_shown(cells.get(group), SLOWER) for group in groups)]
        for report, temperature, at_once, cells in _lines(reports, PLAIN)
    ]
    title = f"Adaptive over plain (95 %); bold: the interval ends below {SLOWER}; \\*: beside other load"
    return _table(title, ["model", "temperature", "at once", *groups], rows)


def counts(reports: Sequence[Row]) -> str:
    """How many cells there are, how many failed, and the worst."""
    cells = [
        (cell, f"{_name(report)}, {group}, temperature {temperature:g}, {at_once} at once")
        for report, temperature, at_once, found in _lines(reports, PLAIN)
        for group, cell in found.items()
        if group != MEAN and cell["ratio"]
    ]
    if not cells:
        return ""
    failed = sum(_fails(cell, SLOWER) for cell, _ in cells)
    unsure = sum(cell["ratio"]["high"] is None for cell, _ in cells)
    disturbed = sum(cell["disturbed"] > 0 for cell, _ in cells)
    worst, where = min(cells, key=lambda pair: pair[0]["ratio"]["ratio"])
    said = f"{len(cells)} cells, {failed} failed, {unsure} without an interval, {disturbed} beside other load"
    return f"{said}; worst: {_shown(worst, SLOWER)}, {where}."


def against_fixed(reports: Sequence[Row]) -> str:
    """Mean over the groups: each fixed draft length and adaptive over plain, and adaptive over the best of them."""
    rows: list[list[str]] = []
    names = [f"K = {k}" for k in FIXED]
    for report in (r for r in reports if any(c["name"] in names for c in r["contenders"])):
        for temperature in dict.fromkeys(c["temperature"] for c in report["cells"]):
            over_plain = {name: _mean(report, temperature, name) for name in (*names, ADAPTIVE)}
            known = {name: cell["ratio"]["ratio"] for name, cell in over_plain.items() if cell and cell["ratio"]}
            fixed = [name for name in known if name != ADAPTIVE]
            if fixed and ADAPTIVE in known:
                best = max(fixed, key=known.__getitem__)
                cell = _mean(compared(report, best), temperature, ADAPTIVE)
                ratios = [f"{known[name]:.3f}" if name in known else "-" for name in over_plain]
                rows.append([_name(report), f"{temperature:g}", *ratios, best, _shown(cell, BEHIND, by_ratio=True)])
    title = f"Over plain, mean over the groups; bold: adaptive has less than {BEHIND} of the best fixed length"
    return _table(title, ["model", "temperature", *names, ADAPTIVE, "best", f"{ADAPTIVE} / best"], rows)


def against_peers(reports: Sequence[Row]) -> str:
    """Adaptive over each other engine."""
    groups, rows = _groups(reports), []
    for report in reports:
        for peer in (c["name"] for c in report["contenders"] if c["peer"]):
            for _, temperature, at_once, cells in _lines([report], peer):
                shown = [_shown(cells.get(group), 1.0, by_ratio=True) for group in groups]
                rows.append([_name(report), peer, f"{temperature:g}", str(at_once), *shown])
    title = "Adaptive over other engines; bold: the other one is faster"
    return _table(title, ["ours", "peer", "temperature", "at once", *groups], rows)


def _lines(reports: Sequence[Row], baseline: str) -> Iterator[tuple[Row, float, int, dict[str, Row]]]:
    """(report, temperature, at once, group -> adaptive's cell)."""
    for report in (r for r in reports if any(c["name"] == baseline for c in r["contenders"])):
        mine = [c for c in compared(report, baseline)["cells"] if c["contender"] == ADAPTIVE]
        for temperature, at_once in dict.fromkeys((c["temperature"], c["concurrency"]) for c in mine):
            key = (temperature, at_once)
            yield report, *key, {c["category"]: c for c in mine if (c["temperature"], c["concurrency"]) == key}


def _groups(reports: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(c["category"] for report in reports for c in report["cells"])
    return [name for name in names if name != MEAN] + [MEAN]


def _mean(report: Row, temperature: float, contender: str) -> Row | None:
    key = (temperature, contender, MEAN)
    return next((c for c in report["cells"] if (c["temperature"], c["contender"], c["category"]) == key), None)


def _name(report: Row) -> str:
    return f"{report['model']['name']}, {report['model']['backend']}"


def _fails(cell: Row, bound: float, *, by_ratio: bool = False) -> bool:
    end = cell["ratio"]["ratio" if by_ratio else "high"]
    return end is not None and end < bound


def _shown(cell: Row | None, bound: float, *, by_ratio: bool = False) -> str:
    """`0.98 (0.95 to 1.01)`, bold where it fails: its upper end, or by_ratio itself, is below the bound."""
    if cell is None or cell["ratio"] is None:
        return "failed" if cell and cell["error"] else "-"
    ratio = cell["ratio"]
    span = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    text = f"{ratio['ratio']:.2f}{span}"
    bold = f"**{text}**" if _fails(cell, bound, by_ratio=by_ratio) else text
    return bold + ("\\*" if cell["disturbed"] else "")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"{title}:", "", pipes(head), "|---" * len(head) + "|", *map(pipes, rows)]) if rows else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="Spec-Bench's question.jsonl")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="parts with one of these in their name, such as hf-c01"
    )
    parser.add_argument("--model", action="append", metavar="NAME@BACKEND", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--limit", type=int, nargs=3, default=[3, 12, 48], metavar="N", help="for 1, 4 and 16 at once")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-prompt-tokens", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("options", nargs="*", help="for `paceline bench compare`")
    args = parser.parse_args()
    if not args.report:
        if args.prompts is None:
            parser.error("--prompts FILE, or --report")
        try:
            measure(args)
        except KeyboardInterrupt:
            print("interrupted; so far:", file=sys.stderr)
    print(text_of([read_report(file) for file in sorted(args.into.glob("*.json"))]), end="")


if __name__ == "__main__":
    main()
