"""Many requests at once against one: tokens per second and peak memory.

    python benchmarks/concurrency.py [--model smollm2] [--backend hf] [--compile] [--requests 1 4 16 64] [--repeats 3]

Speeds: all sizes interleaved in one process, tokens per second over the whole call (prompts of about 40 tokens
included), medians of the repeats; the ratio is the median of the paired ratios to the smallest size, with their range.
Memory (Linux): one process for each size; resident after loading and one token, and the peak of the run from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from hardware import cpu_name
from rich.progress import Progress

from paceline import LLM, SamplingParams

TOPICS = ("tides", "bicycles", "volcanoes", "bread", "satellites", "whales", "glass", "chess")


def prompts(count: int) -> list[str]:
    return [
        f"Number {i}. Write a short and plain article about {TOPICS[i % len(TOPICS)]} for a school newspaper. Begin "
        "with what everybody knows, then go on to what is surprising, and end with a question.\n\n"
        for i in range(count)
    ]


def open_llm(args: argparse.Namespace) -> LLM:
    options: dict[str, Any] = {"compile": True} if args.compile else {}
    if args.backend == "hf":
        options |= {"prefix_cache": False, "dtype": args.dtype}
    return LLM(
        args.model,
        backend=args.backend,
        drafter=args.drafter,
        max_seqs=max(args.requests),
        max_len=1024,
        kv_tokens=max(1024, 256 * max(args.requests)),  # nobody is preempted
        **options,
    )


def run(llm: LLM, count: int, tokens: int, seed: int) -> float:
    """Tokens per second of `count` requests at once."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=1000 * seed + i, ignore_eos=True) for i in range(count)
    ]
    start = perf_counter()
    outputs = llm.generate(prompts(count), params)
    assert not any(o.num_preemptions for o in outputs)
    emitted = sum(len(o.outputs[0].token_ids) for o in outputs)
    return emitted / (perf_counter() - start)


def speeds(args: argparse.Namespace, progress: Progress) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {n: [] for n in args.requests}
    with open_llm(args) as llm:
        for n in found:
            run(llm, n, 8, 0)  # warm
        task = progress.add_task("speed", total=args.repeats * len(found))
        for repeat in range(1, args.repeats + 1):
            for n in found:
                found[n].append(run(llm, n, args.tokens, repeat))
                progress.advance(task)
    return found


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure_memory(args: argparse.Namespace) -> None:
    """In a process of its own: print [resident after loading and one token, peak of the run]."""
    with open_llm(args) as llm:
        run(llm, 1, 1, 0)
        loaded = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak of loading is not asked for
        run(llm, args.memory_of, args.tokens, 1)
    print(json.dumps([loaded, resident("VmHWM")]))


def memory(args: argparse.Namespace, progress: Progress) -> dict[int, list[int]]:
    found = {}
    for n in progress.track(args.requests, description="memory"):
        command = [sys.executable, __file__, "--memory-of", str(n), *sys.argv[1:]]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found[n] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="hf", choices=["hf", "llamacpp", "toy"])
    parser.add_argument("--dtype", default="bfloat16", help="of the hf backend")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        measure_memory(args)
        return
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        found = speeds(args, progress)
        peaks = {} if args.no_memory else memory(args, progress)
    first = args.requests[0]
    rows = []
    for n in args.requests:
        ratios = sorted(b / a for a, b in zip(found[first], found[n], strict=True))
        rows.append(
            {
                "requests": n,
                "tokens_per_second": statistics.median(found[n]),
                "ratio": statistics.median(ratios),
                "ratio_range": [ratios[0], ratios[-1]],
                "loaded_mib": round(peaks[n][0] / 2**20) if peaks else None,
                "peak_mib": round(peaks[n][1] / 2**20) if peaks else None,
            }
        )
    options = {"model": args.model, "backend": args.backend, "compile": args.compile, "drafter": args.drafter}
    if args.format == "json":
        print(json.dumps({"cpu": cpu_name(), **options, "tokens": args.tokens, "rows": rows}))
        return
    print(f"{cpu_name()}; {options}; {args.tokens} tokens each, {args.repeats} interleaved repeats\n")
    print(f"| requests | tokens/s | ratio to {first} (range) | loaded, MiB | peak, MiB |")
    print("|---|---|---|---|---|")
    for row in rows:
        low, high = row["ratio_range"]
        print(
            f"| {row['requests']} | {row['tokens_per_second']:.0f} | **{row['ratio']:.2f}** ({low:.2f} to {high:.2f}) "
            f"| {row['loaded_mib'] or '-'} | {row['peak_mib'] or '-'} |"
        )


if __name__ == "__main__":
    main()
