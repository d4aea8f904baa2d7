"""Measure, predict, and measure what was predicted.

First come the cost of forwards and, with the longest and the shortest drafts, acceptance and the time beside
forwards. All predictions are made of that alone. What is run to stand beside them is run afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from ..bench.guard import Guard, Load
from ..bench.intervals import estimate
from ..bench.runs import Ask, Measured, Prompts, Report, Workload, kept, units
from ..errors import InvalidInput
from ..schedule import MAX_DRAFTS, CostTable
from .model import (
    BATCHES,
    Record,
    Speed,
    Timed,
    acceptance_by_position,
    fit_overheads,
    iid_tokens,
    mean_acceptance,
    reach_by_position,
    speedup,
    tokens_per_step,
    walk,
)
from .watch import Log, Watch

RECORDED = MAX_DRAFTS
"""Drafts of the steps that are recorded: the longest that are predicted."""
FIRST_LENGTHS = (RECORDED, 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One setting on one unit of asks. length: drafts a step, None adaptive. disturbed: beside other load."""

    length: int | None
    batch: int
    unit: int
    log: Log
    disturbed: bool

    @property
    def rate(self) -> float | None:
        """Tokens a second while all of the batch decoded; None where that never was."""
        seconds = sum(step.seconds for step in self.log.timed)
        return sum(step.tokens for step in self.log.timed) / seconds if seconds else None


class Study:
    """Prompts on one target with one drafter. batches: sizes at which steps are run, ascending, 1 among them."""

    def __init__(
        self, watch: Watch, costs: CostTable, workload: Workload, prompts: Prompts, batches: Sequence[int], guard: Guard
    ) -> None:
        self.watch, self.costs, self.workload, self.prompts, self.guard = watch, costs, workload, prompts, guard
        self.batches = list(batches)
        self.records: list[list[Record]] = []

    def recorded(self, report: Report) -> Speed:
        """The first half: everything that predictions are made of. Raises InvalidInput where no step was made."""
        for length in FIRST_LENGTHS:  # a few tokens, for what happens once
            self._one(length, 1, next(self._units(1)), warm_up=True)
        jobs = [(batch, length) for batch in self.batches for length in FIRST_LENGTHS]
        runs: list[Run] = []
        for batch, length in jobs:
            chosen = list(self._units(batch))
            for unit in chosen if batch == 1 else chosen[:1]:
                report(f"{length} drafts, {batch} at once", len(runs), len(jobs) + len(chosen))
                runs.append(self._one(length, batch, unit))
        report("", 1, 1)
        longest = [run for run in runs if (run.length, run.batch) == (RECORDED, 1)]
        self.records = [steps for run in longest for steps in run.log.records.values()]
        if not self.records:
            raise InvalidInput("no prompt had an answer: nothing to learn acceptance from; use other --prompts")
        context = round(fmean(context for run in longest for context in run.log.contexts))
        overheads = fit_overheads([step for run in runs for step in run.log.timed])
        walks = [
            [step for records in self.records for step in walk(records, RECORDED, length)]
            for length in range(RECORDED + 1)
        ]
        return Speed(self.costs, overheads, walks, context, self.batches[-1])

    def checked(self, speed: Speed, lengths: Sequence[int], report: Report) -> Measured[Run]:
        """The second half: plain, `lengths`, the length that is predicted to be best, and adaptive, in turn.

        What ends it early leaves what was run; see kept().
        """
        jobs = []
        for batch in self.batches:
            settings = [*sorted({0, *lengths, speed.best(batch).length}), None]
            for unit in self._units(batch):
                first = unit[0] % len(settings)
                jobs += [(length, batch, unit) for length in [*settings[first:], *settings[:first]]]

        def runs() -> Iterator[Run]:
            for done, (length, batch, unit) in enumerate(jobs):
                report(f"{setting_name(length)}, {batch} at once", done, len(jobs))
                yield self._one(length, batch, unit)
            report("", 1, 1)

        return kept(runs(), len(jobs))

    def _units(self, batch: int) -> Iterator[tuple[int, list[Ask]]]:
        """Asks that are made at once, numbered; each has a seed of its own, the same for every setting."""
        params = replace(self.workload.params, temperature=self.workload.temperatures[0])
        for number, (_, pairs) in enumerate(units(self.prompts, batch)):
            seed = self.workload.seed + 1_000 * number
            yield number, [Ask(q, ids, replace(params, seed=seed + i)) for i, (q, ids) in enumerate(pairs)]

    def _one(self, length: int | None, batch: int, unit: tuple[int, list[Ask]], *, warm_up: bool = False) -> Run:
        number, asks = unit
        if warm_up:
            short = [replace(ask, params=replace(ask.params, max_tokens=8, min_tokens=0)) for ask in asks]
            return Run(length, batch, number, self.watch.run(short, length), False)
        log, load = self.guard.run(partial(self.watch.run, asks, length))
        return Run(length, batch, number, log, load is not None and load.disturbed)


def setting_name(length: int | None) -> str:
    """ "plain", "K = 4" or "adaptive"."""
    return "adaptive" if length is None else f"K = {length}" if length else "plain"


# --- what a report holds ------------------------------------------------------------------------------


