"""Draft lengths under a load that rises and falls, on a machine that exists on paper only.

    python benchmarks/roofline.py [--knee 280] [--most 320] [-o docs/img/roofline.svg]

A forward of the toy model costs the same up to `knee` tokens and grows with them beyond, as on a GPU whose memory is
the bottleneck first and whose arithmetic is later. The number of requests climbs from one to `most` and comes back.
The engine, the drafter and the controller are the real ones; only the clock is made up. Prints a table, and draws it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter
from paceline.engine import Engine
from paceline.params import SamplingParams
from paceline.schedule import Controller, CostTable

MILLISECONDS = 1e-3


class OnPaper(Controller):
    """A controller whose clock says what the table says."""

    def observe_forward(self, shares: Sequence[Any], others: Sequence[Any], seconds: float) -> None:
        """The table is the truth here."""

    def observe_drafting(self, drafter: str, candidates: Any, budgets: Sequence[int], seconds: float) -> None:
        """Lookup for hundreds of requests would take its time; here it takes none."""
        super().observe_drafting(drafter, candidates, budgets, 0.0)

    def observe_step(self, rest: float) -> None:
        """Nothing but the forward costs anything here."""


def cost(tokens: int, knee: int) -> float:
    """Seconds of a forward."""
    return 10 * MILLISECONDS * max(tokens, knee) / knee


def simulate(knee: int, most: int, steps: int) -> list[tuple[int, float, float]]:
    """For each step: requests that ran, drafts verified for each of them, tokens each of them got."""
    backend = ToyBackend(8, seed=1, stop_ids=(), max_len=4000, max_seqs=most, max_step_tokens=20 * most)
    widths = list(range(1, 18 * most))
    controller = OnPaper(CostTable(widths, [0], [[cost(width, knee) for width in widths]]))
    engine = Engine(backend, LookupDrafter(), controller=controller)
    endless = SamplingParams(max_tokens=3900, temperature=0.0, ignore_eos=True)
    alive: list[int] = []
    lines = []
    for step in range(steps):
        climb = 1 - abs(2 * step / (steps - 1) - 1)
        wanted = max(1, round(most * climb))
        while len(alive) < wanted:
            alive.append(engine.add([len(alive) % 8, step % 8, 1, 2, 3, 1, 2, 3], endless))
        while len(alive) > wanted:
            engine.cancel(alive.pop())
        drafted = sum(s.stats.drafted for s in engine.running)
        emitted = sum(s.num_output for s in engine.running)
        before = {s.request.request_id for s in engine.running}
        engine.step()
        running = [s for s in engine.running if s.request.request_id in before]
        if running:
            drafted = sum(s.stats.drafted for s in running) - drafted
            emitted = sum(s.num_output for s in running) - emitted
            lines.append((len(running), drafted / len(running), emitted / len(running)))
    return lines


def draw(lines: Sequence[tuple[int, float, float]], knee: int) -> str:
    """Requests and drafts per request over the steps, as one self-contained picture."""
    width, height, left, top = 860, 300, 60, 30
    most_requests = max(n for n, _, _ in lines)
    most_drafts = max(max(d for _, d, _ in lines), 1.0)

    def path(values: Sequence[float], most: float) -> str:
        step = (width - 2 * left) / max(len(values) - 1, 1)
        points = (
            f"{left + i * step:.1f},{height - 30 - (height - 30 - top) * v / most:.1f}" for i, v in enumerate(values)
        )
        return " ".join(points)

    requests, drafts = path([n for n, _, _ in lines], most_requests), path([d for _, d, _ in lines], most_drafts)
    style = "font-family='sans-serif' font-size='13'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {style}>"
        f"<rect width='{width}' height='{height}' fill='white'/>"
        f"<polyline points='{requests}' fill='none' stroke='#999' stroke-width='2'/>"
        f"<polyline points='{drafts}' fill='none' stroke='#0072b2' stroke-width='2'/>"
        f"<text x='{left}' y='18' fill='#666'>requests, at most {most_requests}</text>"
        f"<text x='{left + 200}' y='18' fill='#0072b2'>drafts verified for each, at most {most_drafts:.1f}</text>"
        f"<text x='{width - left}' y='18' text-anchor='end'>knee at {knee} tokens a forward</text>"
        f"<line x1='{left}' y1='{height - 30}' x2='{width - left}' y2='{height - 30}' stroke='#444'/>"
        f"<text x='{width / 2}' y='{height - 10}' text-anchor='middle'>steps</text></svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--knee", type=int, default=280, help="tokens up to which a forward costs the same")
    parser.add_argument("--most", type=int, default=320, help="requests at the height of the load")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("-o", "--output", type=Path, help="an SVG file")
    arguments = parser.parse_args()
    for name, least in {"knee": 1, "most": 1, "steps": 3}.items():
        if (given := getattr(arguments, name)) < least:
            parser.error(f"--{name} {given}; allowed: at least {least}")
    lines = simulate(arguments.knee, arguments.most, arguments.steps)
    print("| requests | drafts for each | tokens for each |\n|---|---|---|")
    for n, drafts, tokens in lines[:: max(1, len(lines) // 24)]:
        print(f"| {n} | {drafts:.2f} | {tokens:.2f} |")
    if arguments.output:
        arguments.output.write_text(draw(lines, arguments.knee))


if __name__ == "__main__":
    main()
