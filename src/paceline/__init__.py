"""Paceline: lossless speculative decoding."""

from .errors import PacelineError
from .params import SamplingParams

__version__ = "0.1.0"

__all__ = ["PacelineError", "SamplingParams", "__version__"]
