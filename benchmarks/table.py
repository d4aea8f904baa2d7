"""The README's table: plain decoding against lookup, one stream, side by side in one run.

    python benchmarks/table.py [--repeats 5] [--models smollm2:bf16 smollm2:q4_0 ...] [--backend hf [--compile]]

For each model, prompt and temperature the two are interleaved; speeds are decoded tokens per second (prefill
left out), medians of the repeats; the ratio is the median of the paired ratios, with their range.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hardware import cpu_name

import paceline.cli.demo as demo
from paceline import LLM, RequestOutput, SamplingParams
from paceline.models import resolve

PROMPTS: dict[str, Any] = {
    "code edit": demo.OWN_PROMPT.read_text(encoding="utf-8").removesuffix("\n"),
    "chat": [{"role": "user", "content": "Explain to a child why the sky is blue and why sunsets are red."}],
}


def decode_speed(out: RequestOutput) -> float:
    s = out.speculation
    return s.emitted / (s.draft_seconds + s.forward_seconds + s.verify_seconds + s.other_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--models", nargs="+", default=["smollm2:bf16", "smollm2:q4_0", "smollm2:q4_1"])
    parser.add_argument("--backend", default="llamacpp", choices=["llamacpp", "hf"])
    parser.add_argument("--compile", action="store_true", help="of the hf backend")
    args = parser.parse_args()
    print(f"{cpu_name()}; at most {args.tokens} tokens, {args.repeats} interleaved repeats\n")
    heads = [f"lookup, K = {k}: ratio (range), tokens per step" for k in args.draft_lengths]
    print(f"| model | prompt | temperature | plain tokens/s | {' | '.join(heads)} |")
    print("|---" * (4 + len(heads)) + "|")
    for model in args.models:
        options: dict[str, Any] = {"drafter": "lookup", "max_seqs": 1, "max_len": 2048, "backend": args.backend}
        if args.backend == "hf":
            options |= {"compile": args.compile, "prefix_cache": False}
        with LLM(resolve(model) if args.backend == "llamacpp" else model, **options) as llm:
            for kind, prompt in PROMPTS.items():
                for temperature in (0.0, 1.0):
                    row(llm, model, kind, prompt, temperature, args)


def row(llm: LLM, model: str, kind: str, prompt: Any, temperature: float, args: argparse.Namespace) -> None:
    ask = llm.generate if isinstance(prompt, str) else llm.chat
    speeds: dict[int, list[float]] = {k: [] for k in (0, *args.draft_lengths)}
    per_step: dict[int, list[float]] = {k: [] for k in speeds}
    for repeat in range(args.repeats + 1):
        for k in speeds:
            params = SamplingParams(temperature=temperature, max_tokens=args.tokens, seed=repeat, draft_length=k)
            out = ask(prompt, params)[0]
            if repeat:  # the first round warms up
                speeds[k].append(decode_speed(out))
                per_step[k].append(out.speculation.tokens_per_step)
    cells = []
    for k in args.draft_lengths:
        ratios = sorted(b / a for a, b in zip(speeds[0], speeds[k], strict=True))
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        cells.append(f"**{statistics.median(ratios):.2f}** ({span}), {statistics.mean(per_step[k]):.2f}")
    plain = statistics.median(speeds[0])
    print(f"| {model} | {kind} | {temperature:g} | {plain:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
