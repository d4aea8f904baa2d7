"""The attention function and its operation, beside the formula; what it refuses; what a load refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paceline.backend.hf import HFBackend  # noqa: E402
from paceline.backend.hf import attention as module  # noqa: E402
from paceline.backend.hf.attention import NAME, attention  # noqa: E402
from paceline.backend.hf.pools import Pools  # noqa: E402
from paceline.backend.hf.step import Part, Step, current_step  # noqa: E402
from paceline.backend.trees import depths  # noqa: E402
from paceline.errors import BackendError, InvalidParams, ModelFormatError, UnsupportedOption  # noqa: E402
from paceline.types import Segment  # noqa: E402

from .models import apart, build, contents, opened, reference, tokens  # noqa: E402

SIZE = 4
TREE = (-1, -1, 0, 2, 3, 4, 1, 6)


class Layer(torch.nn.Module):
    layer_idx = 0


def formula(q: Any, keys: Any, values: Any, visible: Any, scale: float, softcap: float, sink: float | None) -> Any:
    """One query [D] over keys [L, D] and values [L, Dv]."""
    scores = keys @ q * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.where(visible, np.exp(scores), 0.0)
    return weights @ values / (weights.sum() + (0.0 if sink is None else math.exp(sink)))


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_the_operation_beside_the_formula(
    window: int | None, softcap: float | None, sinks: bool, scale: float | None
) -> None:
    """Chains, a tree, single tokens and a wide prefill in one step, pages in and out of order, 4 query heads on 2 key
    heads, values wider than keys; several steps, so that keys come from earlier ones.

    Catches a scale, cap, sink or window in the wrong place, and rows, heads or pages in the wrong order.
    """
    rng = np.random.default_rng(0)
    heads, groups, D, Dv = 2, 2, 5, 7
    pools = Pools(64, SIZE, torch.device("cpu"))
    tables = [list(range(20)), [63, 40, 41, 22, 30, 50, 51], [60, 59, 58, 57, 56], [33, 32, 34, 36, 35]]
    history: list[list[tuple[Any, Any]]] = [[] for _ in tables]
    s_aux = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if sinks else None
    used = 1 / math.sqrt(D) if scale is None else scale
    for widths in ((50, 6, 1, 3), (1, 1, 1, 1), (3, 8, 2, 1)):
        parts, at = [], 0
        for i, n in enumerate(widths):
            tree = depths(TREE) if n == len(TREE) else (None, None)
            parts.append(Part(at, n, len(history[i]), tables[i], *tree))
            at += n
        q, k = rng.normal(size=(heads * groups, at, D)), rng.normal(size=(heads, at, D))
        v = rng.normal(size=(heads, at, Dv))
        token = current_step.set(Step(parts, pools))
        try:
            out, nothing = attention(
                Layer(), *(torch.from_numpy(x[None]) for x in (q, k, v)), None,
                scaling=scale, sliding_window=window, softcap=softcap, s_aux=s_aux, position_ids=object(), dropout=0.0,
            )  # fmt: skip
        finally:
            current_step.reset(token)
        assert nothing is None
        assert out.is_contiguous()
        assert tuple(out.shape) == (1, at, heads * groups, Dv)
        for i, part in enumerate(parts):
            rows = range(part.at, part.at + part.count)
            past = history[i]
            keys = np.stack([*(key for key, _ in past), *(k[:, row] for row in rows)])
            values = np.stack([*(value for _, value in past), *(v[:, row] for row in rows)])
            depth = range(part.count) if part.depths is None else part.depths.tolist()
            places = np.array([*range(part.start), *(part.start + d for d in depth)])
            for j, row in enumerate(rows):
                sees = [True] * part.start + [
                    (other <= j) if part.sees is None else bool(part.sees[j, other]) for other in range(part.count)
                ]
                visible = np.array(sees) & (places[part.start + j] - places < (window or 10**9))
                for head in range(heads * groups):
                    sink = None if s_aux is None else float(s_aux[head])
                    kv = head // groups
                    wanted = formula(q[head, row], keys[:, kv], values[:, kv], visible, used, softcap or 0.0, sink)
                    assert np.abs(out[0, row, head].numpy() - wanted).max() < 1e-12
            if part.sees is None:
                past += [(k[:, row], v[:, row]) for row in rows]


def test_ancestors_and_depths() -> None:
    depth, sees = depths(TREE)
    assert depth.tolist() == [0, 0, 1, 2, 3, 4, 1, 2]
    assert [np.flatnonzero(row).tolist() for row in sees] == [
        [0], [1], [0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 4, 5], [1, 6], [1, 6, 7],
    ]  # fmt: skip


# --- what is refused --------------------------------------------------------------------------------


def call(**options: Any) -> Any:
    x = torch.zeros(1, 2, 3, 4)
    token = current_step.set(Step([Part(0, 3, 0, [0])], Pools(1, SIZE, torch.device("cpu"))))
    try:
        return attention(Layer(), x, x, x, options.pop("attention_mask", None), **options)
    finally:
        current_step.reset(token)


@pytest.mark.parametrize(
    "options",
    [
        {"position_bias": torch.zeros(1)},
        {"alibi": 1},
        {"dropout": 0.1},
        {"is_causal": False},
        {"output_attentions": True},
        {"chunk_size": 4},
    ],
)
def test_an_unknown_keyword_is_refused(options: dict[str, Any]) -> None:
    """Swallowing them is how wrong logits come about: TensorRT-LLM#11125, where a mask did not reach attention."""
    with pytest.raises(UnsupportedOption, match=f"Layer passes {next(iter(options))} = "):
        call(**options)


