"""What numba makes of our loops: cached, fresh, and as exact whoever calls them."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import numpy as np

from paceline.compiling import kernel, shared, summing


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch):
    """A read-only installation without a home directory: numba then refuses cache=True when it decorates."""
    real = numba.njit

    def refuse(*args, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", refuse)
    assert kernel(lambda x: x + 1)(1) == 2


def test_a_kernel_is_compiled_anew_when_what_it_inlines_has_changed(tmp_path):
    """Numba looks at a kernel's own file only: after an update others would have gone on as they were."""
    (tmp_path / "outer.py").write_text(
        "from inner import value\nfrom paceline.compiling import kernel\n"
        "@kernel\ndef total():\n    return value() + 1\n"
        "print(total())\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    shown = []
    for value in ("1", "1 + 10", "1 + 10"):
        inner = tmp_path / "inner.py"
        text = f"from paceline.compiling import inlined\n@inlined\ndef value():\n    return {value}\n"
        if not inner.exists() or inner.read_text() != text:
            inner.write_text(text)
        command = [sys.executable, "-c", "import outer"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        shown.append(done.stdout.strip())
    assert shown == ["2", "12", "12"]


def test_a_fast_caller_does_not_make_a_kernel_inexact():
    """A function that is compiled for a caller has the caller's fast-math where it says nothing of its own.

    Rounding by adding and taking away a large number is what our exponential does; fast-math takes it out.
    """
    callee = kernel(lambda x: (x + 1.5 * 2.0**52) - 1.5 * 2.0**52)
    caller = numba.njit(fastmath=True)(lambda x: callee(x))
    assert caller(0.4) == 0.0
    summed = summing(lambda x: callee(x))
    assert summed(0.4) == 0.0


def test_turns_are_shared_and_give_the_same_as_one_thread():
    @shared
    def squares(out):
        for i in numba.prange(out.size):
            out[i] = i * i

    out = np.zeros(1000)
    before = numba.get_num_threads()
    for threads in (1, before):
        numba.set_num_threads(threads)
        squares(out)
        assert (out == np.arange(1000.0) ** 2).all()
    numba.set_num_threads(before)


def test_without_openmp_one_thread_does_it_all(monkeypatch):
    """Numba's own threads end the process where two callers use them at once."""
    monkeypatch.setitem(vars(numba.config), "THREADING_LAYER", "workqueue")
    compiled = shared(lambda x: x + 1)
    assert compiled(1) == 2
    assert not compiled.targetoptions.get("parallel")
