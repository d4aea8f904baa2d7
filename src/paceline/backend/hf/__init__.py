"""Any Hugging Face decoder through PyTorch, with KV pages that Paceline owns.

Importing this package loads neither torch nor transformers; asking it for HFBackend does, and raises
UnsupportedOption where they are missing or too old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import HFBackend as HFBackend

__all__ = ["HFBackend"]


def __getattr__(name: str) -> object:
    if name != "HFBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .runtime import require

    require()
    from .backend import HFBackend

    return HFBackend
