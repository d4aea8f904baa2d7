"""Convert one GGUF file into another with llama.cpp's own quantiser; run as a script in its own process.

    python quantize.py SOURCE TARGET FTYPE THREADS

The quantiser asserts on some inputs, which ends the process, and it leaves a partial TARGET behind when it fails. So
it never runs in the caller's process, and the caller gives a temporary TARGET. FTYPE is the integer
value of llama.h's llama_ftype. The exit status is 0 on success; llama.cpp's messages go to stderr.
"""

from __future__ import annotations

import ctypes
import sys


def main(source: str, target: str, ftype: str, threads: str) -> int:
    """Returns 0 on success, as llama_model_quantize does."""
    from llama_cpp import llama_cpp as native

    params = native.llama_model_quantize_default_params()
    params.ftype = int(ftype)
    params.nthread = int(threads)
    # Without it a file that is quantised already is refused halfway, and a partial target stays behind.
    params.allow_requantize = True
    return int(native.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
