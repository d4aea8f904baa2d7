"""Share of a step spent outside the target's forward: smollm2:bf16, one request, K = 4.

    python benchmarks/overhead.py [--model smollm2:bf16] [--tokens 128] [--repeats 5]

Runs drafters and options in turn, several times over, and prints medians with the spread. "outside" is drafting,
verification (distributions and draws included) and everything else, as a share of the decoding steps. For the draft
model, whose drafting is a forward of its own, "outside without drafting" is the line to look at: it leaves drafting out
of both sides. With lookup, see how many drafts a step had: a shorter forward makes the same work a larger share.
"four guesses" has K drafts in every step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from paceline import LLM, PacelineError, SamplingParams
from paceline.draft import LookupDrafter
from paceline.models import resolve
from paceline.types import DraftContext, Proposal

PROMPT = "Tell me how a bicycle race is won, and why riders stay close behind one another."


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top-p 0.9 and penalties": {
        "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2
    },
}  # fmt: skip
LIMITS = {"temperature 1": 3, "top-p 0.9 and penalties": 8}
K = 4


class Guesses(LookupDrafter):
    """Says what was said: its drafts cost nothing to make and are as good as never kept."""

    name = "guesses"

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        """The last budgets[i] tokens."""
        return [Proposal.point(c.tokens[len(c.tokens) - n :]) for c, n in zip(contexts, budgets, strict=True)]


def share(llm: LLM, params: SamplingParams) -> dict[str, float]:
    """Seconds by stage of one generation, prefill left out, and the counts behind them."""
    s = llm.chat([{"role": "user", "content": PROMPT}], params)[0].speculation
    outside = s.verify_seconds + s.other_seconds
    return {
        "outside": (outside + s.draft_seconds) / (outside + s.draft_seconds + s.forward_seconds),
        "outside without drafting": outside / (outside + s.forward_seconds),
        "forward ms a step": 1e3 * s.forward_seconds / s.steps,
        "verify us a step": 1e6 * s.verify_seconds / s.steps,
        "draft us a step": 1e6 * s.draft_seconds / s.steps,
        "other us a step": 1e6 * s.other_seconds / s.steps,
        "drafts a step": s.drafted / s.steps,
        "tokens a step": s.tokens_per_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:bf16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    path = resolve(args.model)
    drafters: dict[str, Any] = {
        "none": "none",
        "lookup": "lookup",
        "lookup, min_ngram=1": LookupDrafter(min_ngram=1),
        "four guesses": Guesses(),
        "model:smollm2:q4_0": f"model:{resolve('smollm2:q4_0')}",
    }
    llms = {name: LLM(path, drafter=drafter, max_len=1024, max_seqs=1) for name, drafter in drafters.items()}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {(d, o): [] for o in OPTIONS for d in drafters}
    for repeat in range(args.repeats + 1):
        for name, options in runs:
            params = SamplingParams(**OPTIONS[options], max_tokens=args.tokens, draft_length=K, seed=repeat)
            result = share(llms[name], params)
            if repeat:  # the first round warms caches and compiles
                runs[name, options].append(result)
    print(f"{args.model}, one request, K = {K}, {args.tokens} tokens, {args.repeats} runs interleaved")
    for (name, options), results in runs.items():
        print(f"\ndrafter {name}, {options} (limit {LIMITS[options]}%)")
        for key in results[0]:
            values = sorted(r[key] for r in results)
            unit = "%" if key.startswith("outside") else ""
            scale = 100 if unit else 1
            print(
                f"  {key:26s} median {scale * statistics.median(values):8.2f}{unit}"
                f"   range {scale * values[0]:.2f} to {scale * values[-1]:.2f}{unit}"
            )
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
