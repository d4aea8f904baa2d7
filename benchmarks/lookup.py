"""What a lookup step costs by length of the context: propose 4 drafts, observe 5 committed tokens.

python benchmarks/lookup.py
"""

from __future__ import annotations

import random
import time
import tracemalloc

from paceline import SamplingParams
from paceline.draft import LookupDrafter
from paceline.rng import KeyedDraws
from paceline.sampling import History
from paceline.types import DraftContext, Role

STEPS = 2_000
VOCAB_SIZE = 49_152
PARAMS = SamplingParams()


def main() -> None:
    """Print one line per context length."""
    print("context   us/step   us/token to index   bytes/token")
    for length in (100, 1_000, 10_000, 100_000):
        rng = random.Random(0)
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(length // 2)] * 2
        tracemalloc.start()
        drafter = LookupDrafter()
        drafter.observe(0, tokens)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()

        indexer = LookupDrafter()
        started = time.perf_counter()
        indexer.observe(0, tokens)
        index_us = (time.perf_counter() - started) / len(tokens) * 1e6

        history = History(PARAMS, tokens, length, VOCAB_SIZE)
        started = time.perf_counter()
        for _ in range(STEPS):
            context = DraftContext(0, tokens, length, PARAMS, KeyedDraws(0, len(tokens)), Role.DRAFT, history)
            (proposal,) = drafter.propose([context], [4])
            block = [*getattr(proposal, "tokens", ()), 7][:5]
            tokens.extend(block)
            drafter.observe(0, block)
        step_us = (time.perf_counter() - started) / STEPS * 1e6
        print(f"{length:7d} {step_us:9.1f} {index_us:19.2f} {size / length:13.0f}")


if __name__ == "__main__":
    main()
