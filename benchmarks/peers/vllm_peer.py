"""vLLM on CPU as a peer of `paceline bench compare`; docs/bench.md has the protocol, README.md here the commands.

    plain     no speculation
    ngram     its n-gram drafter; temperature 0 only, see UNSOUND

The engine runs in this process, one step() after another, as LLM.generate() does it; here, because no more than the
asked number of requests may be inside. --public lets LLM.generate() have all of a job at once, as a control.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protocol import Answer, Opening, RefusedError, Request, serve
from weights import default_cache, folder_of

UNSOUND = (
    "vLLM 0.32's n-gram drafting on CPU divides logits by memory that was never written when it samples: no draft is "
    "accepted and the text is wrong; possible here: temperature 0, or --mode plain"
)


@dataclass(slots=True)
class Inside:
    """A request in the engine's hands."""

    request: Request
    start: float
    ids: list[int] = field(default_factory=list)
    first: float | None = None
    steps: int = 0  # that brought tokens

    def take(self, ids: Sequence[int]) -> None:
        if ids and self.first is None:
            self.first = time.perf_counter()
        self.ids += ids
        self.steps += bool(ids)


class Vllm:
    def __init__(self, options: argparse.Namespace, opening: Opening) -> None:
        folder = folder_of(Path(options.model or opening.model), options.cache)
        cpus = cpus_for(opening.threads)
        os.environ.update(environment_of(cpus, options.kv_gib, options.cache))
        import torch
        import vllm

        self._drafts = options.drafts if options.mode == "ngram" else 0
        self._counts = options.counts or not self._drafts
        self._public, self._seqs = options.public, opening.max_seqs
        lookup = {"prompt_lookup_max": options.ngram_max, "prompt_lookup_min": options.ngram_min}
        self._llm = vllm.LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=opening.max_len,
            max_num_seqs=opening.max_seqs,
            enable_prefix_caching=False,
            generation_config="vllm",  # nothing of the model's own
            speculative_config={"method": "ngram", "num_speculative_tokens": self._drafts, **lookup}
            if self._drafts
            else None,
            disable_log_stats=not (self._drafts and options.counts),
            seed=0,
        )
        self._engine = self._llm.llm_engine
        self._tokenizer = self._llm.get_tokenizer()
        self._params, self._kind = vllm.SamplingParams, vllm.sampling_params.RequestOutputKind.DELTA
        self.facts: dict[str, Any] = {
            "engine": f"vllm {vllm.__version__} (CPU), torch {torch.__version__}",
            "mode": options.mode,
            "runs": "LLM.generate()" if options.public else "step by step",
            "dtype": "bfloat16",
            "cpus": cpus,
            "threads": torch.get_num_threads(),
            "preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name],
            "weights": str(folder),
        } | ({"num_speculative_tokens": self._drafts, **lookup} if self._drafts else {})

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        for request in requests:
            if self._drafts and request.temperature > 0:
                raise RefusedError(f"temperature={request.temperature}: {UNSOUND}")
        if self._public:
            return self._generated(requests, concurrency)
        drafted = self._drafted()
        waiting, answers = list(requests), []
        inside: dict[str, Inside] = {}
        while waiting or inside:
            while waiting and len(inside) < concurrency:
                self._add(inside, waiting.pop(0))
            for out in self._engine.step():
                one = inside[out.request_id]
                one.take(out.outputs[0].token_ids)
                if out.finished:
                    answers.append(self._answer(inside.pop(out.request_id)))
        return self._counted(answers, drafted)

    def _generated(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        """All at once. It gives no times, and no steps."""
        if min(len(requests), self._seqs) > concurrency:
            raise RefusedError(
                f"concurrency={concurrency} for {len(requests)} requests: LLM.generate() runs {self._seqs} at once; "
                f"possible here: {self._seqs}, or no more requests than concurrency"
            )
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
        outs = self._llm.generate(prompts, [self._params_of(request) for request in requests], use_tqdm=False)
        answers = []
        for request, out in zip(requests, outs, strict=True):
            ids, stop = out.outputs[0].token_ids, request.stop_token_ids
            stopped = bool(ids) and ids[-1] in stop
            tokens = len(ids) - stopped
            answers.append(Answer(request.id, tokens, out.outputs[0].text, "stop" if stopped else "length"))
        return answers

    def _add(self, inside: dict[str, Inside], request: Request) -> None:
        name = str(request.id)
        inside[name] = Inside(request, time.perf_counter())
        params = self._params_of(request, detokenize=False, output_kind=self._kind)
        self._engine.add_request(name, {"prompt_token_ids": list(request.prompt_token_ids)}, params)

    def _params_of(self, request: Request, **more: Any) -> Any:
        return self._params(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # the ids above are all that may end it
            **more,
        )

    def _answer(self, one: Inside) -> Answer:
        end = time.perf_counter()
        stopped = bool(one.ids) and one.ids[-1] in one.request.stop_token_ids
        kept = one.ids[:-1] if stopped else one.ids
        first = (one.first or end) - one.start
        counts: dict[str, Any] = {}
        if self._counts:
            counts = {"steps": one.steps, "drafted": 0, "accepted": len(one.ids) - one.steps}
        return Answer(
            one.request.id,
            len(kept),
            self._tokenizer.decode(kept, skip_special_tokens=True),
            "stop" if stopped else "length",
            seconds=end - one.start,
            prefill_seconds=first,
            **counts,
        )

    def _drafted(self) -> int:
        """Drafts verified so far, where it counts them."""
        if not (self._drafts and self._counts):
            return 0
        values = (m.value for m in self._llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")
        return int(sum(values))

    def _counted(self, answers: list[Answer], before: int) -> list[Answer]:
        """It counts drafts of all requests together, which is why the first of a job has them all."""
        drafted = self._drafted() - before
        return [replace(a, drafted=drafted if i == 0 else 0) if self._counts else a for i, a in enumerate(answers)]

    def close(self) -> None:
        """The process ends with it."""


def cpus_for(threads: int | None) -> list[int]:
    """One logical CPU of each core that this process may use; or `threads` of all it may use, those first."""
    allowed = sorted(os.sched_getaffinity(0))
    first: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    cores = sorted(first.values())
    rest = [cpu for cpu in allowed if cpu not in cores]
    return cores if threads is None else (cores + rest)[:threads]


def environment_of(cpus: Sequence[int], kv_gib: int, cache: Path) -> dict[str, str]:
    """What vLLM reads; and of OpenMP what vLLM gives to a worker process, since here the worker is this process."""
    listed = ",".join(map(str, cpus))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cpus)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def start_preloaded() -> None:
    """Start this script once more with tcmalloc and Intel's OpenMP, which vLLM's documentation asks for, as far as the
    virtual environment has them. Both must be there before anything else is."""
    found = [sorted(Path(sys.prefix, "lib").glob(name)) for name in ("libtcmalloc_minimal.so.[0-9]", "libiomp5.so")]
    wanted = ":".join(str(paths[0]) for paths in found if paths)
    if wanted and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": wanted})


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["plain", "ngram"], default="plain")
    parser.add_argument("--model", help="folder or .gguf file (default: what Paceline opened)")
    parser.add_argument("--drafts", type=int, default=5, help="ngram: num_speculative_tokens")
    parser.add_argument("--ngram-max", type=int, default=4, help="ngram: prompt_lookup_max")
    parser.add_argument("--ngram-min", type=int, default=2, help="ngram: prompt_lookup_min")
    parser.add_argument("--counts", action="store_true", help="ngram: report drafts; switches its statistics on")
    parser.add_argument("--public", action="store_true", help="LLM.generate() for each job, instead of step by step")
    parser.add_argument("--kv-gib", type=int, default=4, help="GiB of KV memory")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="for a GGUF's weights and compiled code")
    return parser.parse_args(words)


def main() -> None:
    options = read_options()
    start_preloaded()
    serve(lambda opening: Vllm(options, opening))


if __name__ == "__main__":
    main()
