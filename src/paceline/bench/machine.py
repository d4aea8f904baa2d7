"""What a benchmark ran on, so that a number can be judged later."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..backend.llamacpp.threads import physical_cores
from ..models import validate_gguf
from ..opening import chosen_backend, is_toy

# general.file_type of a GGUF -> its name.
QUANTISATIONS: dict[Any, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
PACKAGES = ("paceline", "numpy", "numba", "llama-cpp-python", "torch", "transformers")


def machine() -> dict[str, Any]:
    """Processor, memory, system, and the versions of what computes."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "physical_cores": physical_cores(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it, or at least its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def memory_gib() -> float | None:
    """Memory in GiB; None where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def versions() -> dict[str, str]:
    """Of those of PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def model_facts(name: str, path: str, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """What was opened: its file, how large and how quantised, on which backend, with which options."""
    facts: dict[str, Any] = {
        "name": name,
        "backend": chosen_backend(path, backend),
        "options": {key: value for key, value in options.items() if value is not None and key != "backend"},
    }
    file = Path(path)
    if not is_toy(path) and file.exists():
        files = [f for f in file.iterdir() if f.is_file()] if file.is_dir() else [file]
        facts["file"], facts["bytes"] = file.name, sum(f.stat().st_size for f in files)
        if file.suffix == ".gguf":
            kind = validate_gguf(file).metadata.get("general.file_type")
            facts["quantisation"] = QUANTISATIONS.get(kind, f"file type {kind}")
    return facts | _threads_and_dtype(facts["backend"], options)


def _threads_and_dtype(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    threads = options.get("n_threads")
    if backend == "toy":
        return {"threads": 1, "dtype": "float64"}
    if backend == "llamacpp":
        return {"threads": threads or physical_cores(), "dtype": "as the file has it"}
    torch = sys.modules.get("torch")  # the backend has loaded it
    known = torch.get_num_threads() if torch is not None else threads
    return {"threads": known, "dtype": options.get("dtype") or "the model's (bfloat16 for a GGUF)"}
