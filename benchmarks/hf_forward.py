"""One forward of backend hf, eager and compiled, against transformers with its own cache, side by side in one run.

    python benchmarks/hf_forward.py [--model smollm2] [--widths 1 2 5 8 16] [--contexts 128 1024] [--repeats 30]
                                    [--dtype bfloat16] [--threads 2] [--no-compile] [--scattered]
                                    [--format table | json]

A forward takes `width` new tokens behind `context` cached ones and gives logits for all of them. Ours is the whole of
HFBackend.forward: checks, packing, paged attention, logits as float32 in numpy. Theirs is the bare call of the model,
with the attention it comes with and a DynamicCache, cut back after every forward. The contestants take turns within
every repeat, and repeat by repeat another one begins. Times are milliseconds: median (quartiles). A ratio is the median
of the paired ratios to transformers, with its quartiles; below 1 is faster.

--scattered adds the worst case of our memory: no two pages of the sequence are neighbours, so that every layer gathers
its keys and values before it attends.

Measure on a quiet machine: the threads of PyTorch wait for each other, and a busy core makes everybody slow.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from hardware import cpu_name

from paceline.backend.hf import HFBackend
from paceline.backend.hf.loading import load
from paceline.models import resolve_weights
from paceline.types import Segment

THEIRS = "transformers"
CHUNK = 512
WARM = 3
Timer = Callable[[int], float]
"""seconds of one forward of so many tokens; the context is as before afterwards."""


def token_ids(count: int, vocab: int, rng: np.random.Generator) -> list[int]:
    return [int(i) for i in rng.integers(vocab // 10, vocab, count)]


def theirs(model: Any, context: int, rng: np.random.Generator) -> Timer:
    """transformers by itself: a DynamicCache that holds `context` tokens."""
    vocab = int(model.config.get_text_config().vocab_size)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = transformers.DynamicCache(config=model.config)

    def forward(ids: list[int], **options: Any) -> None:
        with torch.inference_mode():
            model(input_ids=torch.tensor([ids]), use_cache=True, **{keyword: cache}, **options)

    for at in range(0, context, CHUNK):
        forward(token_ids(min(CHUNK, context - at), vocab, rng), logits_to_keep=1)

    def timed(width: int) -> float:
        ids = token_ids(width, vocab, rng)
        start = perf_counter()
        forward(ids)
        seconds = perf_counter() - start
        cache.crop(-width)
        return seconds

    return timed


def ours(backend: HFBackend, slot: int, context: int, rng: np.random.Generator) -> Timer:
    """HFBackend.forward in a slot that gets `context` tokens."""
    vocab = backend.info.vocab_size
    for at in range(0, context, CHUNK):
        count = min(CHUNK, context - at)
        backend.forward([Segment(slot, tuple(token_ids(count, vocab, rng)), at, 0)])

    def timed(width: int) -> float:
        batch = [Segment(slot, tuple(token_ids(width, vocab, rng)), context, width)]
        start = perf_counter()
        backend.forward(batch)
        seconds = perf_counter() - start
        backend.truncate(slot, context)
        return seconds

    return timed


def scatter(backend: HFBackend) -> None:
    """Take every other page away, so that what is left has no neighbours."""
    taken = []
    while backend.reserve(slot := backend.acquire(), backend.info.page_size):
        taken.append(slot)
    backend.release(slot)
    pages = {slot: backend._book.pages(slot)[0] for slot in taken}
    for slot in taken:
        if pages[slot] % 2:
            backend.release(slot)


def measure(timers: dict[str, Timer], widths: list[int], repeats: int) -> dict[int, dict[str, list[float]]]:
    """width -> contestant -> milliseconds, repeat by repeat."""
    found: dict[int, dict[str, list[float]]] = {width: {name: [] for name in timers} for width in widths}
    names = list(timers)
    for repeat in range(-WARM, repeats):
        for width in widths:
            for i in range(len(names)):
                name = names[(repeat + i) % len(names)]
                seconds = timers[name](width)
                if repeat >= 0:
                    found[width][name].append(seconds * 1e3)
    return found


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "min": min(values)}


def line(context: int, width: int, times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        name: spread([a / b for a, b in zip(values, times[THEIRS], strict=True)])
        for name, values in times.items()
        if name != THEIRS
    }
    return {
        "context": context,
        "width": width,
        "milliseconds": {name: spread(values) for name, values in times.items()},
        "ratio": ratios,
    }


def describe(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.model,
        "dtype": args.dtype,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "repeats": args.repeats,
    }


def shown(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['low']:{form}}-{values['high']:{form}})"


def print_table(facts: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    names, compared = list(lines[0]["milliseconds"]), list(lines[0]["ratio"])
    heads = ["context", "width", *(f"{n}, ms" for n in names), *(f"{n} / {THEIRS}" for n in compared)]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for entry in lines:
        cells = [str(entry["context"]), str(entry["width"])]
        cells += [shown(entry["milliseconds"][name], ".1f") for name in names]
        cells += [shown(entry["ratio"][name], ".2f") for name in compared]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name, a folder, a hub id or a GGUF")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=None, help="PyTorch's threads; default: its own choice")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 5, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled forward out")
    parser.add_argument("--scattered", action="store_true", help="add a sequence whose pages lie apart")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    args = parser.parse_args()

    weights = resolve_weights(args.model)
    longest = max(args.contexts) + max(args.widths)
    options: dict[str, Any] = {"dtype": args.dtype, "max_seqs": 1, "max_len": longest, "prefix_cache": False}
    print(f"loading {args.model} three times", file=sys.stderr)
    own = load(
        weights,
        dtype=args.dtype,
        device=None,
        max_len=longest,
        clip_max_len=False,
        n_threads=args.threads,
        progress=None,
    ).model
    backends = {"eager": HFBackend(weights, **options)}
    if args.scattered:
        room = {"max_seqs": 4096, "kv_tokens": 2 * longest + 64}
        backends["eager, scattered"] = HFBackend(weights, **{**options, **room})
        scatter(backends["eager, scattered"])
    if not args.no_compile:
        start = perf_counter()
        backends["compiled"] = HFBackend(weights, compile=True, **options)
        print(f"compiled, or found compiled, in {perf_counter() - start:.1f} s", file=sys.stderr)
    lines = []
    for context in args.contexts:
        rng = np.random.default_rng(0)
        timers = {THEIRS: theirs(own, context, rng)}
        slots = {name: backend.acquire() for name, backend in backends.items()}
        timers |= {name: ours(backend, slots[name], context, rng) for name, backend in backends.items()}
        for width, times in measure(timers, args.widths, args.repeats).items():
            lines.append(line(context, width, times))
        for name, slot in slots.items():
            backends[name].release(slot)
    facts = describe(args)
    if args.format == "json":
        print(json.dumps({"setup": facts, "forwards": lines}, indent=2))
    else:
        print_table(facts, lines)


if __name__ == "__main__":
    main()