def test_a_mask_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="brings its own attention mask"):
        call(attention_mask=torch.zeros(1, 1, 3, 3))


def test_bidirectional_attention_is_refused() -> None:
    layer = Layer()
    layer.is_causal = False
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedOption, match="does not attend causally"):
        attention(layer, x, x, x, None)


def test_harmless_keywords_pass() -> None:
    call(
        position_ids=1, use_cache=True, cache_position=3, output_router_logits=True, output_attentions=False,
        is_causal=True, dropout=0.0, something_new=None,
    )  # fmt: skip


def test_outside_of_a_forward_it_raises() -> None:
    """A model that is still set to Paceline's attention and used by somebody else would see no mask at all."""
    backend = opened("llama")
    with pytest.raises(BackendError, match="set_attn_implementation"):
        backend._model(input_ids=torch.tensor([[1, 2, 3]]))
    backend.close()


def test_a_model_that_is_set_otherwise_is_noticed() -> None:
    """Without pages it would go on, seeing nothing of what came before."""
    backend = opened("llama")
    slot = backend.acquire()
    backend.forward([Segment(slot, (1, 2, 3), 0, 1)])
    backend._model.set_attn_implementation("sdpa")
    with pytest.raises(BackendError, match="0 of 3 layers attended through Paceline"):
        backend.forward([Segment(slot, (4,), 3, 1)])
    assert backend.length(slot) == 3
    backend._model.set_attn_implementation(NAME)
    backend.forward([Segment(slot, (4,), 3, 1)])
    backend.close()


def test_a_closed_model_attends_as_before() -> None:
    model = build("qwen3")
    model.set_attn_implementation("sdpa")
    backend = HFBackend(model)
    assert model.config._attn_implementation == NAME
    backend.close()
    backend.close()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(BackendError, match="closed"):
        backend.forward([Segment(0, (1,), 0, 1)])


# --- the probe --------------------------------------------------------------------------------------


def spoil(model: Any, how: str) -> None:
    layers = model.model.layers
    if how == "layer skipped":
        layers[1].self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    elif how == "layer twice":
        once = layers[1].self_attn.forward
        layers[1].self_attn.forward = lambda **k: (once(**k)[0] + once(**k)[0], None)
    elif how == "same index":
        layers[2].self_attn.layer_idx = 1
    elif how == "order":
        layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 1, 0
    elif how == "own window":
        # A window that only the model's mask knows.
        for layer in layers:
            layer.self_attn.sliding_window = None
    elif how == "own positions":
        rotary = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids, *a: rotary(
            x, torch.arange(x.shape[1])[None] if x.shape[1] < 24 else position_ids, *a
        )
    elif how == "keyword":
        attend = layers[2].self_attn.forward
        layers[2].self_attn.forward = lambda **k: attend(**k, position_bias=torch.zeros(1))
    elif how == "crash":
        layers[0].mlp.forward = lambda x: x.no_such_thing


