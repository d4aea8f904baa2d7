"""Paceline: lossless speculative decoding.

from paceline import LLM, SamplingParams
llm = LLM("smollm2", drafter="lookup")
print(llm.generate("Once upon a time", SamplingParams(temperature=0.7, seed=1))[0].outputs[0].text)
"""

from .errors import PacelineError
from .llm import LLM
from .params import SamplingParams
from .types import CompletionOutput, RequestOutput, SpeculationStats, StreamChunk

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "PacelineError",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
    "StreamChunk",
    "__version__",
]
