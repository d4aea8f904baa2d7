"""llama-cpp-python as a peer: its `Llama` class, alone or with its own prompt lookup.

    paceline bench compare -m smollm2 --peer 'llama-lookup=python benchmarks/peers/llama_cpp_peer.py --mode lookup'

Needs llama-cpp-python and numpy. It has one sequence, so jobs with a concurrency above 1 are refused.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from protocol import Answer, Opening, Request, core_count, refuse_many, serve

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class Counted(LlamaDraftModel):
    """A draft model, and what it was asked and gave. It is called once before each forward except the prompt's."""

    inner: LlamaDraftModel
    calls: int = 0
    drafted: int = 0

    def __call__(self, input_ids: Any, /, **options: Any) -> Any:
        draft = self.inner(input_ids, **options)
        self.calls += 1
        self.drafted += len(draft)
        return draft


class LlamaClass:
    """See protocol.Engine."""

    def __init__(self, options: argparse.Namespace, opening: Opening) -> None:
        threads = opening.threads or core_count()
        self.draft: Counted | None = None
        if options.mode == "lookup":
            self.draft = Counted(LlamaPromptLookupDecoding(num_pred_tokens=options.drafts))
        self.llama = llama_cpp.Llama(
            options.model or opening.model,
            n_ctx=opening.max_len,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=options.flash_attn,
            draft_model=self.draft,
            # The library asks for all rows itself with a draft model, but keeps n_batch of them: long prompts fail.
            logits_all=self.draft is not None,
            verbose=False,
        )
        self.facts = {
            "engine": f"llama-cpp-python {llama_cpp.__version__}",
            "mode": options.mode if self.draft is None else f"lookup, {options.drafts} drafts",
            "flash_attn": options.flash_attn,
            "threads": threads,
            "library": llama_cpp.llama_print_system_info().decode(),
        }

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        refuse_many(concurrency)
        for request in requests:
            check(request)
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Answer:
        before = (self.draft.calls, self.draft.drafted) if self.draft else (0, 0)
        start = first = time.perf_counter()
        ids: list[int] = []
        ended = False
        for token in self.tokens(request):
            first = first if ids else time.perf_counter()
            ended = token in request.stop_token_ids
            ids.append(token)
            if ended or len(ids) == request.max_tokens:
                break
        seconds = time.perf_counter() - start
        kept = ids[:-1] if ended else ids
        steps, drafted = len(ids), 0
        if self.draft:
            steps, drafted = 1 + self.draft.calls - before[0], self.draft.drafted - before[1]
        return Answer(
            id=request.id,
            tokens=len(kept),
            text=self.llama.detokenize(kept, special=True).decode("utf-8", "replace"),
            finish_reason="stop" if ended else "length",
            seconds=seconds,
            prefill_seconds=first - start,
            steps=steps,
            drafted=drafted,
            accepted=len(ids) - steps,  # a step makes one token more than it accepts
        )

    def tokens(self, request: Request) -> Any:
        """Its generator, with every sampler off that is on by default. It would go on for ever."""
        self.llama.reset()  # type: ignore[no-untyped-call]  # else it keeps what the prompt has in common with the last one
        self.llama.set_seed(llama_cpp.LLAMA_DEFAULT_SEED if request.seed is None else request.seed % 2**32)
        return self.llama.generate(
            list(request.prompt_token_ids),
            temp=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            typical_p=1.0,
            repeat_penalty=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
        )

    def close(self) -> None:
        self.llama.close()


def check(request: Request) -> None:
    """Raise RefusedError for what the class does in another way than we do."""
    request.refuse(*PENALTIES, why="the Llama class looks at the last 64 tokens only")
    request.refuse("min_tokens", why="the Llama class has no such option")
    if request.temperature not in (0.0, 1.0):
        request.refuse("top_p", "min_p", why="the Llama class filters first and divides by the temperature then")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("plain", "lookup"), default="plain")
    parser.add_argument("--drafts", type=int, default=10, help="lookup: num_pred_tokens (10, the class's default)")
    parser.add_argument(
        "--flash-attn", action=argparse.BooleanOptionalAction, default=False, help="the class's default: off"
    )
    parser.add_argument("--model", help="a GGUF file other than the one that Paceline opened")
    serve(functools.partial(LlamaClass, parser.parse_args()))


if __name__ == "__main__":
    main()
