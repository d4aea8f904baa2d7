"""What one row of logits costs between the model and the token: median microseconds of each piece.

    python benchmarks/rows.py [--vocab 49152] [--repeat 400]

Rows are float32 normal noise of scale 3, which is flatter than a language model's: filters look slower here than
they are. "read the row" is the time numpy takes to pass over it once, the floor of anything that looks at it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from paceline.params import SamplingParams
from paceline.rng import KeyedDraws, Role
from paceline.sampling import TokenCounts, distribution, kernels

Job = Callable[[int], object]


def median_us(job: Job, repeat: int) -> float:
    """Median wall time of job(i) in microseconds, after one call that compiles it."""
    job(0)
    times = []
    for i in range(repeat):
        start = time.perf_counter()
        job(i)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def jobs(vocab: int) -> dict[str, Job]:
    """Name -> what to time; i varies the row's position so that no draw repeats."""
    random = np.random.default_rng(0)
    row = (random.normal(size=vocab) * 3).astype(np.float32)
    relative = np.minimum(row.astype(np.float64) - row.max(), 0.0)
    out = np.empty(vocab)
    counts = TokenCounts(random.integers(0, vocab, 400).tolist())
    counts.add(random.integers(0, vocab, 200).tolist())
    p = distribution(row, SamplingParams(), None)
    few = distribution(row, SamplingParams(top_k=40), None)
    draws = KeyedDraws(1, 0)

    def row_job(**options: float | dict[int, float]) -> Job:
        params = SamplingParams(**options)  # type: ignore[arg-type]
        return lambda i: distribution(row, params, counts)

    return {
        "read the row": lambda i: row.max(),
        "exp of the row": lambda i: kernels.exp(relative, out),
        "exp of the row, numpy": lambda i: np.exp(relative, out),
        "greedy": row_job(temperature=0.0),
        "plain": row_job(),
        "temperature 0.7": row_job(temperature=0.7),
        "penalties, 600 tokens seen": row_job(repetition_penalty=1.1, frequency_penalty=0.2),
        "bias on 2 tokens": row_job(logit_bias={5: 1.0, 7: -1.0}),
        "top-k 40": row_job(top_k=40),
        "top-p 0.95": row_job(top_p=0.95),
        "min-p 0.05": row_job(min_p=0.05),
        "top-k 40, top-p 0.95, min-p 0.05": row_job(top_k=40, top_p=0.95, min_p=0.05),
        "pick, dense": lambda i: draws.pick(p.probs, i, Role.TARGET),
        "pick, 40 tokens": lambda i: draws.pick(few.probs, i, Role.TARGET, ids=few.ids),
        "accept": lambda i: draws.accept(0.5, i),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152, help="tokens in the vocabulary")
    parser.add_argument("--repeat", type=int, default=400, help="timed calls per line")
    arguments = parser.parse_args()
    print(f"vocabulary {arguments.vocab}, float32, median of {arguments.repeat} calls, microseconds")
    for name, job in jobs(arguments.vocab).items():
        print(f"{name:36s}{median_us(job, arguments.repeat):9.1f}")


if __name__ == "__main__":
    main()
