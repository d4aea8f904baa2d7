"""Paceline: lossless speculative decoding.

from paceline import LLM, SamplingParams
llm = LLM("smollm2", drafter="lookup")
print(llm.generate("Once upon a time", SamplingParams(temperature=0.7, seed=1))[0].outputs[0].text)
"""

from typing import TYPE_CHECKING, Any

from .errors import PacelineError
from .params import SamplingParams
from .types import (
    CompletionOutput,
    DraftContext,
    Drafter,
    Logprob,
    Proposal,
    RequestOutput,
    Score,
    SpeculationStats,
    StreamChunk,
)

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "DraftContext",
    "Drafter",
    "Logprob",
    "PacelineError",
    "Proposal",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "SpeculationStats",
    "StreamChunk",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Both bring numba, which takes half a second to import: `paceline --help` need not wait for it.
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "AsyncEngine":
        from .async_engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
