"""LLM: the offline face. Text in, text out; everything else happens in the engine."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from .draft import NoDrafter, open_drafter, parse_drafter
from .engine import Engine
from .errors import (
    BackendError,
    InvalidInput,
    InvalidParams,
    InvalidPrompt,
    InvariantError,
    PacelineError,
    UnsupportedOption,
    shown,
)
from .models import Progress
from .opening import LACKS, Options, checked_options, chosen_backend, cost_table, open_backend
from .params import SamplingParams, integer
from .sampling import spelled, warm_up
from .schedule import Controller
from .types import Backend, Drafter, Logprobs, RequestOutput, Score, StreamChunk, Tokenizer

Prompt = str | Seq[int]
Message = Mapping[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")
Closable = TypeVar("Closable", Backend, Drafter)


class LLM:
    """A target model with a drafter, ready to generate.

    model: a name (`paceline models list`), the path of a GGUF file or of a Hugging Face folder, a hub id "owner/name",
    "toy" or "toy:SEED"; or an open Backend, which one LLM at a time may use.
    drafter: "auto" (forced+lookup), "none", "lookup", "model:NAME" where NAME is what `model` may be, "forced" (what a
    grammar leaves no choice about), "forced+lookup", "forced+model:NAME", "auto:NAME" (forced+lookup or
    forced+model:NAME, for each request in each step); or a Drafter.
    draft_length: drafts per step where a request does not say; by default the engine decides in every step, by what a
    forward costs on this machine and how good the drafts have been. measure: whether that cost is measured when the
    model is opened, for two seconds, once for a model and machine; without it draft_length is 4.
    max_seqs: requests at once, by default 16.
    max_len: tokens of one sequence, prompt and output. n_threads: default one per physical core (hf: what
    PyTorch is set to; a setting of the whole process).
    max_step_tokens: tokens of one forward; prompts are read in chunks of half of it.
    kv_tokens: tokens that the memory for keys and values holds, all requests together, shared ones counted once; by
    default four times max_len (toy: max_seqs times). Where it runs out, requests wait or are computed anew later.
    backend: "auto" (llamacpp for names and GGUF files, hf for folders and hub ids), "llamacpp", "hf" or "toy". Those
    that lack an option of the following refuse it. dtype: "float64", "float32", "bfloat16" or "float16"; by default
    what the model says, bfloat16 for a GGUF (hf). device: of PyTorch, by default "cpu" even where there is a GPU (hf).
    page_size: tokens per page of KV memory, by default 16; prefix_cache: whether requests with the same beginning share
    its pages, by default they do (hf, toy). compile: compile the target's forward, which takes a minute (hf).
    progress(description, done, total) follows fetching, loading and compiling, in bytes; total may be None.

    Safe to use from several threads: one of them steps the engine at a time.
    """

    def __init__(
        self,
        model: str | Path | Backend,
        *,
        drafter: str | Drafter = "auto",
        backend: str = "auto",
        draft_length: int | None = None,
        max_seqs: int | None = None,
        max_len: int | None = None,
        n_threads: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_step_tokens: int | None = None,
        kv_tokens: int | None = None,
        page_size: int | None = None,
        prefix_cache: bool | None = None,
        compile: bool | None = None,  # noqa: A002 - the word users know from PyTorch
        measure: bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        given = checked_options(
            max_seqs=max_seqs,
            max_len=max_len,
            n_threads=n_threads,
            max_step_tokens=max_step_tokens,
            kv_tokens=kv_tokens,
            page_size=page_size,
            dtype=dtype,
            device=device,
            prefix_cache=prefix_cache,
            compile=compile,
        )
        if draft_length is not None:
            draft_length = integer("draft_length", draft_length, 0)
        self._owned = ExitStack()
        try:
            self.backend = self._open_model(model, backend, given, progress)
            self.drafter = self._open_drafter(drafter, backend, given, progress)
            warm_up(progress)
            adaptive = draft_length is None and self.drafter.name != NoDrafter.name and self._measures(measure)
            self.engine = Engine(
                self.backend,
                self.drafter,
                max_seqs=given.get("max_seqs"),
                draft_length=draft_length,
                controller=Controller(cost_table(self.backend, progress)) if adaptive else None,
            )
        except BaseException:
            self._owned.close()
            raise
        # Not re-entrant: garbage collection may run a stream's __del__ in the thread that holds it.
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that has the lock
        self._inbox: dict[int, deque[StreamChunk]] = {}
        self._abandoned: deque[int] = deque()
        self._over = ""  # why it takes no more requests

    def _measures(self, measure: bool | None) -> bool:
        """Whether the cost of a step is to be measured. What a toy's forward costs means nothing."""
        if measure is not None and not isinstance(measure, bool):
            raise InvalidParams(f"measure = {measure!r}; allowed: True or False")
        return self.backend.info.name != "toy" if measure is None else measure

    def _open_model(
        self, model: str | Path | Backend, backend: str, options: Options, progress: Progress | None
    ) -> Backend:
        if isinstance(model, str | Path):
            return self._own(open_backend(model, backend, progress=progress, **options))
        if not isinstance(model, Backend):
            raise InvalidParams(f"model = {model!r}; allowed: a name, a path, or an open Backend")
        settled = [name for name in options if name != "max_seqs"] + (["backend"] if backend != "auto" else [])
        if settled:
            raise InvalidParams(f"{settled[0]} cannot be chosen for {model.info.model}, which is open already")
        return model

    def _open_drafter(
        self, drafter: str | Drafter, backend: str, options: Options, progress: Progress | None
    ) -> Drafter:
        if isinstance(drafter, str):
            parse_drafter(drafter)
        elif isinstance(drafter, type) or not isinstance(drafter, Drafter):
            lacks = [name for name in ("name", "propose", "observe", "release", "close") if not hasattr(drafter, name)]
            why = "it is a class, pass an instance" if isinstance(drafter, type) else f"it lacks {', '.join(lacks)}"
            raise InvalidParams(f"drafter = {drafter!r}; allowed: a name, or a Drafter, and {why}")
        info = self.backend.info
        if not info.can_truncate:
            if drafter != "none":
                warnings.warn(f"speculation is off: {info.no_speculation_reason}", RuntimeWarning, stacklevel=3)
            return NoDrafter()
        if not isinstance(drafter, str):
            return drafter
        # A draft model may have a shorter context than the target; it stops drafting where that ends. It may run on
        # another backend, without some of the options. It is not compiled: that is a minute more for a small model.
        rest = {name: value for name, value in options.items() if name != "compile"}
        rest |= {"max_seqs": info.max_slots, "max_len": info.max_len}

        def open_one(name: str) -> Backend:
            lacks = LACKS[chosen_backend(name, backend)]
            had = cast(Options, {option: value for option, value in rest.items() if option not in lacks})
            return open_backend(name, backend, clip_max_len=True, progress=progress, **had)

        return self._own(open_drafter(drafter, self.backend, open_one))

    def _own(self, thing: Closable) -> Closable:
        """`thing`, to be closed with this LLM; what callers opened themselves stays theirs."""
        self._owned.callback(thing.close)
        return thing

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.backend.tokenizer

    # --- the ways to ask --------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them, each text or token ids; outputs in the order of the prompts.

        The text is taken as it is, without a chat template; see chat().

        params: one for all, or one for each prompt. Raises before anything runs where a prompt or an option
        cannot be honoured; a fault while running ends that request alone (finish_reason "error").
        """
        asked = _as_list(prompts)
        per_prompt = spread(params, len(asked))
        return self._run(_each("prompt", asked, self._encode), per_prompt)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turn for one conversation, or for each of a list of them."""
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Seq):
            raise InvalidInput(f"messages = {shown(messages)}; allowed: a list of messages, or a list of such lists")
        many = not messages or not isinstance(messages[0], Mapping)
        conversations = cast(Seq[Seq[Message]], messages if many else [messages])
        per_prompt = spread(params, len(conversations))
        return self._run(_each("conversation", conversations, self._encode_chat), per_prompt)

    def stream(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> TokenStream:
        """Iterate over what each step releases, for one prompt or one conversation.

        Leaving the iteration early (or `close()`) cancels the request and frees all it holds. A fault while
        running ends the stream with finish_reason "error"; the last chunk's output says which.
        """
        text, ids = self.encode(prompt)
        return TokenStream(self, self._add(ids, spread(params, 1)[0], text))

    def score(self, prompts: Prompt | Seq[Prompt], continuations: Prompt | Seq[Prompt]) -> list[Score]:
        """How likely the model finds each continuation behind its prompt, token by token.

        Raw logprobs: of the model's logits as they are, whatever anybody's sampling options. A continuation that is
        text is tokenised on its own, as the bytes that follow the prompt. The prompt has at least one token, and both
        together need room for one more.
        """
        before, behind = _as_list(prompts), _as_list(continuations)
        if len(before) != len(behind):
            raise InvalidInput(f"{len(before)} prompts for {len(behind)} continuations; give one for each")
        asked = _each("pair", list(zip(before, behind, strict=True)), self._encode_pair)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self._run([(None, [*prompt, *rest]) for prompt, rest in asked], [params] * len(asked))
        return [_score(output, len(prompt)) for output, (prompt, _) in zip(outputs, asked, strict=True)]

    def encode(self, prompt: Prompt | Seq[Message]) -> tuple[str | None, Seq[int]]:
        """Text and token ids of a prompt, or of a conversation by the model's chat template; no text where ids came."""
        if isinstance(prompt, Seq) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self._encode_chat(cast(Seq[Message], prompt))
        return self._encode(cast(Prompt, prompt))

    def hand_over(self) -> ExitStack:
        """Leave engine and models to somebody else, who closes them with what this returns.

        From now on this LLM refuses calls, and closing it does nothing. Raises InvalidParams where it is closed or has
        requests in flight.
        """
        with self._alone():
            self._drop_abandoned()
            if self._over or self.engine.has_work:
                state = self._over.partition(";")[0] or "has requests in flight"
                raise InvalidParams(
                    f"model = LLM({self.backend.info.model}), which {state}; allowed: an open one without requests"
                )
            self._over = "was handed over, to an AsyncEngine perhaps; ask there"
            return self._owned

    def close(self) -> None:
        """Free the models. Idempotent; the LLM cannot be used afterwards."""
        with self._alone():
            if not self._over:
                self._over = "is closed; open a new one"
                self._fail(BackendError(f"{self.backend.info.model} was closed while the request ran"))
                self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- between callers and the engine -------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> tuple[str | None, Seq[int]]:
        if isinstance(prompt, str):
            return prompt, self.backend.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__") or not hasattr(prompt, "__len__"):
            raise InvalidPrompt(f"prompt = {shown(prompt)}; allowed: a text or a list of token ids")
        return None, list(prompt)

    def _encode_pair(self, pair: tuple[Prompt, Prompt]) -> tuple[Seq[int], Seq[int]]:
        prompt = self._encode(pair[0])[1]
        if not prompt:
            raise InvalidPrompt(
                f"prompt = {shown(pair[0])} has no tokens; a continuation is scored behind at least one"
            )
        return prompt, self._encode_bare(pair[1])

    def _encode_bare(self, continuation: Prompt) -> Seq[int]:
        """Token ids of a text that stands behind another: nothing is put in front of it."""
        if not isinstance(continuation, str):
            ids: Seq[int] | None = self._encode(continuation)[1]
        else:
            ids = spelled(self.backend.tokenizer, continuation)
        if not ids:
            why = "has no tokens; give at least one" if ids is not None else "cannot be written in this vocabulary"
            raise InvalidPrompt(f"continuation = {shown(continuation)} {why}")
        return ids

    def _encode_chat(self, messages: Seq[Message]) -> tuple[str, list[int]]:
        tokenizer = self.backend.tokenizer
        text = tokenizer.apply_chat_template(messages)
        return text, tokenizer.encode(text, parse_special=True)

    def _add(self, ids: Seq[int], params: SamplingParams, text: str | None) -> int:
        # Compiling may take a second, which no step should wait for.
        grammar = self.engine.grammars.compile(params.grammar) if params.grammar is not None else None
        with self._alone():
            if self._over:
                raise InvalidInput(f"this LLM ({self.backend.info.model}) {self._over}")
            self._drop_abandoned()
            request_id = self.engine.add(ids, params, prompt=text, grammar=grammar)
            self._inbox[request_id] = deque()
            return request_id

    def _run(self, prompts: Seq[tuple[str | None, Seq[int]]], params: Seq[SamplingParams]) -> list[RequestOutput]:
        request_ids: list[int] = []
        outputs: list[RequestOutput] = []
        try:
            asked = list(zip(prompts, params, strict=True))
            # Into request_ids one by one, so that a refusal cancels those before it.
            _each("prompt", asked, lambda one: request_ids.append(self._add(one[0][1], one[1], one[0][0])))
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
        with self._alone():
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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock. A processor or drafter that asks its own LLM, which is in a step, would wait for ever."""
        if self._holder == threading.get_ident():
            raise InvalidInput(f"this LLM ({self.backend.info.model}) was called from within one of its own steps")
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

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
        with self._alone():
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

    _llm: LLM | None = None

    def __init__(self, llm: LLM, request_id: int) -> None:
        self.request_id = request_id
        self._llm = llm

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


def _each(what: str, items: Seq[Item], work: Callable[[Item], Result]) -> list[Result]:
    """work(item) for each; where there are several, a refusal says which one it was."""
    results = []
    for i, item in enumerate(items):
        try:
            results.append(work(item))
        except (InvalidInput, UnsupportedOption) as error:
            raise type(error)(f"{what} {i}: {error}") if len(items) > 1 else error from None
    return results


def _score(output: RequestOutput, start: int) -> Score:
    """The part of a scored prompt from token `start` on."""
    error = output.outputs[0].error
    if output.prompt_logprobs is None:
        raise error or InvariantError(f"request {output.request_id} ended before its prompt was scored")
    ids = output.prompt_token_ids[start:]
    rows = cast(Seq[Logprobs], output.prompt_logprobs[start:])
    return Score(ids, tuple(row[token].logprob for token, row in zip(ids, rows, strict=True)))


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__getitem__"):
        return [cast(Prompt, prompts)]
    if len(prompts) and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__"):
        return [cast(Seq[int], prompts)]
    return [cast(Prompt, p) for p in prompts]


def spread(params: SamplingParams | Seq[SamplingParams] | None, n: int) -> list[SamplingParams]:
    """Checked params for each of n prompts, from one for all, one for each, or None for the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    each = list(params) if isinstance(params, Seq) and not isinstance(params, str | bytes) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidParams(f"params = {shown(one)}; allowed: SamplingParams, one or one for each prompt")
    if len(each) != n:
        raise InvalidParams(f"{len(each)} params for {n} prompts; give one, or one for each prompt")
    return each
