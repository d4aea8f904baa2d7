"""What the rows of one step cost between logits and token, as multiples of the time to read them once.

    python benchmarks/rows.py [--vocab 49152] [--rows 5] [--rounds 3] [--logits rows.npy] [--torch]

Rows are float32 normal noise of scale 3, which is flatter than a language model's: filters look slower here than they
are; --logits takes real ones, float32[n, V]. A step's rows come from a forward that has used the caches for its
weights, so each call here gets rows that have left them: sets of rows take turns until they are many times the last
cache. "read" is one compiled pass over the same rows that looks at every logit (a maximum of integers, the fastest
there is). All lines take turns within a round; a line's time is the lowest tenth of its calls, its ratio is to "read"
of the same run. Everything runs on the calling thread.

--torch adds top-k and top-p as they are usually written, with a sort of the row, in PyTorch on the same rows, on one
thread and on all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from hardware import cpu_name

from paceline.params import SamplingParams
from paceline.rng import KeyedDraws, Role
from paceline.sampling import TokenCounts, distribution, kernels, warm_up
from paceline.sampling.softmax import Softmax

Rows = np.ndarray[Any, np.dtype[np.float32]]  # float32[rows, V]
Job = Callable[[Rows, int], object]
BYTES = 160 * 2**20  # of all sets together
LIMITS = {"p(x) and normaliser": 3.0, "draw, top-k 50, top-p 0.9": 6.0}
PLAIN = SamplingParams()


@numba.njit
def _largest_bits(bits: Any) -> Any:
    top = bits[0, 0]
    for row in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            top = max(top, bits[row, i])
    return top


def read(rows: Rows, _: int) -> object:
    """One look at every logit."""
    return _largest_bits(rows.view(np.int32))


def prob(rows: Rows, i: int) -> object:
    """p of one token of each row."""
    return [distribution(row, PLAIN, None, borrow=True).prob(i) for row in rows]


@numba.njit
def _normalised(rows: Any, token: int) -> Any:
    scale = 1.4426950408889634
    shares = np.empty(rows.shape[0])
    for i in range(rows.shape[0]):
        peak = kernels.peak_of(rows[i])
        shares[i] = kernels.weight_of(rows[i, token], peak, scale) / kernels.total(rows[i], peak, scale)
    return shares


def prob_compiled(rows: Rows, i: int) -> object:
    """The same without what Python spends on a row: its kernels, called from compiled code."""
    return _normalised(rows, i)


def draw(**options: Any) -> Job:
    """A token from each row."""
    params = SamplingParams(**options)
    random = np.random.default_rng(0)
    counts = TokenCounts(random.integers(0, 1000, 400).tolist())
    counts.add(random.integers(0, 1000, 200).tolist())

    def job(rows: Rows, i: int) -> object:
        draws, tokens = KeyedDraws(1, i), []
        for row in rows:
            p = distribution(row, params, counts, borrow=True)
            is_lazy = isinstance(p, Softmax)
            tokens.append(p.pick(draws, i, Role.TARGET) if is_lazy else draws.pick(p.probs, i, Role.TARGET, ids=p.ids))
        return tokens

    return job


def residual_draw(rows: Rows, i: int) -> object:
    """A token from a dense array of weights for each row."""
    draws = KeyedDraws(1, i)
    return [draws.pick(distribution(row, PLAIN, None, borrow=True).probs, i, Role.RECOVER) for row in rows]


JOBS: dict[str, Job] = {
    "read": read,
    "p(x) and normaliser": prob_compiled,
    "p(x) and normaliser, from Python": prob,
    "draw": draw(),
    "draw, temperature 0.7": draw(temperature=0.7),
    "draw, array of p made": residual_draw,
    "draw, top-k 50": draw(top_k=50),
    "draw, top-k 50, top-p 0.9": draw(top_k=50, top_p=0.9),
    "draw, top-p 0.9": draw(top_p=0.9),
    "draw, min-p 0.05": draw(min_p=0.05),
    "draw, penalties, 600 tokens seen": draw(repetition_penalty=1.1, frequency_penalty=0.2),
    "draw, the same and top-p 0.9": draw(repetition_penalty=1.1, frequency_penalty=0.2, top_p=0.9),
    "greedy": draw(temperature=0.0),
}


def torch_jobs() -> dict[str, Job]:
    """Softmax, sort, cumulated sum, mask, multinomial: float32, all rows at once."""
    import torch

    every = torch.get_num_threads()

    def job(threads: int) -> Job:
        def run(rows: Rows, _: int) -> object:
            torch.set_num_threads(threads)
            logits, order = torch.from_numpy(rows).sort(dim=-1, descending=True)
            logits[:, 50:] = -torch.inf
            p = logits.softmax(dim=-1)
            p[p.cumsum(dim=-1) - p >= 0.9] = 0.0
            return order.gather(-1, torch.multinomial(p / p.sum(dim=-1, keepdim=True), 1))

        return run

    return {f"PyTorch, sorted, {threads} thread(s)": job(threads) for threads in sorted({1, every})}


def sets_of(args: argparse.Namespace) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32[sets, rows, V], many times a cache."""
    random = np.random.default_rng(0)
    if args.logits:
        pool = np.load(args.logits).astype(np.float32)
    else:
        pool = (random.normal(size=(4 * args.rows, args.vocab)) * 3).astype(np.float32)
    sets = max(2, BYTES // (pool[0].nbytes * args.rows))
    return pool[random.integers(0, len(pool), (sets, args.rows))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152, help="tokens in the vocabulary")
    parser.add_argument("--rows", type=int, default=5, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=3, help="how often each set of rows is used by each line")
    parser.add_argument("--logits", help="an .npy file with real rows, float32[n, V]")
    parser.add_argument("--torch", action="store_true", help="sort-based code in PyTorch too")
    args = parser.parse_args()
    start = time.perf_counter()
    warm_up()
    print(f"{cpu_name()}; kernels ready after {time.perf_counter() - start:.1f} s")
    sets = sets_of(args)
    jobs = dict(JOBS)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(args.rounds + 1):
        for name, job in jobs.items():
            for i, rows in enumerate(sets):
                before = time.perf_counter()
                job(rows, i)
                if turn:  # the first round compiles
                    times[name].append(time.perf_counter() - before)
    for name, job in torch_jobs().items() if args.torch else ():
        times[name] = []
        for i, rows in enumerate([*sets[:3], *sets[:20]]):
            before = time.perf_counter()
            job(rows, i)
            if i >= 3:
                times[name].append(time.perf_counter() - before)
    show(times, sets.shape)


def show(times: dict[str, list[float]], shape: tuple[int, ...]) -> None:
    print(f"{shape[1]} x {shape[2]} float32 logits, cold; {shape[0]} sets\n")
    print(f"{'':34s}{'us':>9s}{'median':>9s}{'/ read':>9s}{'limit':>7s}")
    lowest = {name: float(np.quantile(values, 0.1)) for name, values in times.items()}
    for name, values in times.items():
        limit = f"{LIMITS[name]:6.0f}x" if name in LIMITS else ""
        multiple = f"{lowest[name] / lowest['read']:8.2f}x"
        print(f"{name:34s}{1e6 * lowest[name]:9.1f}{1e6 * float(np.median(values)):9.1f}{multiple}{limit}")
    for name in times:
        if name.startswith("PyTorch"):
            ratio = lowest[name] / lowest["draw, top-k 50, top-p 0.9"]
            print(f"\n{name}: {ratio:.0f} times as long as the same draw here")


if __name__ == "__main__":
    main()
