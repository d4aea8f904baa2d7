"""LLM: the offline face. Text in, text out; everything else happens in the engine."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from .draft import NoDrafter, open_drafter
from .engine import Engine
from .errors import InvalidInput, InvalidParams, InvalidPrompt, UnsupportedOption
from .params import SamplingParams
from .types import Backend, Drafter, RequestOutput, StreamChunk

Prompt = str | Seq[int]
Message = Mapping[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")
BACKENDS = ("auto", "llamacpp", "toy")


class LLM:
    """A target model with a drafter, ready to generate.

    model: a name (`paceline models list`), a path to a GGUF, "toy" or "toy:SEED"; or an open Backend.
    drafter: "auto" (lookup), "none", "lookup", "model:NAME" where NAME is what `model` may be; or a Drafter.
    draft_length: drafts per step where a request does not say. max_seqs: requests at once. max_len: tokens
    of one sequence, prompt and output. n_threads: default one per physical core.

    Safe to use from several threads: one of them steps the engine at a time.
    """

    def __init__(
        self,
        model: str | Path | Backend,
        *,
        drafter: str | Drafter = "auto",
        backend: str = "auto",
        draft_length: int | None = None,
        max_seqs: int = 16,
        max_len: int | None = None,
        n_threads: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_step_tokens: int | None = None,
        page_size: int | None = None,
        prefix_cache: bool | None = None,
        compile: bool | None = None,  # noqa: A002 - the word users know from PyTorch
    ) -> None:
        later = {
            "dtype": dtype,
            "device": device,
            "page_size": page_size,
            "prefix_cache": prefix_cache,
            "compile": compile,
        }
        for name, value in later.items():
            if value is not None:
                raise UnsupportedOption(
                    f"{name} = {value!r} is not an option of the backends of this version; leave it out"
                )
        sizes = {
            "max_seqs": max_seqs,
            "max_len": max_len,
            "n_threads": n_threads,
            "max_step_tokens": max_step_tokens,
            "draft_length": draft_length,
        }
        _check_sizes(sizes)

        def opened(name: str | Path) -> Backend:
            return open_backend(
                name,
                backend,
                max_seqs=max_seqs,
                max_len=max_len,
                n_threads=n_threads,
                max_step_tokens=max_step_tokens,
            )

        self.backend = opened(model) if isinstance(model, str | Path) else model
        try:
            self.drafter = self._drafter(drafter, opened)
            self.engine = Engine(self.backend, self.drafter, max_seqs=max_seqs, draft_length=draft_length)
        except BaseException:
            if self.backend is not model:
                self.backend.close()
            raise
        # Not re-entrant: garbage collection may run a stream's __del__ in the thread that holds it.
        self._lock = threading.Lock()
        self._inbox: dict[int, deque[StreamChunk]] = {}
        self._abandoned: deque[int] = deque()
        self._closed = False

    def _drafter(self, drafter: str | Drafter, opened: Callable[[str], Backend]) -> Drafter:
        reason = self.backend.info.no_speculation_reason
        if not self.backend.info.can_truncate:
            if drafter != "none":
                warnings.warn(f"speculation is off: {reason}", RuntimeWarning, stacklevel=3)
            return NoDrafter()
        return open_drafter(drafter, self.backend, opened) if isinstance(drafter, str) else drafter

    # --- the three ways to ask ----------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them, each text or token ids; outputs in the order of the prompts.

        params: one for all, or one for each prompt. Raises before anything runs where a prompt or an option
        cannot be honoured; a fault while running ends that request alone (finish_reason "error").
        """
        asked = _as_list(prompts)
        per_prompt = _spread(params, len(asked))
        encoded = _each("prompt", asked, lambda p: (p if isinstance(p, str) else None, self._encode(p)))
        return self._run(encoded, per_prompt)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turn for one conversation, or for each of a list of them."""
        many = not messages or not isinstance(messages[0], Mapping)
        conversations = cast(Seq[Seq[Message]], messages if many else [messages])
        per_prompt = _spread(params, len(conversations))
        return self._run(_each("conversation", conversations, self._encode_chat), per_prompt)

    def stream(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> TokenStream:
        """Iterate over what each step releases, for one prompt or one conversation.

        Leaving the iteration early (or `close()`) cancels the request and frees all it holds.
        """
        text, ids = (
            self._encode_chat(cast(Seq[Message], prompt))
            if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping)
            else (prompt if isinstance(prompt, str) else None, self._encode(cast(Prompt, prompt)))
        )
        return TokenStream(self, self._add(ids, params or SamplingParams(), text))

    def close(self) -> None:
        """Free the models. Idempotent; the LLM cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._fail(BackendError(f"{self.backend.info.model} was closed while the request ran"))
                self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- between callers and the engine -------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.backend.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
            raise InvalidPrompt(f"prompt = {prompt!r}; allowed: a text or a list of token ids")
        return list(prompt)

    def _encode_chat(self, messages: Seq[Message]) -> tuple[str, list[int]]:
        tokenizer = self.backend.tokenizer
        text = tokenizer.apply_chat_template(messages)
        return text, tokenizer.encode(text, parse_special=True)

    def _add(self, ids: Seq[int], params: SamplingParams, text: str | None) -> int:
        with self._lock:
            if self._closed:
                raise InvalidInput(f"this LLM ({self.backend.info.model}) is closed; open a new one")
            self._drop_abandoned()
            request_id = self.engine.add(ids, params, prompt=text)
            self._inbox[request_id] = deque()
            return request_id

    def _run(self, prompts: Seq[tuple[str | None, Seq[int]]], params: Seq[SamplingParams]) -> list[RequestOutput]:
        request_ids: list[int] = []
        outputs: list[RequestOutput] = []
        try:
            asked = list(zip(prompts, params, strict=True))
            # One by one into request_ids, so that a refusal cancels those before it.
            _each("prompt", asked, lambda a: request_ids.append(self._add(a[0][1], a[1], a[0][0])))
            for request_id in request_ids:
                output = None
                while output is None:
                    output = self._next_chunk(request_id).output
                outputs.append(output)
        finally:
            for request_id in request_ids[len(outputs) :]:
                self._cancel(request_id)
        return outputs

    def _next_chunk(self, request_id: int) -> StreamChunk:
        """The request's next chunk; steps the engine, for everybody, until there is one."""
        with self._lock:
            inbox = self._inbox[request_id]
            while not inbox:
                self._drop_abandoned()
                if not self.engine.has_work:
                    raise InvariantError(f"request {request_id} is no longer in the engine")
                self._step()
            chunk = inbox.popleft()
            if chunk.output is not None:
                del self._inbox[request_id]
            return chunk

    def _step(self) -> None:
        try:
            self._deliver(self.engine.step())
        except BaseException as error:
            # An interrupt, or a bug of a backend or of ours: the step is half done, so nobody can go on.
            self._fail(BackendError(f"a step was broken off by {type(error).__name__}: {error}"))
            raise

    def _fail(self, error: PacelineError) -> None:
        self._deliver(self.engine.fail(error))

    def _deliver(self, chunks: Seq[StreamChunk]) -> None:
        for chunk in chunks:
            if chunk.request_id in self._inbox:
                self._inbox[chunk.request_id].append(chunk)

    def _cancel(self, request_id: int) -> None:
        with self._lock:
            self.engine.cancel(request_id)
            self._inbox.pop(request_id, None)

    def _abandon(self, request_id: int) -> None:
        """Cancel as soon as nobody is stepping; called by the garbage collector, at any moment."""
        self._abandoned.append(request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_abandoned()
            finally:
                self._lock.release()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self.engine.cancel(request_id)
            self._inbox.pop(request_id, None)


class TokenStream(Iterator[StreamChunk]):
    """The chunks of one request. The last one carries finish_reason and the whole output."""

    def __init__(self, llm: LLM, request_id: int) -> None:
        self.request_id = request_id
        self._llm: LLM | None = llm

    def __next__(self) -> StreamChunk:
        if self._llm is None:
            raise StopIteration
        chunk = self._llm._next_chunk(self.request_id)
        if chunk.output is not None:
            self._llm = None
        return chunk

    def close(self) -> None:
        """Cancel the request unless it is over. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm._cancel(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm._abandon(self.request_id)


def open_backend(
    model: str | Path,
    backend: str = "auto",
    *,
    max_seqs: int = 16,
    max_len: int | None = None,
    n_threads: int | None = None,
    max_step_tokens: int | None = None,
) -> Backend:
    """Open a model by name or path. backend: "auto", "llamacpp" or "toy".

    Raises ModelNotFound, ModelFormatError, ModelDownloadError, UnsupportedOption.
    """
    if backend not in BACKENDS:
        raise InvalidParams(f"backend = {backend!r}; allowed: {', '.join(BACKENDS)}")
    name = str(model)
    is_toy = name == "toy" or name.startswith("toy:")
    if is_toy != (backend == "toy") and backend != "auto":
        raise InvalidParams(f"backend = {backend!r} cannot run model {name!r}; leave backend at 'auto'")
    if is_toy:
        from .backend.toy import ToyBackend

        seed = name.removeprefix("toy").removeprefix(":")
        if seed and not seed.isdecimal():
            raise InvalidParams(f"model = {name!r}; a toy model is 'toy' or 'toy:SEED' with a whole number")
        return ToyBackend(
            seed=int(seed or 0), max_seqs=max_seqs, max_len=max_len or 4096, max_step_tokens=max_step_tokens or 512
        )
    from .backend.llamacpp import LlamaCppBackend
    from .models import resolve

    return LlamaCppBackend(
        resolve(model), max_seqs=max_seqs, max_len=max_len, n_threads=n_threads, max_step_tokens=max_step_tokens
    )


def _check_sizes(sizes: dict[str, int | None]) -> None:
    for name, value in sizes.items():
        low = 0 if name == "draft_length" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise InvalidParams(f"{name} = {value!r}; allowed: a whole number, {low} or more")


def _each(what: str, items: Seq[Item], work: Callable[[Item], Result]) -> list[Result]:
    """work(item) for each; where there are several, a refusal says which one it was."""
    results = []
    for i, item in enumerate(items):
        try:
            results.append(work(item))
        except (InvalidInput, UnsupportedOption) as error:
            raise type(error)(f"{what} {i}: {error}") if len(items) > 1 else error from None
    return results


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__len__"):
        return [cast(Prompt, prompts)]
    if len(prompts) and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__"):
        return [cast(Seq[int], prompts)]
    return [cast(Prompt, p) for p in prompts]


def _spread(params: SamplingParams | Seq[SamplingParams] | None, n: int) -> list[SamplingParams]:
    each = [params or SamplingParams()] * n if params is None or isinstance(params, SamplingParams) else list(params)
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidParams(f"params = {one!r}; allowed: SamplingParams, one or one for each prompt")
    if len(each) != n:
        raise InvalidParams(f"{len(each)} params for {n} prompts; give one, or one for each prompt")
    return each