@pytest.mark.parametrize(
    ("family", "how", "why"),
    [
        ("llama", "layer skipped", r"its 3 layers should call .* came from layers \[0, 2\]"),
        ("llama", "layer twice", r"\[0, 1, 1, 2\]"),
        ("llama", "same index", r"\[0, 1, 1\]"),
        ("llama", "order", r"\[1, 0, 2\]"),
        ("gemma2", "own window", "differ from those of the model's own attention, by"),
        ("llama", "own positions", "in two chunks differ from those of the same text in one, by"),
        ("llama", "keyword", "LlamaAttention passes position_bias = "),
        ("llama", "crash", "a trial forward failed with AttributeError"),
    ],
)
def test_a_model_that_goes_its_own_way_is_refused(family: str, how: str, why: str) -> None:
    """Fail closed, by name and reason, and leave the model as it was: none of these would show as an error later."""
    model = build(family)
    model.set_attn_implementation("eager")
    spoil(model, how)
    with pytest.raises(ModelFormatError, match=rf"{type(model).__name__} .*cannot be served by backend 'hf'.*{why}"):
        HFBackend(model, max_len=128)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("vocab", [2, 31, 62])
def test_a_small_vocabulary_hides_nothing(vocab: int) -> None:
    """The probe's text must not repeat one token: attention to equal tokens is the same whatever is masked."""
    model = build("gemma2", vocab_size=vocab, pad_token_id=None, bos_token_id=None)
    spoil(model, "own window")
    with pytest.raises(ModelFormatError, match="differ from those of the model's own attention"):
        HFBackend(model, max_len=128)


def test_one_backend_at_a_time_holds_a_model() -> None:
    """A second one would take Paceline's attention for the model's own, and leave it behind."""
    model = build("llama")
    model.set_attn_implementation("sdpa")
    first = HFBackend(model, max_len=64)
    with pytest.raises(
        BackendError, match=r"LlamaForCausalLM attends through Paceline already: .* close that one first"
    ):
        HFBackend(model, max_len=64)
    (rows,) = first.forward([Segment(first.acquire(), (5, 6, 7), 0, 3)])
    assert apart(rows, reference("llama").rows((5, 6, 7))) <= 1e-11
    first.close()
    assert model.config._attn_implementation == "sdpa"
    HFBackend(model, max_len=64).close()
    assert model.config._attn_implementation == "sdpa"


def test_masks_have_the_type_of_their_layer() -> None:
    """Layers alike in all but their type share no mask."""
    step = Step([Part(0, 3, 2, [0, 1])], Pools(2, SIZE, torch.device("cpu")))
    for dtype in (torch.float64, torch.float32, torch.float64):
        (view,) = step.views(0, 2, dtype)
        assert view.mask is not None
        assert view.mask.dtype == dtype


