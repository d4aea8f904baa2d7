"""How numba compiles our loops: on first use, kept on disk; and the one instruction it has no word for."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LINE", "inlined", "kernel", "prefetch", "shared", "summing"]

F = TypeVar("F", bound=Callable[..., Any])
LINE = 64  # bytes that a processor fetches at once


def kernel(function: F) -> F:
    """Compile `function` without fast-math, to run on the calling thread."""
    return _compiled(function)


def inlined(function: F) -> F:
    """Compile like `kernel`, always inline: a call left in a loop keeps LLVM from vectorising it."""
    return _compiled(function, forceinline=True)


def summing(function: F) -> F:
    """Compile like `kernel`, but with sums in the order that vectorises them, which is the same in every call."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def shared(function: F) -> F:
    """Compile like `kernel`, with the turns of `numba.prange` shared among threads of OpenMP or TBB.

    Several callers may use those at once. Numba's own threads end the process where two meet, and are not used.
    """
    return _compiled(function, parallel=_threads_are_safe())


def _threads_are_safe() -> bool:
    """Whether numba, as it is set, will start threads of OpenMP or TBB and no others."""
    settings = vars(numba.config)
    layer, order = settings["THREADING_LAYER"].lower(), settings["THREADING_LAYER_PRIORITY"]
    if layer not in ("omp", "threadsafe") and not (
        layer == "default" and order.index("omp") < order.index("workqueue")
    ):
        return False
    try:
        import_module("numba.np.ufunc.omppool")  # the file may be there and the library that it needs not
    except ImportError:
        return False
    return True


def _compiled(function: F, **changed: Any) -> F:
    # What is not named, a function that is compiled for a caller has from that caller, and keeps on disk.
    options: Any = {"fastmath": False, "forceinline": False, "parallel": False} | changed
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that numba may write to: every process compiles for itself
        return cast(F, numba.njit(**options)(function))
    # Numba asks the function's own file whether what it kept is fresh; but it inlines from others, and by options.
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        folder = Path(function.__code__.co_filename).parent
        file._source_stamp = (file._source_stamp, _stamp_of(folder), options["parallel"])
    return cast(F, compiled)


@lru_cache
def _stamp_of(folder: Path) -> tuple[tuple[int, int], ...]:
    """Time and size of the files that kernels are inlined from: rng.py, sampling/kernels, and those of `folder`."""
    here = Path(__file__).parent
    files = {Path(__file__), here / "rng.py", *(here / "sampling" / "kernels").glob("*.py")}
    if folder != here:
        files.update(folder.glob("*.py"))
    stats = [path.stat() for path in sorted(files)]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


def _ask_for(typing_context: Any, row: Any, i: Any) -> Any:
    """Ask for the memory of row[i] without waiting; i may lie behind the end, for nothing is read or changed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        helpers: Any = cgutils
        function = helpers.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        where = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        builder.call(function, [where, word(0), word(2), word(1)])  # to read, into the second-level cache, data
        return context.get_dummy_value()

    return types.void(row, types.int64), generate


prefetch: Any = intrinsic(_ask_for)
