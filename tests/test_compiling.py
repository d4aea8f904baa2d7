"""What numba makes of our loops: cached, fresh, and as exact whoever calls them."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

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
    def squares(out, threads):
        for i in numba.prange(out.size):
            out[i] = i * i
            threads[i] = numba.get_thread_id()

    before = numba.get_num_threads()
    try:
        for number in (1, before):
            numba.set_num_threads(number)
            out, threads = np.full(1000, np.nan), np.full(1000, -1)
            squares(out, threads)
            assert (out == np.arange(1000.0) ** 2).all()
            assert set(threads) == set(range(number))
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize(
    ("layer", "order", "safe"),
    [
        ("default", ["tbb", "omp", "workqueue"], True),
        ("omp", ["tbb", "omp", "workqueue"], True),
        ("threadsafe", ["tbb", "omp", "workqueue"], True),
        ("default", ["workqueue", "omp", "tbb"], False),
        ("workqueue", ["tbb", "omp", "workqueue"], False),
        ("WORKQUEUE", ["tbb", "omp", "workqueue"], False),
        ("forksafe", ["tbb", "omp", "workqueue"], False),
        ("tbb", ["tbb", "omp", "workqueue"], False),
    ],
)
def test_threads_that_cannot_be_shared_are_not_used(layer, order, safe, monkeypatch):
    """Numba's own threads end the process where two callers meet; a layer that is not there fails the first call."""
    monkeypatch.setitem(vars(numba.config), "THREADING_LAYER", layer)
    monkeypatch.setitem(vars(numba.config), "THREADING_LAYER_PRIORITY", order)
    assert shared(lambda x: x + 1).targetoptions["parallel"] is safe


def test_without_the_openmp_library_one_thread_does_it_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.omppool", None)
    compiled = shared(lambda x: x + 1)
    assert not compiled.targetoptions["parallel"]
    assert compiled(1) == 2


def run(code, tmp_path, **environment):
    """What a process of its own prints, with a cache of its own that further ones share."""
    (tmp_path / "one.py").write_text(code)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", "import one"], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    return done.stdout.split()


SHARED = """
import numba, numpy as np
from paceline.compiling import shared
@shared
def threads(out):
    for i in numba.prange(out.size):
        out[i] = numba.get_thread_id()
out = np.full(1000, -1)
threads(out)
print(len(set(out)))
"""


def test_what_is_kept_on_disk_was_compiled_for_these_threads(tmp_path):
    """Numba's cache does not tell shared from unshared: one process would have run on the threads of another."""
    settings = [{"NUMBA_THREADING_LAYER": "omp"}, {"NUMBA_THREADING_LAYER": "workqueue"}] * 2
    shown = [run(SHARED, tmp_path, NUMBA_NUM_THREADS="2", **setting) for setting in settings]
    assert shown == [["2"], ["1"], ["2"], ["1"]]


def test_several_callers_at_once(tmp_path):
    """Two engines in one process. Numba's own threads would end it."""
    code = (
        SHARED
        + """
from threading import Thread
def work():
    for _ in range(2000):
        out = np.full(64, -1)
        threads(out)
        assert out.min() >= 0
callers = [Thread(target=work) for _ in range(4)]
[caller.start() for caller in callers]
[caller.join() for caller in callers]
print("alive")
"""
    )
    assert run(code, tmp_path, NUMBA_NUM_THREADS="2")[-1] == "alive"