@pytest.mark.parametrize(
    ("path", "how"), [("views", "the model's own attention"), ("chains", "of a text in small steps")]
)
def test_a_window_off_by_one_is_seen_by_the_probe(path: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is longer than small windows, its tolerance finer than one key, and it takes both ways to attend."""
    model = build("mistral")
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn.config, "sliding_window", 9)
    if path == "views":
        real = Step.views
        monkeypatch.setattr(Step, "views", lambda self, window, *a, **k: real(self, window and window + 1, *a, **k))
    else:
        attend = module.attend_chains
        monkeypatch.setattr(
            module, "attend_chains", lambda q, k, v, c, cells, window, *a: attend(q, k, v, c, cells, window + 1, *a)
        )
    with pytest.raises(ModelFormatError, match=how):
        HFBackend(model, max_len=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_short_and_wide_in_one_step(dtype: torch.dtype) -> None:
    """A prompt and steps of others share a forward: each gets what it gets alone, in the model's own type."""
    backend = opened("llama", dtype, max_seqs=4)
    texts = [tokens(i, n) for i, n in enumerate((70, 9, 40, 30))]
    together = [backend.acquire() for _ in texts]
    for slot, text, short in zip(together, texts, (1, 9, 2, 8), strict=True):
        if len(text) > short:
            backend.forward([Segment(slot, text[:-short], 0, 0)])
    batch = [
        Segment(slot, text[backend.length(slot) :], backend.length(slot), 1)
        for slot, text in zip(together, texts, strict=True)
    ]
    got = backend.forward(batch)
    for slot in together:
        backend.release(slot)
    for segment, rows, text in zip(batch, got, texts, strict=True):
        slot = backend.acquire()
        if segment.start:
            backend.forward([Segment(slot, text[: segment.start], 0, 0)])
        (alone,) = backend.forward([Segment(slot, segment.tokens, segment.start, 1)])
        backend.release(slot)
        assert apart(rows, alone) < (0.1 if dtype == torch.bfloat16 else 3e-5)


THREADS = """
import sys, torch, numba
torch.set_num_threads(1)
from paceline.backend.hf.attention import attention
from paceline.backend.hf.pools import Pools
from paceline.backend.hf.step import Part, Step, current_step
layer = torch.nn.Module()
layer.layer_idx = 0
def attend():
    current_step.set(Step([Part(0, 1, 0, [0])], Pools(4, 4, torch.device("cpu"))))
    row = torch.ones(1, 1, 1, 8)
    return attention(layer, row, row, row, None)
attend()
print(torch.get_num_threads(), numba.get_num_threads())
torch.set_num_threads(64)
attend()
print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_numbers_of_threads_are_left_as_they_were() -> None:
    """Numba sets PyTorch's where it starts its own, and takes no number above the one it started with."""
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["1", "2", "64", "2"]


# --- a batch that cannot be run ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        ([], "the batch is empty"),
        ([(0, (), 5, 0)], "slot 0: 0 rows of 0 tokens"),
        ([(0, (1,), 5, 2)], "slot 0: 2 rows of 1 tokens"),
        ([(0, (1,), 5, -1)], "slot 0: -1 rows of 1 tokens"),
        ([(0, (1,), 4, 1)], "slot 0: tokens start at 4, but 5 are cached"),
        ([(0, (1,), 5, 1), (0, (1,), 5, 1)], "slot 0 comes twice"),
        ([(0, (1, 61), 5, 1)], "slot 0: token id 61 is not an integer in 0 .. 60"),
        ([(0, (-1,), 5, 1)], "slot 0: token id -1"),
        ([(0, (1.5,), 5, 1)], "slot 0: token id 1.5"),
        ([(3, (1,), 0, 1)], "slot 3 is not in use"),
        ([(-1, (1,), 0, 1)], "slot -1 is not in use"),
        ([(0, (1,) * 28, 5, 1)], "5 tokens cached and 28 new make 33; the context holds 32"),
        ([(0, (1,) * 15, 5, 1), (1, (1,) * 6, 0, 1)], "the batch has 21 tokens; one step takes 20"),
    ],
)
def test_a_batch_is_checked_before_anything_changes(segments: list[Any], why: str) -> None:
    """Also vllm#46899: a placeholder of -1 never reaches the embedding."""
    backend = opened("llama", max_len=32, max_step_tokens=20)
    slot = backend.acquire()
    assert (slot, backend.acquire()) == (0, 1)
    backend.forward([Segment(0, (1, 2, 3, 4, 5), 0, 1)])
    before, pages = contents(backend, 0), list(backend._book.pages(0))
    with pytest.raises(BackendError, match=why.replace("(", r"\(")):
        backend.forward([Segment(*segment) for segment in segments])
    assert (backend.length(0), backend.length(1), list(backend._book.pages(0))) == (5, 0, pages)
    assert all(
        (a == b).all() for x, y in zip(before, contents(backend, 0), strict=True) for a, b in zip(x, y, strict=True)
    )
    backend.check()
    backend.close()


