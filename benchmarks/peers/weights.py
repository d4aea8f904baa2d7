"""A GGUF's weights as a folder that transformers and vLLM load, written once.

    python weights.py MODEL.gguf CACHE      prints the folder; whoever shares CACHE finds it there

Both sides of a comparison then run the same numbers: what the file's blocks stand for, in bfloat16. (A BF16 file that
`paceline pull` made from a quantised one holds just these.)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from protocol import RefusedError


def default_cache() -> Path:
    """`peers` in Paceline's own cache."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline") / "peers"


def folder_of(place: Path, cache: Path) -> Path:
    """The folder to load: `place` itself, or the one in `cache` with the weights and the tokenizer of a .gguf file,
    which is made where it is missing. Raises RefusedError."""
    if place.is_dir():
        return place
    if place.suffix != ".gguf" or not place.is_file():
        raise RefusedError(f"model {str(place)!r}; allowed: a folder in Hugging Face's format, or a .gguf file")
    stat = place.stat()
    folder = cache / f"{place.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache, prefix=".part-"))
        try:
            _write(place, made)
            made.rename(folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return folder


def _write(place: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers needs it to read one
        import torch
        import transformers
    except ImportError as error:
        raise RefusedError(f"{place} is not converted yet, and that needs {error.name}: run weights.py once") from None
    where = {"gguf_file": place.name}
    how: dict[str, Any] = {"dtype": torch.bfloat16}
    if packed := getattr(transformers, "GgufConfig", None):  # releases that have it leave weights packed otherwise
        how["quantization_config"] = packed(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(place.parent), **where, **how)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(place.parent), **where).save_pretrained(folder)


if __name__ == "__main__":
    print(folder_of(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else default_cache()))
