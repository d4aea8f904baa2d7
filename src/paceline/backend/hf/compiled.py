"""The compiled mode: the whole forward as one graph, compiled ahead of time, kept on disk.

torch.export captures the model with Paceline's attention as one opaque operation, for any number of tokens and rows;
AOTInductor turns the graph into a shared library in which weights are packed the way oneDNN reads them and projections
that share their input (q/k/v, gate/up) are one product. What comes out has no tracing, no guards and no compiler left
in it: a width that was never seen runs the same code, so nothing can be compiled inside a request.

The eager model stays the reference; tests compare the two. On a GPU this is not tested.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as _shape_config
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache

from ...errors import BackendError, UnsupportedOption
from ...paths import cache_dir

__all__ = ["Compiled", "Output", "compile_forward"]

Progress = Callable[[str, int, int | None], None]

shape_config: Any = _shape_config  # its patch() comes to be while it is imported
# What of inductor's settings differs from its defaults; they hold while the graph is compiled and no longer.
SETTINGS: dict[str, Any] = {
    "freezing": True,  # weights become constants, and on a CPU are packed for oneDNN
    "cpp.enable_concat_linear": True,  # projections that share their input are one product; elsewhere the default
    "size_asserts": False,
    "alignment_asserts": False,
}
TOKENS, ROWS = 5, 3  # of the example; sizes that equal others would not be told apart from them


class Output(NamedTuple):
    """What a compiled forward returns, by the name that models use. logits: [1, rows, V]."""

    logits: Tensor


class Compiled:
    """A model's forward as a compiled graph. Called like the model, from one thread at a time.

    path: the file it was loaded from. from_cache: whether it lay there already.
    """

    def __init__(self, graph: Callable[..., Tensor], path: Path, from_cache: bool) -> None:
        self._graph = graph
        self.path = path
        self.from_cache = from_cache

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | None = None, use_cache: bool = False
    ) -> Output:
        """input_ids, position_ids: int64[1, T], T >= 1. logits_to_keep: int64[R], R >= 1, of the T rows; None is all.

        Runs inside a step, as the eager forward does. Raises BackendError for use_cache=True.
        """
        if use_cache:
            raise BackendError("a compiled forward keeps no cache of its own; use_cache must be False")
        if logits_to_keep is None:
            logits_to_keep = torch.arange(input_ids.shape[1], device=input_ids.device)
        return Output(self._graph(input_ids, position_ids, logits_to_keep))


def compile_forward(
    model: Any, *, name: str | None = None, cache: Path | None = None, progress: Progress | None = None
) -> Compiled:
    """Compile `model`, which attends through Paceline already, or load what was compiled from the same model before.

    model: a PreTrainedModel in eval mode; it is only read. The result holds weights of its own: whoever has no more use
    for the model's may give them up (`model.to("meta")`). name: of the model, for messages. cache: the folder where
    results are kept, with the weights in them; default: `compile` in Paceline's cache. A result is
    found again for equal code, weights, dtype, threads (torch.get_num_threads()), processor and versions.
    progress(description, 0, None) says what is being done; how long it will take nobody knows.

    Raises UnsupportedOption where there is no C++ compiler and nothing in the cache, or where the model's code cannot
    be captured as one graph; BackendError where compiling fails.
    """
    called = name or type(model).__name__
    folder = cache_dir() / "compile" if cache is None else cache

    def say(what: str) -> None:
        if progress is not None:
            progress(what, 0, None)

    with _quiet():
        say(f"capturing the graph of {called}")
        program = _captured(model, called)
        say(f"looking for {called} among what was compiled before")
        path = folder / f"{type(model).__name__}-{_fingerprint(program)}.pt2"
        graph = _load(path) if path.is_file() else None
        found = graph is not None
        if graph is None:
            say(f"compiling {called}, about a minute, once")
            _compile(program, path, called)
            graph = _load(path)
    if graph is None:
        raise BackendError(f"compile=True: {path} was compiled for {called} just now and does not load")
    return Compiled(graph, path, found)


class _Forward(nn.Module):
    """The tensors in, the wanted rows of logits out: what is captured."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        options = {"logits_to_keep": rows} if self.keeps_rows else {}
        out = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
        logits: Tensor = out.logits
        return logits if self.keeps_rows else logits.index_select(1, rows)


def _captured(model: Any, called: str) -> Any:
    """The forward as a torch.export.ExportedProgram for 1 .. any tokens and 1 .. any rows."""
    device = model.device
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(TOKENS, device=device)[None]
    rows = torch.arange(ROWS, device=device)
    width = torch.export.Dim("tokens", min=1)
    try:
        # Without backed_size_oblivious a size is taken to be at least 2, and one token would need a graph of its own.
        # torch.export prints half of the graph where it fails.
        with torch.no_grad(), shape_config.patch(backed_size_oblivious=True), redirect_stderr(StringIO()):
            return torch.export.export(
                _Forward(model),
                (ids, positions, rows),
                dynamic_shapes=({1: width}, {1: width}, {0: torch.export.Dim("rows", min=1)}),
                strict=False,
            )
    except Exception as error:
        experts = getattr(model.config, "_experts_implementation", None)
        hint = " or model.set_experts_implementation('grouped_mm')" if experts == "eager" else ""
        raise UnsupportedOption(
            f"compile=True: the code of {called} ({type(model).__name__}) cannot be captured as one graph, use "
            f"compile=False{hint} ({_brief(error)})"
        ) from error


def _fingerprint(program: Any) -> str:
    """Names everything the compiled code depends on, weights included."""
    digest = hashlib.sha256()
    vector = torch.backends.cpu.get_cpu_capability()
    facts = (torch.__version__, torch.get_num_threads(), vector, _processor(), sorted(SETTINGS.items()))
    for text in (facts, program.graph_module.code, program.graph_signature, program.range_constraints):
        digest.update(str(text).encode())
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()[:32]


def _processor() -> str:
    """The instruction sets of this machine: code compiled for one processor may be illegal on another."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    import platform

    return f"{platform.machine()} {platform.processor()}"


def _compile(program: Any, path: Path, called: str) -> None:
    """Compile `program` and put the result at `path`, whole or not at all."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UnsupportedOption(
            f"compile=True needs a C++ compiler (g++, or the one the environment variable CXX names), and none is "
            f"found here; install one or use compile=False. Nothing compiled for {called} lies at {path}"
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            package = str(Path(scratch) / "graph.pt2")
            # Inductor would keep what the package is made of, the weights a second time.
            inductors_own = fresh_cache(dir=scratch)
            with inductors_own, torch.no_grad(), shape_config.patch(backed_size_oblivious=True):
                torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=dict(SETTINGS))
            Path(package).replace(path)
    except Exception as error:
        raise BackendError(f"compile=True: compiling {called} into {path} failed ({_brief(error)})") from error


def _load(path: Path) -> Callable[..., Tensor] | None:
    """The graph in a file; None where the file is damaged or was made by something else."""
    try:
        graph: Callable[..., Tensor] = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    except (RuntimeError, OSError, ValueError, KeyError):
        return None
    return graph


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of the compiler concern its authors; those of the caller's are as before afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
