"""The grid: adaptive against plain decoding, for every model, temperature, number of requests at once and group.

    python benchmarks/grid.py --prompts question.jsonl --into grid [--minutes 60] [--only c01] [-- --guard-wait 120]
    python benchmarks/grid.py --into grid --report
    python benchmarks/grid.py --prompts question.jsonl --into peers --model smollm2:bf16@hf --peer 'vllm=COMMAND'

--prompts is Spec-Bench's question.jsonl; the editing tasks of benchmarks/prompts are asked too. Each model and number
at once is one `paceline bench compare` at temperatures 0 and 1; single requests of a bf16 model are also run with fixed
draft lengths. What matters most comes first, and --minutes starts nothing new after that time. FOLDER gets a JSON of
each; one that is there and finished is not measured again, so give other sizes or peers a folder of their own. Ctrl-C
keeps what the running command has measured. What stands behind -- goes to `bench compare`. In the end, or with --report
at once, come the tables of all JSON files in FOLDER. Exit status: 1 where a part failed, 130 after Ctrl-C.

With --peer, which needs a --model that the peers run too, single requests are compared with other engines; where they
can do more, --at-once 1 --at-once 16. docs/bench.md says how long it takes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline import PacelineError
from paceline.bench.cells import MEAN
from paceline.bench.report import compared, pipes, read_report
from paceline.bench.target import ADAPTIVE, PLAIN
from paceline.errors import InvalidInput

MODELS = ("smollm2:bf16@llamacpp", "smollm2:bf16@hf", "smollm2:q4_0@llamacpp", "smollm2:q4_1@llamacpp")
AT_ONCE = (1, 16, 4)  # in the order of their worth
FIXED = (1, 2, 4, 8, 16)
EDITS = Path(__file__).parent / "prompts" / "code_edit.jsonl"


class Bound(NamedTuple):
    """A cell fails where that of its ratio ("ratio", or "high": the upper end of its interval) is below `least`."""

    key: str
    least: float


SLOWER, BEHIND, FASTER = Bound("high", 0.97), Bound("ratio", 0.95), Bound("ratio", 1.0)
"""Against plain, against the best fixed draft length, against another engine."""

Row = dict[str, Any]


def jobs(args: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """(JSON file, command) of each part, in the order in which they are run."""
    limits = dict(zip(sorted(AT_ONCE), args.limit, strict=True))
    for at_once in (n for n in AT_ONCE if n in args.at_once):
        for name in args.model or MODELS:
            model, _, backend = name.partition("@")
            file = args.into / f"{name.replace(':', '-').replace('@', '-').replace('/', '_')}-c{at_once:02}.json"
            if args.only and not any(part in file.stem for part in args.only):
                continue
            lengths = FIXED if at_once == 1 and model.endswith(":bf16") and not args.peer else ()
            words = (
                f"-m paceline bench compare -c {at_once} --temperature 0 --temperature 1 --limit {limits[at_once]} "
                f"--repeats {args.repeats} --max-tokens {args.max_tokens} --max-prompt-tokens {args.max_prompt_tokens} "
                f"--backend {backend or 'auto'} {'--compile' if backend == 'hf' else ''}"
                + "".join(f" -k {k}" for k in lengths)
            )
            peers = [word for peer in args.peer for word in ("--peer", peer)]
            asked = ["-m", model, "--prompts", str(args.prompts), "--prompts", str(EDITS)]
            yield file, [sys.executable, *words.split(), *asked, *peers, *args.options, "-o", str(file)]


def measure(args: argparse.Namespace) -> bool:
    """Every part that is not there yet, while there is time. Whether all that ran went well."""
    args.into.mkdir(parents=True, exist_ok=True)
    begun, parts, well = time.monotonic(), list(jobs(args)), True
    for number, (file, command) in enumerate(parts, start=1):
        minutes = (time.monotonic() - begun) / 60
        late = minutes >= args.minutes
        known = file.exists() and not read_report(file).get("stopped")
        what = "is there" if known else "left out, the time is over" if late else "measuring"
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
            well = False
            print(f"{file.stem} ended with status {status}", file=sys.stderr, flush=True)
    return well


# --- tables -------------------------------------------------------------------------------------------


def text_of(reports: Sequence[Row]) -> str:
    """All tables that the reports have something for, and what they come to."""
    parts = [never_slower(reports), counts(reports), against_fixed(reports), against_peers(reports)]
    parts += [f"{_name(r)}: {r['stopped']}." for r in reports if r.get("stopped")]
    return "\n\n".join(part for part in parts if part) + "\n"


def never_slower(reports: Sequence[Row]) -> str:
    """Adaptive over plain, a line for each model, temperature and number at once."""
    groups = _groups(reports)
    rows = [row for report in reports for row in _rows(report, PLAIN, groups, SLOWER)]
    title = f"Adaptive over plain (95 %); bold: the interval ends below {SLOWER.least}; \\*: beside other load"
    return _table(title, ["model", "temperature", "at once", *groups], rows)


def counts(reports: Sequence[Row]) -> str:
    """How many cells there are, how many failed, and the worst."""
    cells = [
        (cell, f"{_name(report)}, {group}, temperature {temperature:g}, {at_once} at once")
        for report in reports
        for (temperature, at_once), found in _cells(report, PLAIN).items()
        for group, cell in found.get(ADAPTIVE, {}).items()
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
    rows, names = [], [f"K = {k}" for k in FIXED]
    for report in reports:
        for key, found in _cells(report, PLAIN).items():
            means = {name: cells[MEAN]["ratio"] for name, cells in found.items() if MEAN in cells}
            known = {name: ratio["ratio"] for name, ratio in means.items() if ratio}
            fixed = [name for name in names if name in known]
            if fixed and ADAPTIVE in known:
                best = max(fixed, key=known.__getitem__)
                shown = _shown(_cells(report, best)[key][ADAPTIVE].get(MEAN), BEHIND)
                ratios = [f"{known[name]:.3f}" if name in known else "-" for name in (*names, ADAPTIVE)]
                rows.append([_name(report), f"{key[0]:g}", *ratios, best, shown])
    title = f"Over plain, mean over the groups; bold: adaptive has less than {BEHIND.least} of the best fixed length"
    return _table(title, ["model", "temperature", *names, ADAPTIVE, "best", f"{ADAPTIVE} / best"], rows)


def against_peers(reports: Sequence[Row]) -> str:
    """Adaptive over each other engine."""
    groups, rows = _groups(reports), []
    for report in reports:
        for peer in (c["name"] for c in report["contenders"] if c["peer"]):
            rows += [[name, peer, *row] for name, *row in _rows(report, peer, groups, FASTER)]
    title = "Adaptive over other engines; bold: the other one is faster"
    return _table(title, ["ours", "peer", "temperature", "at once", *groups], rows)


def _rows(report: Row, baseline: str, groups: Sequence[str], bound: Bound) -> Iterator[list[str]]:
    """Model, temperature, at once, and adaptive over the baseline in each group."""
    for (temperature, at_once), found in _cells(report, baseline).items():
        if ADAPTIVE in found:
            shown = [_shown(found[ADAPTIVE].get(group), bound) for group in groups]
            yield [_name(report), f"{temperature:g}", str(at_once), *shown]


def _cells(report: Row, baseline: str) -> dict[tuple[float, int], dict[str, dict[str, Row]]]:
    """(temperature, at once) -> contender -> group -> cell, against the baseline; nothing where that was not run."""
    found: dict[tuple[float, int], dict[str, dict[str, Row]]] = {}
    if any(c["name"] == baseline for c in report["contenders"]):
        for cell in compared(report, baseline)["cells"]:
            contenders = found.setdefault((cell["temperature"], cell["concurrency"]), {})
            contenders.setdefault(cell["contender"], {})[cell["category"]] = cell
    return found


def _groups(reports: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(c["category"] for report in reports for c in report["cells"])
    return [name for name in names if name != MEAN] + [MEAN]


def _name(report: Row) -> str:
    return f"{report['model']['name']}, {report['model']['backend']}"


def _fails(cell: Row, bound: Bound) -> bool:
    value = cell["ratio"][bound.key]
    return value is not None and value < bound.least


def _shown(cell: Row | None, bound: Bound) -> str:
    """`0.98 (0.95 to 1.01)`, bold where it fails."""
    if cell is None or cell["ratio"] is None:
        return "failed" if cell and cell["error"] else "-"
    ratio = cell["ratio"]
    span = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    text = f"{ratio['ratio']:.2f}{span}"
    return (f"**{text}**" if _fails(cell, bound) else text) + ("\\*" if cell["disturbed"] else "")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"{title}:", "", pipes(head), "|---" * len(head) + "|", *map(pipes, rows)]) if rows else ""


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line, where no words are given. Ends the program where they contradict each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--into", type=Path, metavar="FOLDER", required=True)
    add("--prompts", type=Path, metavar="FILE", help="Spec-Bench's question.jsonl")
    add("--report", action="store_true", help="measure nothing")
    add("--minutes", type=float, default=60.0)
    add("--only", nargs="+", metavar="TEXT", help="parts with one of these in their name, such as hf-c01")
    add("--model", action="append", metavar="NAME@BACKEND", help=f"default: {', '.join(MODELS)}")
    add("--peer", action="append", default=[], metavar="NAME=COMMAND")
    add("--at-once", action="append", type=int, choices=sorted(AT_ONCE), help="default: each; with --peer only 1")
    add("--limit", type=int, nargs=3, default=[3, 12, 48], metavar="N", help="for 1, 4 and 16 at once")
    add("--max-tokens", type=int, default=48)
    add("--max-prompt-tokens", type=int, default=800)
    add("--repeats", type=int, default=1)
    add("options", nargs="*", help="for `paceline bench compare`, behind --, such as -- --threads 2")
    args = parser.parse_args(words)
    if args.prompts is None and not args.report:
        parser.error("--prompts FILE, or --report")
    if args.peer and not args.model:
        parser.error("--peer without --model; name the model that the peer runs, such as --model smollm2:bf16@hf")
    args.at_once = args.at_once or ([1] if args.peer else list(AT_ONCE))
    return args


def main() -> None:
    args = read_options()
    try:
        sys.exit(run(args))
    except PacelineError as error:
        sys.exit(f"grid.py: {error}")


def run(args: argparse.Namespace) -> int:
    """Measure what is asked for, and print all tables. The exit status; raises PacelineError for what can't be read."""
    status = 0
    if not args.report:
        if not args.prompts.is_file():
            raise InvalidInput(f"--prompts {str(args.prompts)!r} is no file")
        try:
            status = 0 if measure(args) else 1
        except KeyboardInterrupt:
            status = 130
            print("interrupted; so far:", file=sys.stderr)
    files = sorted(args.into.glob("*.json"))
    if args.report and not files:
        raise InvalidInput(f"no report is in {str(args.into)!r}; measure something into it first")
    print(text_of([read_report(file) for file in files]), end="")
    return status


if __name__ == "__main__":
    main()