@pytest.mark.parametrize("error", [RuntimeError("no memory"), ValueError("shape")])
def test_a_forward_that_fails_leaves_lengths_as_they_were(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the layers, with some of them written; what comes afterwards is as if it had not been."""
    text = tokens(1, 30)
    backend = opened("mistral", page_size=SIZE)
    slot = backend.acquire()
    backend.forward([Segment(slot, text[:10], 0, 1)])
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        patch.setattr(backend._model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(
            BackendError, match=rf"a forward of 5 tokens for slots \[0\] failed with {type(error).__name__}"
        ):
            backend.forward([Segment(slot, (9,) * 5, 10, 1)])
    assert (backend.length(slot), backend._book.reserved(slot)) == (10, 10)
    assert current_step.get() is None
    backend.check()
    (rows,) = backend.forward([Segment(slot, text[10:], 10, 20)])
    assert apart(rows, reference("mistral").rows(text)[10:]) <= 1e-11
    backend.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_seqs": 0}, "max_seqs = 0"),
        ({"page_size": 0}, "page_size = 0"),
        ({"kv_tokens": 0}, "kv_tokens = 0"),
        ({"max_step_tokens": 0}, "max_step_tokens = 0"),
        ({"max_len": 64, "kv_tokens": 32}, "kv_tokens = 32; allowed: at least max_len = 64"),
        ({"kv_tokens": 32, "max_step_tokens": 64}, "max_step_tokens = 64; allowed: at most kv_tokens = 32"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidParams, match=why):
        HFBackend(build("llama"), **options)


def test_what_it_says_of_itself() -> None:
    backend = HFBackend(build("llama"), max_seqs=5, page_size=24)
    info = backend.info
    assert (info.name, info.vocab_size, info.max_len, info.max_slots) == ("hf", 61, 256, 5)
    assert (info.kv_tokens, info.page_size, info.can_tree, info.can_truncate) == (1056, 24, True, True)
    assert info.max_step_tokens == 1024
    backend.close()
    assert HFBackend(build("llama"), kv_tokens=48).info.max_len == 48


# --- torch.compile ----------------------------------------------------------------------------------


def test_one_graph_whatever_the_widths() -> None:
    """The operation is opaque to torch.compile: no graph break, no graph per layer or width, and the same rows."""
    import torch._dynamo

    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    text = tokens(2, 60)
    wanted = reference("gemma2").rows(text)
    backend = opened("gemma2", page_size=SIZE)
    backend._run._forward = torch.compile(backend._model, dynamic=True, fullgraph=True, backend=count)
    slot, done = backend.acquire(), 0
    for n in (5, 3, 2, 20, 9, 1, 1):
        (rows,) = backend.forward([Segment(slot, text[done : done + n], done, n)])
        assert apart(rows, wanted[done : done + n]) <= 1e-11
        done += n
    assert len(graphs) <= 2  # a width of 1 may have its own
    torch._dynamo.reset()
    backend.close()


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_compiled_forward_must_say_the_same(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """compile=True: what was compiled is run and compared before it is used, and a model that was given stays whole."""
    from paceline.backend.hf import compiled

    def compile_forward(model: Any, **_: Any) -> Any:
        def forward(**inputs: Any) -> Any:
            out = model(**inputs)
            out.logits[:, -1] *= factor
            return out

        return forward

    monkeypatch.setattr(compiled, "compile_forward", compile_forward)
    model = build("llama")
    model.set_attn_implementation("sdpa")
    if factor == 1.0:
        backend = HFBackend(model, compile=True)
        (rows,) = backend.forward([Segment(backend.acquire(), (5, 6, 7), 0, 3)])
        assert apart(rows, reference("llama").rows((5, 6, 7))) <= 1e-11
        assert model.device.type == "cpu"
        backend.close()
    else:
        with pytest.raises(BackendError, match=r"compile=True: for 1 tokens the compiled forward of LlamaForCausalLM"):
            HFBackend(model, compile=True)
    assert model.config._attn_implementation == "sdpa"
