"""The compiled forward says what the eager one says, for every width, with one graph, and never compiles in a request.

Compiling takes half a minute, so that one compiled model serves most tests: Gemma 2, which has sliding windows, soft
caps and projections to merge. The other families and dtypes are slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch._inductor.config as inductor  # noqa: E402
from torch._inductor.cpp_builder import cpp_compiler_search  # noqa: E402

from paceline.backend.hf import HFBackend  # noqa: E402
from paceline.backend.hf.attention import NAME  # noqa: E402
from paceline.backend.hf.compiled import Compiled, compile_forward  # noqa: E402
from paceline.backend.hf.runner import Runner  # noqa: E402
from paceline.errors import BackendError, UnsupportedOption  # noqa: E402
from paceline.types import Segment  # noqa: E402

from .models import SIZES, apart, build, opened, tokens  # noqa: E402

FAMILY = "gemma2"
WIDTHS = (33, 1, 5, 1, 2, 16, 1, 8, 40)  # 1 and 2 first met after the wider ones; windows of 9 are left behind
TOLERANCE = 1e-4
"""Largest difference of logits that reach 10. Kernels add up in another order, and norms are in float32 everywhere."""


def attending(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model that attends through Paceline, as compile_forward wants it."""
    model = build(family, dtype, **changes)
    model.set_attn_implementation(NAME)
    return model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> Iterator[Compiled]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield compile_forward(attending(FAMILY), cache=cache)
    torch.set_num_threads(before)


def through(forward: Compiled, family: str, dtype: torch.dtype = torch.float32) -> HFBackend:
    """A backend that runs a compiled forward."""
    backend = opened(family, dtype)
    backend._run = Runner(backend._model, forward)
    return backend


def rows_of(backend: HFBackend, last_row_only: bool = False) -> list[np.ndarray]:
    """Logits of a text in pieces of many widths."""
    slot, at, out = backend.acquire(), 0, []
    text = tokens(3, sum(WIDTHS))
    for width in WIDTHS:
        out += backend.forward([Segment(slot, text[at : at + width], at, 1 if last_row_only else width)])
        at += width
    return [rows.copy() for rows in out]


