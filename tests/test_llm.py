"""The offline face, on the toy model: what callers may pass, what they get, and what is freed when they leave."""

from __future__ import annotations

import gc
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, PacelineError, SamplingParams
from paceline.backend.toy import ToyBackend
from paceline.draft import LookupDrafter, ModelDrafter, NoDrafter
from paceline.errors import (
    BackendError,
    InvalidInput,
    InvalidParams,
    InvalidPrompt,
    InvariantError,
    ModelNotFound,
    UnsupportedOption,
    VocabularyMismatch,
)
from paceline.opening import LACKS
from paceline.types import Segment


@pytest.fixture
def llm() -> LLM:
    return LLM("toy")


def in_use(llm: LLM) -> int:
    return llm.backend.slots_in_use  # type: ignore[attr-defined,no-any-return]


SHORT = SamplingParams(max_tokens=12, seed=3)


def test_one_prompt_or_many_as_text_or_ids(llm: LLM) -> None:
    text = llm.generate("abc", SHORT)
    ids = llm.backend.tokenizer.encode("abc")
    assert [o.outputs[0].token_ids for o in llm.generate(ids, SHORT)] == [text[0].outputs[0].token_ids]
    assert text[0].prompt == "abc"
    assert text[0].prompt_token_ids == tuple(ids)
    many = llm.generate(["abc", ids, "xyz"], [SHORT, SHORT, SamplingParams(max_tokens=3)])
    assert many[0].outputs[0].text == many[1].outputs[0].text == text[0].outputs[0].text
    assert many[1].prompt is None
    assert len(many[2].outputs[0].token_ids) == 3
    assert llm.generate([], SHORT) == []
    assert len(llm.generate(["a"] * 40, SamplingParams(max_tokens=3))) == 40


def test_chat_one_or_many(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    one = llm.chat(talk, SHORT)
    assert one[0].prompt == "user: hi\nassistant: "
    assert [o.outputs[0].text for o in llm.chat([talk, talk], SHORT)] == [one[0].outputs[0].text] * 2
    assert llm.chat([], SHORT) == []


def test_stream_joined_is_generate(llm: LLM) -> None:
    whole = llm.generate("abc", SHORT)[0].outputs[0]
    chunks = list(llm.stream("abc", SHORT))
    assert "".join(c.text for c in chunks) == whole.text
    assert chunks[-1].output is not None
    assert chunks[-1].output.outputs[0] == whole
    talk = list(llm.stream([{"role": "user", "content": "hi"}], SHORT))
    assert "".join(c.text for c in talk) == llm.chat([{"role": "user", "content": "hi"}], SHORT)[0].outputs[0].text


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    with llm.stream("abc", params) as stream:
        next(stream)
        assert in_use(llm) == 1
    assert in_use(llm) == 0
    for _ in llm.stream("abc", params):
        break
    gc.collect()
    assert in_use(llm) == 0
    never_started = llm.stream("abc", params)
    del never_started
    gc.collect()
    assert not llm.engine.has_work
    closed = llm.stream("abc", params)
    closed.close()
    closed.close()
    assert list(closed) == []


def test_a_stream_and_a_generate_interleave(llm: LLM) -> None:
    """Chunks of somebody else's request wait for their reader."""
    expected = [c.text for c in llm.stream("abc", SHORT)]
    stream = llm.stream("abc", SHORT)
    got = [next(stream).text]
    llm.generate(["q", "r"], SamplingParams(max_tokens=30))
    got += [c.text for c in stream]
    assert got == expected


def test_threads_share_one_llm(llm: LLM) -> None:
    expected = {i: llm.generate("abc", SamplingParams(max_tokens=40, seed=i))[0].outputs[0].token_ids for i in range(6)}
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        got[i] = llm.generate("abc", SamplingParams(max_tokens=40, seed=i))[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    assert in_use(llm) == 0


def test_one_bad_prompt_refuses_the_call_and_frees_the_others(llm: LLM) -> None:
    with pytest.raises(InvalidPrompt, match="prompt 1: prompt token 0 is 999"):
        llm.generate([[1, 2], [999]], SHORT)
    assert not llm.engine.has_work
    with pytest.raises(UnsupportedOption, match=r"prompt 1: .*uniqueItems"):
        llm.generate(["a", "b"], [SHORT, SamplingParams(grammar={"json_schema": {"uniqueItems": True}})])
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "no tokens"),
        (5, None, "prompt = 5"),
        (b"abc", None, "prompt = b'abc'"),
        ([1, "a"], None, "prompt token 1 is 'a'"),
        (["a", None], None, "prompt 1"),
        (["a"], [SHORT, SHORT], "2 params for 1 prompts"),
        ("a", {"seed": 1}, "params"),
        ("a", 5, "params = 5"),
        ("a", "", "params = ''"),
        ({1: 2}, None, "prompt = "),
        ({1}, None, "prompt"),
        ("\ud800", None, "lone surrogate"),
    ],
)
def test_bad_calls_are_typed_errors(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "messages", ["hi", None, 1, {1: 2}, [{"role": "user"}], [{"content": "x"}], [5], [[{"role": 1, "content": 2}]]]
)
def test_bad_conversations_are_typed_errors(llm: LLM, messages: Any) -> None:
    with pytest.raises(PacelineError):
        llm.chat(messages, SHORT)


