"""transformers as a peer of `paceline bench compare`; docs/bench.md has the protocol, README.md here the commands.

plain     generate(), one request at a time
lookup    generate(prompt_lookup_num_tokens=N), one request at a time: it takes one sequence
batch     its continuous batching, the manager behind generate_batch()
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol import OFF, Answer, Engine, Opening, RefusedError, Request, core_count, refuse_many, serve
from weights import default_cache, folder_of

PAGE = 256  # tokens; its own default
MISSING = "transformers' generate() has no such option"
UNBATCHED = "transformers' continuous batching drops it with a warning; --mode plain has it"


class Watch:
    """A streamer that keeps the moment of the first token: put() gets the prompt, then what each step made."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._prompt = True

    def put(self, ids: Any) -> None:
        if self._prompt:
            self._prompt = False
        elif self.first is None:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing is kept back."""


class Counter:
    """Forward passes of the model, and the tokens each of them was given."""

    def __init__(self, model: Any) -> None:
        self.widths: list[int] = []
        model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def _seen(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.widths.append(int(kwargs["input_ids"].shape[1]))


class Transformers:
    """What the three modes share: a model, its tokenizer for the texts, and facts for the report."""

    def __init__(self, options: argparse.Namespace, opening: Opening) -> None:
        threads = opening.threads or core_count()
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is there: its pools read it once
        folder = folder_of(Path(options.model or opening.model), options.cache)
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._options, self._opening = options, opening
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        ).eval()
        # What a request leaves unset, generate() takes from here: nothing of the model's own may get in.
        self.model.generation_config = transformers.GenerationConfig()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._torch, self._transformers = torch, transformers
        self.facts: dict[str, Any] = {
            "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "mode": options.mode,
            "dtype": options.dtype,
            "attention": "sdpa",
            "compiled": options.compile,
            "threads": torch.get_num_threads(),
            "weights": str(folder),
        }

    def config(self, request: Request, **more: Any) -> Any:
        """With every option said: what is None gets a default, and that of top_k is 50."""
        sampling: dict[str, Any] = {}
        if request.temperature > 0:
            sampling = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p")}
            sampling["min_p"] = request.min_p or None
        return self._transformers.GenerationConfig(
            do_sample=request.temperature > 0,
            **sampling,
            repetition_penalty=request.repetition_penalty,
            eos_token_id=list(request.stop_token_ids) or None,
            pad_token_id=request.stop_token_ids[0] if request.stop_token_ids else 0,  # never used: one sequence
            max_new_tokens=request.max_tokens,
            **more,
        )

    def answer(self, request: Request, ids: list[int], seconds: float, first: float, **counts: int) -> Answer:
        """ids: what was generated. first: seconds to the first of them."""
        stopped = bool(ids) and ids[-1] in request.stop_token_ids
        kept = ids[:-1] if stopped else ids
        text = self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        reason = "stop" if stopped else "length"
        return Answer(request.id, len(kept), text, reason, seconds=seconds, prefill_seconds=first, **counts)

    def close(self) -> None:
        """The process ends with it."""


class OneByOne(Transformers):
    """plain and lookup."""

    def __init__(self, options: argparse.Namespace, opening: Opening) -> None:
        super().__init__(options, opening)
        self._counter = Counter(self.model)
        self._more: dict[str, Any] = {}
        if options.mode == "lookup":
            self._more = {"prompt_lookup_num_tokens": options.drafts, "max_matching_ngram_size": options.ngram}
            self.facts |= self._more
        if options.compile:
            self._compile()

    def _compile(self) -> None:
        """Here, not in the first job: for an empty cache, a fresh and a grown one, and for drafts."""
        self.model.forward = self._torch.compile(self.model.forward, dynamic=True)
        prompts = tuple(range(10, 34)), tuple(range(10, 30)) * 2, tuple(range(10, 23)) * 4
        shared: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "seed": None, "stop_token_ids": (), **OFF}
        self.run([Request(0, "", "", prompt_token_ids=ids, **shared) for ids in prompts], 1)

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        for request in requests:
            request.refuse("presence_penalty", "frequency_penalty", why=MISSING)
        refuse_many(concurrency)
        with self._torch.inference_mode():
            return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Answer:
        start = time.perf_counter()
        if request.seed is not None:
            self._torch.manual_seed(request.seed)
        more = self._more | ({"min_new_tokens": request.min_tokens} if request.min_tokens else {})
        prompt = self._torch.tensor([request.prompt_token_ids])
        watch = Watch()
        self._counter.widths.clear()
        out = self.model.generate(
            prompt,
            attention_mask=self._torch.ones_like(prompt),
            generation_config=self.config(request, **more),
            streamer=watch,
        )
        end = time.perf_counter()
        ids = out[0, prompt.shape[1] :].tolist()
        first = end if watch.first is None else watch.first
        # The first forward takes the prompt and the first drafts; each makes one token more than it accepts.
        steps = len(self._counter.widths)
        drafted = sum(self._counter.widths) - prompt.shape[1] - (steps - 1)
        counts = {"steps": steps, "drafted": drafted, "accepted": len(ids) - steps}
        return self.answer(request, ids, end - start, first - start, **counts)


class Batch(Transformers):
    """Continuous batching. A manager has one way of sampling, so there is one for each, made when first asked for."""

    def __init__(self, options: argparse.Namespace, opening: Opening) -> None:
        super().__init__(options, opening)
        self._manager: Any = None
        self._how: tuple[Any, ...] = ()
        self._blocks: int | None = options.blocks
        if self._blocks is None:
            each = -(-(opening.max_len + 1) // PAGE)
            self._blocks = -(-4 * opening.max_seqs * each // 3)  # a third more: it starts nobody while few are free
        said = {"num_blocks": self._blocks, "max_batch_tokens": options.batch_tokens}
        self.facts |= {name: value or "its own" for name, value in said.items()} | {"prefix_sharing": False}

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        """The seed of the first request is that of the job: one generator draws for all."""
        for request in requests:
            request.refuse("presence_penalty", "frequency_penalty", why=MISSING)
            request.refuse("repetition_penalty", "min_p", "min_tokens", why=UNBATCHED)
        hows = {(request.temperature, request.top_k, request.top_p) for request in requests}
        if len(hows) > 1:
            raise RefusedError(f"(temperature, top_k, top_p) of {sorted(hows)} in one job; possible here: one of them")
        with self._torch.inference_mode():
            if self._manager is None or (self._how,) != tuple(hows):
                self._open(requests[0])
                (self._how,) = hows
            if requests[0].seed is not None:
                self._torch.manual_seed(requests[0].seed)
            return self._loop({str(request.id): request for request in requests}, concurrency)

    def _open(self, request: Request) -> None:
        self.close()
        how = self._transformers.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=self._blocks or None,
            max_batch_tokens=self._options.batch_tokens,
            max_requests_per_batch=self._opening.max_seqs,
            allow_block_sharing=False,
        )
        self._manager = self.model.init_continuous_batching(self.config(request), how)
        self._manager.warmup()
        self._manager.start()

    def _loop(self, requests: dict[str, Request], concurrency: int) -> list[Answer]:
        """As many as `concurrency` are in its hands; whoever ends makes room for the next one."""
        waiting, answers = list(requests.values()), []
        running: dict[str, float] = {}  # since when
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.pop(0)
                running[str(request.id)] = time.perf_counter()
                self._manager.add_request(
                    list(request.prompt_token_ids),
                    request_id=str(request.id),
                    max_new_tokens=request.max_tokens,
                    record_timestamps=True,
                    eos_token_id=list(request.stop_token_ids) or -1,
                )
            out = self._manager.get_result(timeout=1.0)
            if out is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching ended; its log on stderr says why")
            elif out.error is not None:
                raise RuntimeError(f"continuous batching failed at request {out.request_id}: {out.error}")
            elif out.is_finished():
                end, start = time.perf_counter(), running.pop(out.request_id)
                first = out.timestamps[0] - start
                answers.append(self.answer(requests[out.request_id], out.generated_tokens, end - start, first))
        return answers

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=5)
            self._manager.destroy()
            self._manager = None


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["plain", "lookup", "batch"], default="plain")
    parser.add_argument("--model", help="folder or .gguf file (default: what Paceline opened)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--drafts", type=int, default=5, help="lookup: prompt_lookup_num_tokens")
    parser.add_argument("--ngram", type=int, default=2, help="lookup: max_matching_ngram_size; 2 is its own default")
    parser.add_argument(
        "--compile", action="store_true", help="plain, lookup: torch.compile(model.forward, dynamic=True)"
    )
    parser.add_argument("--batch-tokens", type=int, help="batch: max_batch_tokens of one forward (its own: 8192)")
    parser.add_argument("--blocks", type=int, help="batch: num_blocks of KV memory; 0: its own, 60 %% of all memory")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where a GGUF's weights are written")
    options = parser.parse_args(words)
    if options.compile and options.mode == "batch":
        parser.error("--compile with --mode batch; possible for: plain, lookup")
    return options


def main() -> None:
    options = read_options()
    kind: Callable[..., Engine] = Batch if options.mode == "batch" else OneByOne
    serve(lambda opening: kind(options, opening))


if __name__ == "__main__":
    main()
