"""How numba compiles our loops: on first use, on the calling thread, kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["inlined", "kernel", "shared", "summing"]

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile `function` without fast-math."""
    return _compiled(function)


def inlined(function: F) -> F:
    """Compile like `kernel`, always inline: a call left in a loop keeps LLVM from vectorising it."""
    return _compiled(function, forceinline=True)


def summing(function: F) -> F:
    """Compile like `kernel`, but with sums in the order that vectorises them, which is the same in every call."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def shared(function: F) -> F:
    """Compile like `kernel`, with the turns of `numba.prange` shared among OpenMP's threads where numba has them.

    Threads of its own numba cannot lend to two callers at once; with those alone one thread does it all.
    """
    has_openmp = (
        find_spec("numba.np.ufunc.omppool") is not None and vars(numba.config)["THREADING_LAYER"] != "workqueue"
    )
    return _compiled(function, parallel=has_openmp)


def _compiled(function: F, **changed: Any) -> F:
    # fastmath is named because a function that is compiled for a caller has the caller's where it names none.
    options: Any = {"fastmath": False, "nogil": True, "error_model": "numpy"} | changed
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that numba may write to: every process compiles for itself
        return cast(F, numba.njit(**options)(function))
    # Numba looks at the function's own file to see whether what it cached is fresh; it inlines from others too.
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = (file._source_stamp, _stamp_of(Path(function.__code__.co_filename).parent))
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