def test_options_of_llm() -> None:
    with pytest.raises(TypeError, match="drafer"):
        LLM("toy", drafer="lookup")  # type: ignore[call-arg]
    with pytest.raises(InvalidParams, match="backend = 'vllm'"):
        LLM("toy", backend="vllm")
    with pytest.raises(InvalidParams, match="cannot run model"):
        LLM("toy", backend="llamacpp")
    with pytest.raises(InvalidParams, match="toy:x"):
        LLM("toy:x")
    with pytest.raises(InvalidParams, match="drafter = 'lokup'"):
        LLM("toy", drafter="lokup")
    with pytest.raises(ModelNotFound, match="no/such"):
        LLM("no/such.gguf")
    assert LLM("toy").drafter.name == "forced+lookup"
    assert isinstance(LLM("toy", drafter="lookup").drafter, LookupDrafter)
    assert isinstance(LLM("toy", drafter="none").drafter, NoDrafter)
    assert LLM("toy", max_len=50, max_seqs=2).backend.info.max_len == 50


@pytest.mark.parametrize(
    "option",
    [
        {"max_seqs": 0}, {"max_len": -1}, {"draft_length": -1}, {"n_threads": 1.5}, {"max_seqs": True},
        {"kv_tokens": 0}, {"page_size": 0}, {"page_size": "16"}, {"prefix_cache": 1}, {"prefix_cache": "yes"},
        {"compile": 0}, {"dtype": 16}, {"device": 0},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_named(option: dict[str, Any]) -> None:
    (name, value), *_ = option.items()
    with pytest.raises(InvalidParams, match=f"{name} = {value!r}"):
        LLM("toy", **option)


@pytest.mark.parametrize("backend, model", [("toy", "toy"), ("llamacpp", "no/such.gguf")])
def test_an_option_that_a_backend_lacks_is_refused_with_the_reason(backend: str, model: str) -> None:
    """Catches an option that is dropped without a word; and one that is refused only after the model was read."""
    values = {
        "dtype": "bfloat16",
        "device": "cpu",
        "page_size": 8,
        "prefix_cache": True,
        "compile": True,
        "n_threads": 1,
    }
    for name, reason in LACKS[backend].items():
        with pytest.raises(UnsupportedOption, match=f"{name} = .* is not an option of backend '{backend}': {reason}"):
            LLM(model, **{name: values[name]})  # type: ignore[arg-type]


def test_the_size_of_the_memory_can_be_chosen() -> None:
    llm = LLM("toy", max_len=64, kv_tokens=96, max_seqs=8, drafter="model:toy:1")
    assert llm.backend.info.kv_tokens == 96
    assert llm.drafter.backend.info.kv_tokens == 96  # type: ignore[attr-defined]
    outputs = llm.generate([[1, 2, i] for i in range(6)], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [40] * 6
    assert sum(o.num_preemptions for o in outputs) > 0


def test_doing_without_is_what_backends_without_do() -> None:
    assert LLM("toy", compile=False).backend.info.name == "toy"
    with pytest.raises(ModelNotFound):
        LLM("no/such.gguf", compile=False, prefix_cache=False)


def test_pages_of_a_toy_are_its_own_option() -> None:
    assert LLM("toy", page_size=8).backend.info.page_size == 8
    assert LLM("toy").backend.info.page_size == 16
    prompt = list(range(40))
    for shared, held in ((True, 32), (False, 0)):
        backend = LLM("toy", prefix_cache=shared, max_seqs=2).backend
        slot = backend.acquire(prompt)
        backend.forward([Segment(slot, tuple(prompt), 0, 0)])
        backend.commit(slot, 40)
        assert backend.length(backend.acquire(prompt)) == held


def opened_with(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Which backends an LLM makes, and with which keywords; all of them are toys in truth."""
    made: list[tuple[str, dict[str, Any]]] = []

    def maker(kind: str) -> Any:
        def make(*_: Any, max_seqs: int = 16, max_len: int = 99, **more: Any) -> ToyBackend:
            made.append((kind, more))
            return ToyBackend(max_seqs=max_seqs, max_len=max_len)

        return make

    modules = {"hf": ("paceline.backend.hf", "HFBackend"), "llamacpp": ("paceline.backend.llamacpp", "LlamaCppBackend")}
    for kind, (module, name) in modules.items():
        fake = types.ModuleType(module)
        setattr(fake, name, maker(kind))
        monkeypatch.setitem(sys.modules, module, fake)
    for name in ("resolve", "resolve_weights"):
        monkeypatch.setattr(f"paceline.opening.{name}", lambda model, progress: model)
    LLM(*arguments, **options).close()
    return made


HF_OPTIONS = {"dtype": "float32", "device": "cpu", "page_size": 8, "prefix_cache": False, "compile": True}


def test_the_backend_that_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for model, kind in (("smollm2", "llamacpp"), ("x.gguf", "llamacpp"), ("owner/name", "hf"), (tmp_path, "hf")):
        assert [k for k, _ in opened_with(monkeypatch, model)] == [kind]
    assert [k for k, _ in opened_with(monkeypatch, "smollm2", backend="hf")] == ["hf"]
    assert [k for k, _ in opened_with(monkeypatch, "owner/name", backend="llamacpp")] == ["llamacpp"]


def test_options_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    ((kind, got),) = opened_with(monkeypatch, "owner/name", n_threads=2, max_step_tokens=64, **HF_OPTIONS)
    assert kind == "hf"
    assert got.pop("progress") is None
    assert got == {"clip_max_len": False, "n_threads": 2, "max_step_tokens": 64, **HF_OPTIONS}


def test_a_draft_model_takes_the_options_that_its_backend_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft model that is refused for the target's options, and one that costs a minute of compiling."""
    made = opened_with(monkeypatch, "owner/name", drafter="model:x.gguf", n_threads=2, **HF_OPTIONS)
    assert [kind for kind, _ in made] == ["hf", "llamacpp"]
    assert made[1][1] == {"clip_max_len": True, "progress": None, "n_threads": 2}
    made = opened_with(monkeypatch, "owner/name", drafter="model:owner/small", **HF_OPTIONS)
    assert [kind for kind, _ in made] == ["hf", "hf"]
    kept = {name: value for name, value in HF_OPTIONS.items() if name != "compile"}
    assert made[1][1] == {"clip_max_len": True, "progress": None, **kept}
    assert made[0][1]["compile"] is True


def test_a_draft_model_of_the_same_vocabulary() -> None:
    llm = LLM("toy:4", drafter="model:toy:4")
    out = llm.generate("abc", SamplingParams(max_tokens=20, temperature=0))[0]
    assert out.speculation.accepted == out.speculation.drafted > 0
    with pytest.raises(VocabularyMismatch):
        LLM(ToyBackend(vocab_size=40), drafter="model:toy")


def test_a_model_that_cannot_roll_back_says_so() -> None:
    backend = ToyBackend(can_truncate=False)
    with pytest.warns(RuntimeWarning, match="speculation is off: this toy was built without rollback"):
        llm = LLM(backend, drafter="lookup")
    assert llm.generate("abcabcabc", SamplingParams(max_tokens=20))[0].speculation.drafted == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(ToyBackend(can_truncate=False), drafter="none")


def test_paths_are_models_too(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(PacelineError, match=r"m\.gguf"):
        LLM(file)


def test_close_is_idempotent() -> None:
    with LLM("toy") as llm:
        llm.generate("a", SHORT)
    llm.close()


def test_a_stream_collected_within_a_step_touches_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs __del__ at any moment, also inside the step of somebody else's request."""
    expected = llm.generate("xyz", SHORT)[0].outputs[0].token_ids
    streams = [llm.stream("abc", SamplingParams(max_tokens=500, ignore_eos=True))]
    next(streams[0])
    forward = llm.backend.forward

    def collecting(batch: Any) -> Any:
        streams.clear()
        gc.collect()
        rows = forward(batch)
        gc.collect()
        return rows

    monkeypatch.setattr(llm.backend, "forward", collecting)
    assert llm.generate("xyz", SHORT)[0].outputs[0].token_ids == expected
    llm.generate("xyz", SHORT)
    assert in_use(llm) == 0


def test_a_request_that_vanished_is_an_error_not_a_hang(llm: LLM) -> None:
    stream = llm.stream("abc", SHORT)
    llm.engine.cancel(stream.request_id)
    with pytest.raises(InvariantError, match=f"request {stream.request_id}"):
        next(stream)


def test_two_llms_on_one_backend_end_with_typed_errors() -> None:
    """What one LLM holds the other cannot have; nobody hangs and nothing leaks."""
    backend = ToyBackend(max_seqs=1)
    a, b = LLM(backend), LLM(backend)
    stream = a.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    out = b.generate("abc", SHORT)[0].outputs[0]
    assert isinstance(out.error, BackendError)
    stream.close()
    assert b.generate("abc", SHORT)[0].outputs[0].finish_reason == "length"
    assert backend.slots_in_use == 0


def test_an_interrupted_step_leaves_a_usable_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.stream("abc", SamplingParams(max_tokens=500, ignore_eos=True))
    next(other)
    forward = llm.backend.forward

    def interrupted(batch: Any) -> Any:
        forward(batch)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.backend, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("xyz", SHORT)
    last = list(other)[-1]
    assert last.finish_reason == "error"
    assert last.output is not None
    assert "KeyboardInterrupt" in str(last.output.outputs[0].error)
    assert in_use(llm) == 0
    assert llm.generate("xyz", SHORT)[0].outputs[0].finish_reason == "length"


def test_closing_ends_what_is_open(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    llm.close()
    last = list(stream)[-1]
    assert last.output is not None
    assert "was closed" in str(last.output.outputs[0].error)
    with pytest.raises(InvalidInput, match="is closed"):
        llm.generate("abc", SHORT)


class Closing(ToyBackend):
    """Remembers whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_only_what_was_opened_here_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Closing()
    opened: list[Closing] = []

    def open_one(*_: Any, **sizes: Any) -> Closing:
        opened.append(Closing(max_step_tokens=512))
        return opened[-1]

    monkeypatch.setattr("paceline.llm.open_backend", open_one)
    with LLM(mine, drafter="model:any"):
        pass
    assert not mine.closed
    assert [b.closed for b in opened] == [True]
    with pytest.raises(InvalidParams, match="max_seqs = 99"):
        LLM("any", drafter="model:any", max_seqs=99)
    assert [b.closed for b in opened] == [True] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_len": 7},
        {"n_threads": 3},
        {"max_step_tokens": 64},
        {"backend": "toy"},
        {"dtype": "float32"},
        {"compile": True},
    ],
    ids=lambda o: next(iter(o)),
)
def test_an_open_backend_is_as_it_is(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match=next(iter(options))):
        LLM(ToyBackend(), **options)
    assert LLM(ToyBackend(max_seqs=4)).engine.max_seqs == 4
    assert LLM(ToyBackend(max_seqs=4), max_seqs=2).engine.max_seqs == 2


def test_what_is_neither_model_nor_drafter() -> None:
    with pytest.raises(InvalidParams, match="model = 5"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="drafter = None"):
        LLM("toy", drafter=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="lokup"), warnings.catch_warnings():
        LLM(ToyBackend(can_truncate=False), drafter="lokup")
    with pytest.raises(UnsupportedOption, match="n_threads = 3"):
        LLM("toy", n_threads=3)
    with pytest.raises(InvalidParams, match="params = 0"):
        LLM("toy").stream("a", 0)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound):
        LLM("x" * 5000)
    with pytest.raises(InvalidPrompt, match="prompt = 5"):
        LLM("toy").stream(5)  # type: ignore[arg-type]


def test_a_draft_model_with_a_shorter_context_stops_drafting_there() -> None:
    """exllamav2#274, vllm#42533: past its own context the drafter proposes nothing, and nothing breaks."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    plain = LLM("toy").generate("abc", params)[0].outputs[0].token_ids
    target = ToyBackend()
    drafter = ModelDrafter(ToyBackend(max_len=20, kv_tokens=40), "model:small", target)
    llm = LLM(target, drafter=drafter)
    for out in llm.generate(["abc"] * 6, params):
        assert out.outputs[0].finish_reason == "length"
        assert out.outputs[0].token_ids == plain
    assert out.speculation.drafted > 0
    drafter.check()


def test_an_llm_that_was_handed_over_says_so() -> None:
    llm = LLM("toy")
    with llm.hand_over():
        with pytest.raises(InvalidInput, match="was handed over, to an AsyncEngine perhaps; ask there"):
            llm.generate("abc")
        with pytest.raises(InvalidParams, match="which was handed over"):
            llm.hand_over()
        llm.close()


def test_a_dtype_of_pytorch_is_as_good_as_its_name() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedOption, match="dtype = 'bfloat16' is not an option of backend 'toy'"):
        LLM("toy", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedOption, match="device = 'cuda:1' is not an option of backend 'toy'"):
        LLM("toy", device=torch.device("cuda:1"))