def assert_close(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for width, a, b in zip(WIDTHS, got, wanted, strict=True):
        assert np.isfinite(a).all()
        assert apart(a, b) <= TOLERANCE, width


def noise(got: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """The usual row's root mean square error. Not the mean: rounding sends a row to another expert now and then."""
    return float(np.median(np.sqrt(np.square(np.concatenate(got) - np.concatenate(exact)).mean(-1))))


@pytest.mark.parametrize("last_row_only", [False, True])
def test_compiled_is_eager(compiled: Compiled, last_row_only: bool) -> None:
    """Every width and number of rows, one included: catches a graph that was captured for the widths of its example,
    positions or windows that were taken for constants, and attention whose result lies in memory otherwise than the
    graph was promised."""
    assert_close(
        rows_of(through(compiled, FAMILY), last_row_only), rows_of(opened(FAMILY, torch.float32), last_row_only)
    )


def test_ragged_batches_and_trees(compiled: Compiled) -> None:
    """Several slots in one packed row, one of them with a tree: catches a graph that knows one sequence only."""
    out = []
    for backend in (through(compiled, FAMILY), opened(FAMILY, torch.float32)):
        slots = [backend.acquire() for _ in range(3)]
        backend.forward([Segment(slot, tokens(slot, 5 + 7 * slot), 0, 0) for slot in slots])
        starts = [backend.length(slot) for slot in slots]
        batch = [
            Segment(slots[0], (3,), starts[0], 1),
            Segment(slots[1], (4, 5, 6, 7), starts[1], 4, (-1, 0, 0, 2)),
            Segment(slots[2], (8, 9), starts[2], 2),
        ]
        out.append([rows.copy() for rows in backend.forward(batch)])
    for got, wanted in zip(*out, strict=True):
        assert apart(got, wanted) <= TOLERANCE


def test_greedy_tokens_are_equal(compiled: Compiled) -> None:
    texts = []
    for backend in (through(compiled, FAMILY), opened(FAMILY, torch.float32)):
        slot, text = backend.acquire(), list(tokens(7, 12))
        for _ in range(40):
            at = backend.length(slot)
            (rows,) = backend.forward([Segment(slot, tuple(text[at:]), at, 1)])
            text.append(int(rows[-1].argmax()))
        texts.append(text)
    assert texts[0] == texts[1]


def test_nothing_is_compiled_after_loading(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """No width, however new, traces, compiles or starts a process: catches a lazy compiler inside a request."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled inside a request")

    backend = through(compiled, FAMILY)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load_async", refuse)
    counted = dict(torch._dynamo.utils.counters["stats"])
    for width in (1, 3, 7, 11, 64, 100):
        slot = backend.acquire()
        for rows in (1, width):
            backend.forward([Segment(slot, tokens(width, width), 0, rows)])
            backend.truncate(slot, 0)
        backend.release(slot)
    assert dict(torch._dynamo.utils.counters["stats"]) == counted


def test_projections_with_one_input_are_one_product(compiled: Compiled) -> None:
    """q, k, v are one, gate and up are one, o and down are their own: four a layer, and the head. Catches a setting of
    inductor that is gone or no longer merges."""
    assert compiled.path is not None
    with zipfile.ZipFile(compiled.path) as package:
        (code,) = [package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp")]
    products = re.findall(r"aoti_torch_\w*(?:linear|mm)\w*\(", code)
    assert len(products) == 4 * SIZES["num_hidden_layers"] + 1


def test_found_again_on_disk(compiled: Compiled, cache: Path, no_compiler: None) -> None:
    """The second time nothing is compiled, and no compiler is needed: catches a name that depends on the process.

    Another dtype or other weights are not what was kept."""
    stages: list[tuple[str, int, int | None]] = []
    again = compile_forward(attending(FAMILY), cache=cache, progress=lambda *stage: stages.append(stage))
    assert again.from_cache
    assert not compiled.from_cache
    assert again.path == compiled.path
    assert list(cache.iterdir()) == [compiled.path]  # nor is the weights' second copy left behind
    assert_close(rows_of(through(again, FAMILY)), rows_of(through(compiled, FAMILY)))
    assert stages
    assert all(total is None for _, _, total in stages)
    assert not any(what.startswith("compiling") for what, _, _ in stages)
    for other in (attending(FAMILY, seed=2), attending(FAMILY, torch.bfloat16)):
        with pytest.raises(UnsupportedOption, match=r"C\+\+ compiler"):
            compile_forward(other, cache=cache)


def test_threads_are_part_of_the_name(compiled: Compiled, cache: Path, no_compiler: None) -> None:
    """Loops are compiled for a number of threads: catches code for one thread that runs with two."""
    torch.set_num_threads(2)  # the fixture of this folder sets it back
    with pytest.raises(UnsupportedOption):
        compile_forward(attending(FAMILY), cache=cache)


@pytest.fixture
def no_compiler() -> Iterator[None]:
    cpp_compiler_search.cache_clear()  # what was found before is remembered
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield
    cpp_compiler_search.cache_clear()


def test_no_compiler(tmp_path: Path, no_compiler: None) -> None:
    """Said before anything is compiled, by name, with a way out: catches a stack of somebody else's error."""
    with pytest.raises(UnsupportedOption, match=r"needs a C\+\+ compiler.*CXX.*compile=False.*tiny"):
        compile_forward(attending("llama"), name="tiny", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BackendError, and no half-written file that the next start would load."""

    def fail(*_: Any, package_path: str, **__: Any) -> None:
        Path(package_path).write_bytes(b"half")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(BackendError, match=r"llama-x.*no space left"):
        compile_forward(attending("llama"), name="llama-x", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_compiled_anew(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a truncated download or a full disk that breaks every later start."""
    assert compiled.path is not None
    whole = compiled.path.read_bytes()
    damaged = tmp_path / compiled.path.name
    damaged.write_bytes(whole[: len(whole) // 2])

    def compile_again(*_: Any, package_path: str, **__: Any) -> None:
        Path(package_path).write_bytes(whole)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_again)
    again = compile_forward(attending(FAMILY), cache=tmp_path)
    assert not again.from_cache
    assert damaged.read_bytes() == whole


def test_settings_are_as_before(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's settings belong to the process: catches freezing that is left on for somebody else's torch.compile."""
    before = inductor.save_config_portable()

    def compile_nothing(*_: Any, inductor_configs: dict[str, Any], package_path: str, **__: Any) -> None:
        with inductor.patch(inductor_configs):
            Path(package_path).write_bytes(b"")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)
    with pytest.raises(BackendError, match="does not load"):
        compile_forward(attending("llama"), cache=tmp_path)
    assert inductor.save_config_portable() == before
    assert not inductor.freezing
    assert not torch.fx.experimental._config.backed_size_oblivious
    assert torch.is_grad_enabled()


def test_code_that_is_no_graph(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Experts one by one depend on the data: refused by name with what to do, and without pages of graph on stderr."""
    with pytest.raises(UnsupportedOption, match=r"moe .*MixtralForCausalLM.*compile=False or .*grouped_mm"):
        compile_forward(attending("mixtral"), name="moe", cache=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_no_cache_of_its_own(compiled: Compiled) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(BackendError, match="use_cache"):
        compiled(ids, ids, use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "gpt_oss", "mixtral", "olmo2"]
)
def test_families(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Biases, norms on queries, fused projections, sinks, experts: what one family has and Gemma 2 has not.

    In bfloat16 the compiled forward is no further from the exact logits of the same weights than the eager one."""
    model, eager = attending(family, dtype), opened(family, dtype)
    if hasattr(model.config, "num_experts_per_tok"):
        if dtype == torch.float64:
            pytest.skip("the grouped kernel knows no float64")
        model.set_experts_implementation("grouped_mm")
    got, wanted = rows_of(through(compile_forward(model, cache=tmp_path), family, dtype)), rows_of(eager)
    if dtype != torch.bfloat16:
        assert_close(got, wanted)
        return
    exact = rows_of(HFBackend(build(family, dtype).to(torch.float64), max_len=128))
    assert 0 < noise(got, exact) <= 1.5 * noise(wanted, exact)


@pytest.mark.slow
def test_another_process_finds_it(compiled: Compiled, cache: Path) -> None:
    """Catches a name made of something that differs from process to process, such as hashes or addresses."""
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from tests.backend.hf.test_compiled import FAMILY, attending\n"
        "from paceline.backend.hf.compiled import compile_forward\n"
        "print(compile_forward(attending(FAMILY), cache=Path(sys.argv[1])).from_cache)"
    )
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(cache)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": hashes},
        )
        assert done.stdout.split() == ["True"]