def findings(study: Study, speed: Speed, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that was measured and predicted, as JSON."""
    checks = list(compared(speed, runs))
    return {
        "costs": {
            "widths": speed.costs.widths.tolist(),
            "contexts": speed.costs.contexts.tolist(),
            "seconds": speed.costs.table.tolist(),
            "per_sequence": speed.costs.per_sequence,
        },
        "overheads": asdict(speed.overheads),
        "context": speed.context,
        "measured_batch": speed.measured_batch,
        "acceptance": acceptance(study.records, speed),
        "tokens": tokens_table(study.records, speed, checks),
        "predictions": predictions(speed),
        "best": [{"batch": batch, **_best(speed, batch)} for batch in BATCHES],
        "break_even_batch": speed.break_even(),
        "break_even_batches": [speed.break_even(length) for length in range(1, speed.most + 1)],
        "checks": checks,
    }


def _best(speed: Speed, batch: int) -> dict[str, Any]:
    best = speed.best(batch)
    return {"length": best.length, "ratio": best.ratio, "beyond": list(best.beyond)}


def acceptance(records: Sequence[Sequence[Record]], speed: Speed) -> dict[str, Any]:
    """Of the recorded steps. cost_ratio: a draft's seconds over those of a plain step, the c of the formula."""
    every = [record for steps in records for record in steps]
    plain = speed.predict(0, 1).seconds
    asked = speed.overheads.drafting(1, RECORDED) / RECORDED
    return {
        "recorded_length": RECORDED,
        "steps": len(every),
        "mean": mean_acceptance(every),
        "at": acceptance_by_position(every),
        "reach": reach_by_position(every),
        "drafts_per_step": fmean(record.drafted for record in every),
        "cost_ratio": asked / plain,
    }


def tokens_table(
    records: Sequence[Sequence[Record]], speed: Speed, checks: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each draft length: tokens a step by the i.i.d. formula, by position, walked, and as run (None: was not)."""
    known = acceptance(records, speed)
    ran = {check["length"]: check["tokens_per_step"] for check in checks if check["batch"] == 1}
    return [
        {
            "length": length,
            "iid": iid_tokens(known["mean"], length),
            "by_position": 1 + sum(known["reach"][:length]),
            "walked": tokens_per_step(speed.walks[length]),
            "measured": ran.get(length),
            "formula_ratio": speedup(known["mean"], length, known["cost_ratio"]),
            "ratio": speed.predict(length, 1).ratio,
        }
        for length in range(speed.most + 1)
    ]


def predictions(speed: Speed) -> list[dict[str, Any]]:
    """Every draft length at every batch size."""
    made = [speed.predict(length, batch) for length in range(speed.most + 1) for batch in BATCHES]
    return [{**asdict(p), "beyond": list(p.beyond), "tokens_per_second": p.tokens_per_second} for p in made]


def compared(speed: Speed, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Each setting that was run, with its prediction beside it; None where there is none, or nothing was timed."""
    for batch, length in dict.fromkeys((run.batch, run.length) for run in runs):
        mine = [run for run in runs if (run.batch, run.length) == (batch, length)]
        plain = {run.unit: run.rate for run in runs if (run.batch, run.length) == (batch, 0)}
        pairs = {run.unit: [run.rate / below] for run in mine if run.rate and (below := plain.get(run.unit))}
        ratio = estimate(pairs) if length != 0 else None
        expected = None if length is None else speed.predict(length, batch)
        every = [record for run in mine for steps in run.log.records.values() for record in steps]
        yield {
            "setting": setting_name(length),
            "length": length,
            "batch": batch,
            "runs": len(mine),
            "disturbed": sum(run.disturbed for run in mine),
            "tokens_per_step": fmean(record.emitted for record in every) if every else None,
            **_measured([step for run in mine for step in run.log.timed]),
            "ratio": None if ratio is None else ratio.as_json(),
            "predicted": None
            if expected is None
            else {**asdict(expected), "beyond": list(expected.beyond), "tokens_per_second": expected.tokens_per_second},
        }


def _measured(steps: Sequence[Timed]) -> dict[str, float | None]:
    seconds = sum(step.seconds for step in steps)
    return {
        "seconds": seconds / len(steps) if steps else None,
        "forward_seconds": fmean(step.forward for step in steps) if steps else None,
        "tokens_per_second": sum(step.tokens for step in steps) / seconds if seconds else None,
    }


def doubts(found: Mapping[str, Any], load: Load | None) -> list[str]:
    """What of the findings is not to be believed. load: beside the cost table's measurement; None is unknown."""
    said = []
    if load is not None and load.disturbed:
        said.append(
            f"the cost of forwards was measured beside other load ({load.others:.1f} CPUs): no speed predicted here is "
            "worth much; run it again on an idle machine"
        )
    impossible = [p for p in found["predictions"] if p["ratio"] > 1.02 * p["tokens_per_step"]]
    if impossible:
        worst = max(impossible, key=lambda p: p["ratio"] / p["tokens_per_step"])
        said.append(
            f"{worst['length']} drafts, {worst['batch']} at once: {worst['ratio']:.2f} times plain is predicted with "
            f"{worst['tokens_per_step']:.2f} tokens per step, so wide forwards were measured to be faster than narrow "
            "ones; where the machine was idle, look for a slow path for single tokens"
        )
    disturbed = sum(check["disturbed"] for check in found["checks"])
    if disturbed:
        said.append(f"{disturbed} runs were beside other load; their lines are marked *")
    said += [
        f"{check['setting']}, {check['batch']} at once: never all of them decoded together; use more --max-tokens"
        for check in found["checks"]
        if check["tokens_per_second"] is None
    ]
    return said
