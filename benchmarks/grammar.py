"""What a grammar costs and what forced tokens bring, on real JSON schemas.

    python benchmarks/grammar.py --schemas FOLDER [--model smollm2:q4_0] [--tokens 128] [--draft-length 4]

For each schema, temperature and drafter: tokens per step (bonus and recovered included), the mean time of one
forward, the time per step spent on the grammar (masks, walks along the drafts and back, commits, forced tokens), and
its share of the forward. Schemas that do not compile are listed below the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware import cpu_name

from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.llm import open_backend
from paceline.sampling import Grammar

DRAFTERS = ("none", "lookup", "forced", "forced+lookup")


class Clock:
    """Seconds spent inside the public methods of all grammars; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False
        for name in ("legal", "num_legal", "is_over", "forced", "commit"):
            setattr(Grammar, name, self._timed(getattr(Grammar, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any) -> Any:
            if self._inside:
                return method(*args)
            self._inside, started = True, time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - started
                self._inside = False

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, required=True, help="a folder of JSON schemas")
    parser.add_argument("--model", default="smollm2:q4_0")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    clock, shares, refused = Clock(), list[float](), list[str]()
    print(f"{cpu_name()}; {args.model}, at most {args.tokens} tokens, at most {args.draft_length} drafts a step\n")
    print("| schema | temperature | drafter | tokens | tokens per step | forward, ms | grammar, ms per step | share |")
    print("|---" * 8 + "|")
    options: dict[str, Any] = {} if args.threads is None else {"n_threads": args.threads}
    backend = open_backend(args.model, max_seqs=1, max_len=1024, **options)
    files = [file for file in sorted(args.schemas.glob("*.json")) if file.name != "index.json"]
    for drafter in DRAFTERS:
        with LLM(backend, drafter=drafter, draft_length=args.draft_length) as llm:
            for file in files:
                try:
                    for temperature in (0.0, 1.0):
                        shares.append(row(llm, drafter, file, temperature, args.tokens, clock))
                except PacelineError as error:
                    refused.append(f"{file.stem}: {str(error).splitlines()[0]}")
    if shares:
        print(f"\nShare of the forward: median {statistics.median(shares):.1%}, worst {max(shares):.1%}.")
    for line in sorted(set(refused)):
        print(f"- {line}")


def row(llm: LLM, drafter: str, file: Path, temperature: float, tokens: int, clock: Clock) -> float:
    schema = json.loads(file.read_text(encoding="utf-8"))
    names = ", ".join(list(schema.get("properties", {}))[:8])
    what = str(schema.get("description") or schema.get("title") or file.stem)[:200]
    messages = [{"role": "user", "content": f"Write one short JSON document. It is: {what} It has: {names}."}]
    grammar = {"json_schema": schema, "whitespace": False}
    params = SamplingParams(
        temperature=temperature, min_p=0.1, repetition_penalty=1.15, seed=1, max_tokens=tokens, grammar=grammar
    )
    llm.chat(messages, replace(params, max_tokens=2))  # compiles
    clock.seconds = 0.0
    s = llm.chat(messages, params)[0].speculation
    forward, spent = s.forward_seconds / s.steps * 1e3, clock.seconds / s.steps * 1e3
    print(
        f"| {file.stem} | {temperature:g} | {drafter} | {s.emitted} | {s.tokens_per_step:.2f} | {forward:.2f} "
        f"| {spent:.3f} | {spent / forward:.1%} |",
        flush=True,
    )
    return spent / forward


if __name__ == "__main__":
    main()
